"""Replays a conversation trace through the real cache manager: what a policy hits, beside the clairvoyant optimum. No model, no clock, no chance.

The trace names blocks of 512 tokens, and the replay runs at that grain: a block of the cache stands for one of the trace (its two "tokens" are the id,
twice), a request is its full blocks and one private block for what comes after them, prompt's rest and answer. Requests come one after another.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.cache.eviction import CostPolicy, EvictionPolicy, LruPolicy
from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
from kvd.types import pack_tokens

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl.gz"
BLOCK_TOKENS = 512
_PRIVATE = 0xFFFFFFFF
_NEVER = 1 << 60
_NAMESPACE = Namespace(b"trace")

Requests = Sequence[Sequence[int]]


def read_trace(path: Path = TRACE, limit: int | None = None) -> list[list[int]]:
    """The ids of each request's full blocks."""
    requests = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            if limit is not None and len(requests) == limit:
                break
            entry = json.loads(line)
            requests.append(entry["hash_ids"][: entry["input_length"] // BLOCK_TOKENS])
    return requests


@dataclass(frozen=True, slots=True)
class Hits:
    """Shares of the prompts' full blocks that were found, and of the cost of computing all of them (a token at position p costs 1 + p / 4096)."""

    tokens: float
    cost: float


def replay(requests: Requests, num_blocks: int, policy: EvictionPolicy) -> Hits:
    """Give each request in turn its blocks, compute what is missing, and let it go."""
    cache = CacheManager(num_blocks=num_blocks, block_size_tokens=2, free_watermark=0.0, policy=policy)
    found = asked = found_cost = asked_cost = 0.0
    for number, request in enumerate(requests):
        if isinstance(policy, Clairvoyant):
            policy.now = number
        tokens = pack_tokens([block for block in request for _ in range(2)] + [_PRIVATE])
        table = cache.allocate(cache.match(tokens, _NAMESPACE), 2 * len(request) + 1)
        assert table is not None, "the pool is smaller than a request"
        cache.complete_fill(list(table.fills))
        found += table.num_cached_tokens // 2
        asked += len(request)
        found_cost += _cost(table.num_cached_tokens // 2)
        asked_cost += _cost(len(request))
        cache.release(table)
        cache.take_events()
    return Hits(found / asked, found_cost / asked_cost)


def _cost(num_blocks: int) -> float:
    return num_blocks + num_blocks * (num_blocks - 1) / 2 * BLOCK_TOKENS / 4096


class Clairvoyant(LruPolicy):
    """Belady's MIN: the block whose next use is farthest leaves first.

    Requests come one after another, so what is kept after a request is any part of what was there and what it used. To keep a block until its next use
    saves one block's computing, whichever block it is, and takes one place until then: dropping the farthest first saves most. A block is never used
    without those above it, so it is never needed sooner than they are: among leaves there is always a farthest one, and leaf first loses nothing. The
    hit rate is therefore the exact optimum of all policies that see the future, not only a bound.
    """

    def __init__(self, requests: Requests) -> None:
        self.now = 0
        following: dict[int, int] = {}
        self._next: list[dict[int, int]] = []
        for number in range(len(requests) - 1, -1, -1):
            self._next.append({block: following.get(block, _NEVER) for block in requests[number]})
            following.update(dict.fromkeys(requests[number], number))
        self._next.reverse()
        self._known: dict[int, int] = {}
        self._read = 0

    def priority(self, node):
        while self._read <= self.now:
            self._known.update(self._next[self._read])
            self._read += 1
        return -self._known[int.from_bytes(node.token_ids[:4], "little")]


def policies(requests: Requests, num_blocks: int) -> dict[str, EvictionPolicy]:
    """What is compared, by name."""
    return {"lru": LruPolicy(), "cost": CostPolicy(num_blocks, BLOCK_TOKENS), "optimum": Clairvoyant(requests)}
