"""The most likely continuations of a text, by beam search and as the best of several samples.

python examples/beam_search.py [--connect ENDPOINT] [--width W] [PROMPT]
"""

from __future__ import annotations

import argparse

from kvd_client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    arguments = parser.parse_args()

    with Client(arguments.connect) as client:
        client.wait_ready(timeout_s=120)

        # The beams share the prompt's blocks and whatever else they have in common.
        beams = client.generate(arguments.prompt, max_tokens=20, beam_width=arguments.width, n=min(2, arguments.width), early_stopping=True)
        for choice in beams.choices:
            print(f"beam {choice.index}: {choice.text!r} (score {choice.score:.3f}, {choice.finish_reason})")

        best = client.generate(arguments.prompt, max_tokens=20, temperature=0.8, seed=7, best_of=4)
        print(f"best of 4 samples: {best.text!r} (log probability {best.choices[0].cumulative_logprob:.3f})")


if __name__ == "__main__":
    main()
