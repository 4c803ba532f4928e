"""Pin a system prompt, then ask through restarts of the daemon: kill or restart it while this runs, and see that the prompt is still warm.

python examples/pin_and_restart.py [--connect ENDPOINT] [--questions N]
"""

from __future__ import annotations

import argparse
import time

from kvd_client import Client

SYSTEM_PROMPT = "You are the assistant of a library. You know its opening hours, its rules and its catalogue. " + " ".join(
    f"Rule {number}: books of shelf {number} may be borrowed for {7 + number % 21} days." for number in range(1, 60)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    parser.add_argument("--questions", type=int, default=20)
    arguments = parser.parse_args()

    system = {"role": "system", "content": SYSTEM_PROMPT}
    # A restart takes seconds; two minutes without any daemon are an error.
    with Client(arguments.connect, reconnect_timeout_s=120) as client:
        client.wait_ready(timeout_s=120)
        pinned = client.pin("library", messages=[system])
        print(f"pinned: {pinned.details}")

        for number in range(1, arguments.questions + 1):
            question = {"role": "user", "content": f"How long may I borrow a book of shelf {number}?"}
            # Asked of a daemon that dies, this is answered by the next one.
            completion = client.chat([system, question], max_tokens=24, temperature=0)
            usage = completion.usage
            print(
                f"{client.ping().instance[:8]}: {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached ({usage.restored_tokens} from disk), "
                f"first token after {completion.timings.ttft_ms:.1f} ms: {completion.text!r}"
            )
            time.sleep(0.5)

        client.unpin("library")


if __name__ == "__main__":
    main()
