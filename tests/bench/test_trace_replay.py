"""The trace's replay on an excerpt, and the optimum against exhaustive search."""

from __future__ import annotations

import random
from functools import cache

from trace_replay import BLOCK_TOKENS, Clairvoyant, policies, read_trace, replay

from kvd.cache.eviction import CostPolicy, LruPolicy


def best_hits(requests, num_blocks):
    """The most blocks that any choice of what to keep finds: every choice is tried. A request's own private block takes a place while it runs."""

    @cache
    def best(number, kept):
        if number == len(requests):
            return 0
        request = requests[number]
        num_found = 0
        while num_found < len(request) and request[num_found] in kept:
            num_found += 1
        others = [block for block in kept if block not in request]
        room = num_blocks - 1 - len(request)
        return num_found + max(best(number + 1, frozenset(request) | frozenset(rest)) for rest in subsets(others, room))

    return best(0, frozenset())


def subsets(blocks, most):
    if most >= len(blocks):
        return [tuple(blocks)]
    chosen = [()]
    for block in blocks:
        chosen += [(*each, block) for each in chosen if len(each) < most]
    return chosen


def random_requests(rng):
    """Paths in a small tree; a block's id tells the whole path to it."""
    return [[1, *(1 + int("1" + "".join(map(str, path[: i + 1]))) for i in range(len(path)))] for path in random_paths(rng)]


def random_paths(rng):
    return [[rng.randint(1, 2) for _ in range(rng.randint(0, 3))] for _ in range(9)]


def test_the_clairvoyant_replay_is_the_optimum():
    """Also of the choices that keep a block without those above it, which finds nothing more."""
    num_better_than_lru = 0
    for seed in range(60):
        requests = random_requests(random.Random(seed))
        num_blocks = 5 + seed % 3
        asked = sum(map(len, requests))
        optimum = round(replay(requests, num_blocks, Clairvoyant(requests)).tokens * asked)
        assert optimum == best_hits(requests, num_blocks), requests
        lru = round(replay(requests, num_blocks, LruPolicy()).tokens * asked)
        assert lru <= optimum
        num_better_than_lru += lru < optimum
    assert num_better_than_lru > 10


def test_on_an_excerpt_cost_finds_more_than_lru_and_less_than_the_optimum():
    requests = read_trace(limit=1800)
    for num_blocks in (2000, 4000):
        found = {name: replay(requests, num_blocks, policy) for name, policy in policies(requests, num_blocks).items()}
        assert found["lru"].tokens < found["cost"].tokens < found["optimum"].tokens
        assert found["lru"].cost < found["cost"].cost


def test_a_replay_repeats():
    requests = read_trace(limit=300)
    assert replay(requests, 700, CostPolicy(700, BLOCK_TOKENS)) == replay(requests, 700, CostPolicy(700, BLOCK_TOKENS))
