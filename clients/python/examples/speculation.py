"""The same answer with and without tokens proposed ahead, and what that saves.

python examples/speculation.py [--connect ENDPOINT] [PROMPT]
"""

from __future__ import annotations

import argparse

from kvd_client import Client

TEXT = (
    "The harbour master writes down each ship that comes in: its name, its cargo, the port from which it sailed, and the hour of its arrival. "
    "In the evening he reads the list aloud to the pilots, who sign it, and the clerk puts it into the green cabinet. "
)
PROMPT = f"{TEXT}\n\nThe same text again, word for word:\n\n{TEXT}\n\nAnd once more, word for word:\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    arguments = parser.parse_args()

    with Client(arguments.connect) as client:
        client.wait_ready(timeout_s=120)
        texts = []
        for mode in ("off", "ngram"):
            answer = client.generate(arguments.prompt, max_tokens=80, temperature=0, speculation=mode)
            texts.append(answer.text)
            usage, timings = answer.usage, answer.timings
            drafted = (
                f"{usage.accepted_tokens} of {usage.drafted_tokens} proposed tokens accepted" if usage.drafted_tokens else "none proposed"
            )
            print(f"{mode:6} {usage.completion_tokens / timings.total_ms * 1000:6.1f} tokens/s, {drafted}")
        print("the same answer" if texts[0] == texts[1] else "different answers: the kernels round by what they compute together")


if __name__ == "__main__":
    main()
