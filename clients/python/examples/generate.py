"""Continue a text, whole and with alternatives.

python examples/generate.py [--connect ENDPOINT] [PROMPT]
"""

from __future__ import annotations

import argparse

from kvd_client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    arguments = parser.parse_args()

    with Client(arguments.connect) as client:
        client.wait_ready(timeout_s=120)

        greedy = client.generate(arguments.prompt, max_tokens=20, temperature=0)
        print(f"greedy:  {greedy.text!r} ({greedy.finish_reason})")

        # Three samples share the computation of the prompt. The seed makes them the same at every run.
        samples = client.generate(arguments.prompt, max_tokens=20, temperature=0.8, top_p=0.95, seed=7, n=3)
        for choice in samples.choices:
            print(f"sample {choice.index}: {choice.text!r}")

        usage, timings = samples.usage, samples.timings
        print(f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached; first token after {timings.ttft_ms:.1f} ms")


if __name__ == "__main__":
    main()
