"""Tokens a second with and without drafts, in turn on one daemon, quickest of several repeats: tasks that repeat their prompt, and tasks that don't.

    python tests/bench/bench_speculation.py ENDPOINT [--max-tokens 160] [--repeats 5] [--modes off,auto]

Each task is answered in every mode with the same seed; the answers must be the same, token for token. Rates are those of decoding: tokens after the first, over the time since it.
"""

from __future__ import annotations

import argparse

from kvd_client.client import Client

PROGRAM = """def total_price(items, tax_rate):
    subtotal = 0
    for item in items:
        subtotal += item.price * item.quantity
    tax = subtotal * tax_rate
    return subtotal + tax
"""
PEOPLE = "Anna is 31 and lives in Paris. Bob is 45 and lives in Rome. Carla is 27 and lives in Madrid. Dan is 38 and lives in Berlin."
STORY = "Write a story about a fisherman who finds a lamp on the beach."
TASKS = {
    "copy a program": (f"Repeat this text word for word:\n\n{PROGRAM}", 0.0),
    "extract as JSON": (f"Extract the people as a JSON list with name, age, city: {PEOPLE}", 0.0),
    "story, greedy": (STORY, 0.0),
    "story, drawn": (STORY, 1.0),
}


def rate(client: Client, text: str, temperature: float, mode: str, seed: int, max_tokens: int) -> tuple[float, object]:
    answer = client.chat(
        [{"role": "user", "content": text}], max_tokens=max_tokens, temperature=temperature, seed=seed, speculation=mode, ignore_eos=True
    )
    seconds = (answer.timings.total_ms - answer.timings.ttft_ms) / 1000
    return (answer.usage.completion_tokens - 1) / seconds, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--modes", default="off,auto")
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    with Client(arguments.endpoint) as client:
        for name, (text, temperature) in TASKS.items():
            best = dict.fromkeys(modes, 0.0)
            drafted = dict.fromkeys(modes, "")
            for seed in range(arguments.repeats):
                said = []
                for mode in modes if seed % 2 == 0 else reversed(modes):
                    tokens_s, answer = rate(client, text, temperature, mode, seed if temperature else 0, arguments.max_tokens)
                    best[mode] = max(best[mode], tokens_s)
                    said.append(answer.choices[0].token_ids)
                    drafted[mode] = f"{answer.usage.accepted_tokens or 0}/{answer.usage.drafted_tokens or 0}"
                assert all(each == said[0] for each in said), f"{name}: the modes say different things"
            columns = (
                f"{mode} {best[mode]:6.1f} tokens/s ({best[mode] / best[modes[0]]:4.2f}, {drafted[mode]} accepted)" for mode in modes
            )
            print(f"{name:18}", "  ".join(columns), flush=True)


if __name__ == "__main__":
    main()
