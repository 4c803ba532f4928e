"""Hit rates of the eviction policies on one hour of real conversations: prints them, and writes docs/benchmarks-trace.md.

    python tests/bench/bench_trace.py [--out docs/benchmarks-trace.md]

Deterministic; how it is measured is in trace_replay.py and in the page that it writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trace_replay import BLOCK_TOKENS, Hits, policies, read_trace, replay

from kvd.cache.eviction import LruPolicy

SIZES_BLOCKS = (4000, 7900, 16900)
"""Such that over the whole trace `lru` finds about a quarter, a half and three quarters of what an infinite cache finds."""

_PAGE = """# Eviction policies on a real trace

Written by `make bench-trace` (`tests/bench/bench_trace.py`); every run gives the same figures. One hour of real chat traffic ({requests} requests,
{tokens} prompt tokens in full blocks of 512; `tests/bench/data/README.md` names the source) goes through the real `CacheManager`, one request after
another, at the trace's own grain: a block of the cache stands for one of its blocks of 512 tokens. The sizes are such that over the whole hour `lru` finds about a
quarter, a half and three quarters of what an infinite cache finds.

*tokens* is the share of the prompts' tokens that were found in the cache; *cost* the share of the work of computing all of them that was saved, a token at
position p costing 1 + p / 4096. *optimum* is Belady's clairvoyant choice: it is the exact optimum of *tokens* over all policies (the reason is in
`tests/bench/trace_replay.py`, and a test compares it with exhaustive search), and says nothing about the optimum of *cost*.

{tables}
## What `cost` does, and how it was chosen

GreedyDual: the value of a block is fixed when a use of it begins or ends, as L + P^(3/4) x C^(1/8); the block of least value leaves, and L rises to that
value. P is measured while serving: of the blocks with so many uses whose life came to an end, by a further use or by eviction, the share that was used again. C is
the cost of computing the block again, 1 + p / 4096. Use counts of blocks that left are remembered, as many as the pool has blocks.

What was tried; the first two on the whole hour, the rest on its first half:

* GreedyDual-Size-Frequency as published (the number of uses itself for P, C as it is) finds *fewer* tokens than `lru` at the half and three-quarter sizes: reuse
  in conversations falls quickly with idle time, so that twice the chance, or twice the cost, is not worth twice the wait. Hence the roots.
* The value must be fixed at the use. Fixed when a block becomes a leaf, a path that nobody wants is young again at each of its blocks, and far less is found than by `lru`.
* A larger share of C saves a little more work and finds fewer tokens; without C less work is saved and no more tokens are found.
* The depth of a block and the length of the request that computed it tell something about reuse, but helped little beyond the smallest size.
* Remembering use counts helped at every size, more than anything else.

The exponents and the memory were chosen on the first half; the second, on which they were not, is the test of that, and the whole hour includes the first half. A cache that
begins empty needs a while before P means anything, which weighs more on half an hour than on an hour.
`cost` is the default of `cache.eviction_policy` for these figures.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    requests = read_trace()
    half = len(requests) // 2
    parts = {
        "Whole hour": requests,
        "First half (chosen on)": requests[:half],
        "Second half (held out)": requests[half:],
    }
    tables = ""
    for title, part in parts.items():
        table = _table(title, part)
        print(table, flush=True)
        tables += table + "\n"
    if options.out:
        num_tokens = sum(map(len, requests)) * BLOCK_TOKENS
        options.out.write_text(_PAGE.format(requests=f"{len(requests):,}", tokens=f"{num_tokens:,}", tables=tables))


def _table(title: str, requests: list[list[int]]) -> str:
    infinite = replay(requests, len({block for request in requests for block in request}) + 1, LruPolicy())
    lines = [
        f"### {title}\n",
        f"An infinite cache finds {_percent(infinite.tokens)} of the tokens and saves {_percent(infinite.cost)} of the cost.\n",
        "| cache size (tokens) | `lru` tokens | `cost` tokens | optimum tokens | `cost` over `lru` | `lru` cost | `cost` cost |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for size in SIZES_BLOCKS:
        found: dict[str, Hits] = {name: replay(requests, size, policy) for name, policy in policies(requests, size).items()}
        lru, cost, optimum = found["lru"], found["cost"], found["optimum"]
        cells = [f"{size * BLOCK_TOKENS:,}", *(_percent(hits.tokens) for hits in (lru, cost, optimum))]
        cells += [f"{100 * (cost.tokens / lru.tokens - 1):+.1f} %", _percent(lru.cost), _percent(cost.cost)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


if __name__ == "__main__":
    main()
