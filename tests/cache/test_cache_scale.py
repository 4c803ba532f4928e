"""What an operation costs, in function calls: it may depend on the blocks it names, not on those that are cached."""

from __future__ import annotations

import gc
import math
import subprocess
import sys

import pytest

from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager, LruPolicy, Retention, eviction_policy
from kvd.cache.retention import DEFAULT_RETENTION
from kvd.types import pack_tokens

NAMESPACE = Namespace(b"f")
PATH_BLOCKS = 8


def count_calls(work):
    calls = 0

    def note(_frame, event, _arg):
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def prompt(seed, num_blocks=PATH_BLOCKS):
    return pack_tokens(range(seed * 1000, seed * 1000 + num_blocks * 16 + 1))


def full_cache(num_prompts, policy="lru"):
    """A pool whose every block is cached, but for a spare path."""
    num_blocks = (num_prompts + 1) * PATH_BLOCKS
    cache = CacheManager(
        num_blocks=num_blocks, free_watermark=1.0, max_pinned_fraction=0.5, policy=eviction_policy(policy, num_blocks, block_size_tokens=16)
    )
    for seed in range(num_prompts):
        tokens = prompt(seed)
        targets = cache.begin_load(NAMESPACE, [(tokens[i * 64 : i * 64 + 64], 1) for i in range(PATH_BLOCKS)])
        cache.complete_fill([target.node for target in targets])
    cache.take_events()
    return cache


def use(cache, seed, keep=DEFAULT_RETENTION):
    tokens = prompt(seed)
    table = cache.allocate(cache.match(tokens, NAMESPACE), len(tokens) // 4)
    cache.complete_fill(list(table.fills))
    cache.release(table, keep)


def costs(num_prompts, policy):
    cache = full_cache(num_prompts, policy)
    use(cache, 0)  # takes the spare blocks: from here on a new prompt evicts
    match = count_calls(lambda: cache.match(prompt(1), NAMESPACE))
    partial = count_calls(lambda: cache.match(prompt(1)[: 64 + 40], NAMESPACE))
    hit = count_calls(lambda: use(cache, 1))
    miss = count_calls(lambda: use(cache, 900_000))
    pin = count_calls(lambda: cache.pin("p", prompt(40), NAMESPACE))
    evicted = cache.stats()["evictions"]
    background = count_calls(lambda: cache.evict_to_watermark(64))
    assert evicted > 0
    assert cache.stats()["evictions"] == evicted + 64
    cache.check_invariants()
    return {"match": match, "partial": partial, "hit": hit, "miss": miss, "pin": pin, "background": background}


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_cost_does_not_grow_with_the_cache(policy):
    small, large = costs(125, policy), costs(12_500, policy)  # 1e3 and 1e5 blocks
    for operation, calls in large.items():
        assert calls <= small[operation] + 8, operation  # the eviction order is rebuilt now and then


def retention_costs(num_prompts):
    """A use that keeps its blocks for a time, and the end of that, where every cached block is kept until an instant of its prompt's own."""
    cache = full_cache(num_prompts)
    for seed in range(num_prompts):
        use(cache, seed, Retention(60, expires_s=1000.0 + seed))
    assert len(cache._blocks.retentions.due()) == num_prompts
    keep = count_calls(lambda: use(cache, 1, Retention(80, expires_s=500.0)))
    nothing = count_calls(lambda: cache.expire_retention(499.0, 1000))
    expired = []
    expire = count_calls(lambda: expired.append(cache.expire_retention(500.0, 1000)))
    assert expired == [PATH_BLOCKS]
    cache.evict_to_watermark(1)  # meets the entries that each use left behind, once
    evict = count_calls(lambda: cache.evict_to_watermark(64))
    cache.check_invariants()
    return {"keep": keep, "nothing": nothing, "expire": expire, "evict": evict}


def test_retention_does_not_cost_more_with_the_cache():
    small, large = retention_costs(125), retention_costs(12_500)
    for operation, calls in large.items():
        assert calls <= small[operation] + 8, operation
    assert large["nothing"] <= 5


def test_match_costs_a_call_a_block():
    cache = full_cache(20)
    short = count_calls(lambda: cache.match(prompt(3)[: 64 * 2 + 4], NAMESPACE))
    long = count_calls(lambda: cache.match(prompt(3), NAMESPACE))
    assert long - short <= 3 * (PATH_BLOCKS - 2)


def test_the_eviction_order_costs_a_logarithm():
    """Comparisons of a policy's priorities, counted."""
    comparisons = 0

    class Priority(float):
        def __lt__(self, other):
            nonlocal comparisons
            comparisons += 1
            return float(self) < float(other)

    class CountingLru(LruPolicy):
        def priority(self, node):
            return Priority(node.last_used)

    def evictions_cost(num_blocks):
        nonlocal comparisons
        cache = CacheManager(num_blocks=num_blocks, free_watermark=1.0, policy=CountingLru())
        for seed in range(num_blocks):
            tokens = prompt(seed, 1)
            targets = cache.begin_load(NAMESPACE, [(tokens[:64], 1)])
            cache.complete_fill([target.node for target in targets])
        comparisons = 0
        assert cache.evict_to_watermark(100) == 100
        return comparisons / 100

    assert evictions_cost(8000) <= evictions_cost(500) + 2 * math.log2(16) + 1


def test_cached_blocks_are_not_the_garbage_collectors_business():
    gc.collect()
    before = len(gc.get_objects())
    cache = full_cache(500)
    gc.collect()
    assert cache.num_cached == 500 * PATH_BLOCKS
    assert len(gc.get_objects()) - before < 500


def test_stale_entries_of_the_eviction_order_are_bounded():
    cache = full_cache(4)
    for _ in range(2000):
        use(cache, 1)
    assert len(cache._blocks._queue._heap) < 200
    cache.check_invariants()


def test_a_very_long_path_can_be_dropped():
    program = """
from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
cache = CacheManager(num_blocks=150000, block_size_tokens=1)
targets = cache.begin_load(Namespace(b"f"), [(i.to_bytes(4, "little"), 1) for i in range(150000)])
cache.complete_fill([target.node for target in targets])
del targets
del cache
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "alive\n"
