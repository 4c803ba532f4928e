"""The daemon inside of this process: a batch of prompts over one shared beginning. ``python embedded.py [STATE_DIR]``; a second run with a directory begins warm."""

from __future__ import annotations

import os
import sys

import kvd

RULES = "You answer questions about a museum in one short sentence. It opens at ten, closes at six, and is closed on Mondays. "
QUESTIONS = ("When does it open?", "When does it close?", "On which day is it closed?")


def main() -> None:
    # KVD_EXAMPLE_EXECUTOR=fake needs no model
    settings = {"executor": os.environ.get("KVD_EXAMPLE_EXECUTOR", "torch"), "kv_memory": "256MiB"}
    state_dir = sys.argv[1] if len(sys.argv) > 1 else None
    with kvd.LLM(state_dir=state_dir, **settings) as llm:
        chats = [[{"role": "system", "content": RULES}, {"role": "user", "content": question}] for question in QUESTIONS]
        for question, answer in zip(QUESTIONS, llm.generate(chats, max_tokens=24, temperature=0.0), strict=True):
            print(f"{question} {answer.text.strip()}  [{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} tokens were there]")


if __name__ == "__main__":
    main()
