"""A conversation on the terminal, answered word by word. Ctrl-C ends the answer, not the program; Ctrl-D ends that.

python examples/chat_stream.py [--connect ENDPOINT]
"""

from __future__ import annotations

import argparse

from kvd_client import Client
from kvd_client.errors import Interrupted, KvdError


def answer(client: Client, messages: list[dict[str, str]]) -> str:
    """Print an answer as it comes; the text that came."""
    text = ""
    try:
        with client.chat(messages, stream=True, max_tokens=400, temperature=0.7) as stream:
            for chunk in stream:
                text += chunk.text
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")  # leaving the with block has aborted it in the daemon
    except Interrupted:
        print(" [the daemon went away; ask again]", end="")
    print()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    arguments = parser.parse_args()

    messages = [{"role": "system", "content": "You are a helpful assistant who answers in a few sentences."}]
    with Client(arguments.connect) as client:
        client.wait_ready(timeout_s=120)
        while True:
            try:
                question = input("> ")
            except (EOFError, KeyboardInterrupt):
                print()
                return
            messages.append({"role": "user", "content": question})
            try:
                messages.append({"role": "assistant", "content": answer(client, messages)})
            except KvdError as error:
                print(f"[{error}]")
                messages.pop()


if __name__ == "__main__":
    main()
