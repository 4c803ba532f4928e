"""Which of several texts the model finds likeliest, and an answer without a word.

python examples/score.py [--connect ENDPOINT] [TEXT...]
"""

from __future__ import annotations

import argparse

from kvd_client import Client

TEXTS = ("Water boils at 100 degrees.", "Water boils at 100 bananas.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    parser.add_argument("texts", nargs="*", default=TEXTS)
    arguments = parser.parse_args()

    with Client(arguments.connect) as client:
        client.wait_ready(timeout_s=120)

        # One connection, all at once; the daemon computes them side by side.
        scored = client.generate_many(arguments.texts, echo=True, prompt_logprobs=0, max_tokens=1)
        for completion in scored:
            assert completion.prompt is not None
            nats = sum(entry.logprob for entry in completion.prompt.logprobs)
            print(f"{nats / max(1, len(completion.prompt.logprobs)):8.3f} nats a token: {completion.prompt.text!r}")

        plain = client.generate(arguments.texts[0], max_tokens=20, temperature=0)
        word = next((word for word in plain.text.split() if word), "the")
        without = client.generate(arguments.texts[0], max_tokens=20, temperature=0, bad_words=word)
        print(f"without {word!r}: {without.text!r}")


if __name__ == "__main__":
    main()
