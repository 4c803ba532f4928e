"""Answer one prompt with the base model and with every LoRA adapter of the daemon's.

python examples/adapters.py [--connect ENDPOINT] [PROMPT]
"""

from __future__ import annotations

import argparse

from kvd_client import Client
from kvd_client.errors import AdapterUnusable, NotFound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    arguments = parser.parse_args()

    with Client(arguments.connect) as client:
        client.wait_ready(timeout_s=120)
        for name in ("", *(adapter.name for adapter in client.adapters())):
            try:
                answer = client.generate(arguments.prompt, max_tokens=20, temperature=0, adapter=name)
            except (AdapterUnusable, NotFound) as error:  # NotFound: taken away since it was listed
                print(f"{name}: can't be used: {error}")
                continue
            print(f"{name or 'base model'}: {answer.text!r}")
        for adapter in client.adapters():
            print(f"{adapter.name} is {adapter.state}{f', rank {adapter.rank}, digest {adapter.digest[:12]}' if adapter.digest else ''}")


if __name__ == "__main__":
    main()
