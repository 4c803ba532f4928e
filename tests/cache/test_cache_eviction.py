"""Retention priorities, their ends, and what the cost policy keeps."""

from __future__ import annotations

import math

import pytest

from kvd.cache.events import BlockRemoved
from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager, CostPolicy, LruPolicy, Retention
from kvd.cache.retention import DEFAULT_RETENTION
from kvd.types import pack_tokens

NAMESPACE = Namespace(b"fingerprint")
SIZE = 4


def make(num_blocks, policy=None):
    return CacheManager(num_blocks=num_blocks, block_size_tokens=SIZE, free_watermark=0.0, policy=policy or LruPolicy())


def use(cache, *tokens, keep=DEFAULT_RETENTION):
    """A request of these tokens; how many of them were found."""
    packed = pack_tokens([*tokens, 999_999])
    table = cache.allocate(cache.match(packed, NAMESPACE), len(tokens) + 1)
    cache.complete_fill(list(table.fills))
    num_found = table.num_cached_tokens
    cache.release(table, keep)
    return num_found


def found(cache, *tokens):
    return cache.match(pack_tokens([*tokens, 999_999]), NAMESPACE).num_tokens


def evict(cache, num_blocks):
    """The hashes of the next blocks to leave."""
    cache.take_events()
    cache.watermark_blocks = cache.num_free + num_blocks
    cache.evict_to_watermark(num_blocks)
    return [event.block_hash for event in cache.take_events() if isinstance(event, BlockRemoved)]


A, B, C = range(SIZE), range(10, 10 + SIZE), range(20, 20 + SIZE)


@pytest.mark.parametrize("policy", [LruPolicy, lambda: CostPolicy(8, SIZE)])
class TestRetention:
    def test_the_lowest_priority_leaves_first_whenever_it_was_used(self, policy):
        cache = make(8, policy())
        use(cache, *A, keep=Retention(80))
        use(cache, *B)
        use(cache, *C, keep=Retention(0))
        evict(cache, 1)
        assert [found(cache, *each) for each in (A, B, C)] == [SIZE, SIZE, 0]
        evict(cache, 1)
        assert [found(cache, *each) for each in (A, B, C)] == [SIZE, 0, 0]

    def test_the_highest_that_a_use_gave_counts(self, policy):
        cache = make(8, policy())
        use(cache, *A, keep=Retention(80))
        use(cache, *A, keep=Retention(0))
        use(cache, *B)
        evict(cache, 1)
        assert found(cache, *A) == SIZE
        assert found(cache, *B) == 0

    def test_when_it_ends_the_block_is_the_first_to_go(self, policy):
        cache = make(8, policy())
        use(cache, *A, keep=Retention(100, expires_s=60.0))
        use(cache, *B, keep=Retention(1))
        assert cache.expire_retention(59.9, 100) == 0
        assert cache.expire_retention(60.0, 100) == 1
        evict(cache, 1)
        assert found(cache, *A) == 0
        assert found(cache, *B) == SIZE

    def test_another_use_with_a_longer_or_no_end_holds_it(self, policy):
        cache = make(8, policy())
        use(cache, *A, keep=Retention(100, expires_s=60.0))
        use(cache, *A, keep=Retention(70, expires_s=90.0))
        use(cache, *A, keep=Retention(30))
        (node,) = cache.match(pack_tokens([*A, 1]), NAMESPACE).nodes
        priorities = []
        for now in (0.0, 60.0, 90.0, math.inf):
            cache.expire_retention(now, 100)
            priorities.append(node.priority)
        assert priorities == [100, 70, 30, 30]

    def test_a_leaf_of_low_priority_goes_before_its_parent_of_high(self, policy):
        cache = make(8, policy())
        use(cache, *A, keep=Retention(90))
        use(cache, *A, *B, keep=Retention(10))
        use(cache, *C, keep=Retention(40))
        evict(cache, 1)
        assert found(cache, *A, *B) == SIZE
        evict(cache, 1)
        assert found(cache, *C) == 0

    def test_a_child_of_high_priority_protects_its_parents(self, policy):
        cache = make(8, policy())
        use(cache, *A, keep=Retention(0))
        (parent,) = cache.match(pack_tokens([*A, 1]), NAMESPACE).nodes
        use(cache, *A, *B, keep=Retention(90))
        use(cache, *C, keep=Retention(50))
        assert parent.priority == 90
        evict(cache, 1)
        assert found(cache, *A, *B) == 2 * SIZE

    def test_what_output_adds_is_kept_like_the_rest(self, policy):
        cache = make(8, policy())
        packed = pack_tokens([*A, 5])
        table = cache.allocate(cache.match(packed, NAMESPACE), SIZE + 1)
        cache.complete_fill(list(table.fills))
        cache.extend(table, 2 * SIZE)
        cache.record(table, pack_tokens([*A, *B]), 2 * SIZE)
        cache.release(table, Retention(77, expires_s=9.0))
        assert [node.priority for node in cache.match(pack_tokens([*A, *B, 1]), NAMESPACE).nodes] == [77, 77]
        cache.check_invariants()

    def test_blocks_that_left_leave_no_instant_behind(self, policy):
        cache = make(4, policy())
        for number in range(500):
            use(cache, *range(100 * number, 100 * number + 3 * SIZE), keep=Retention(60, expires_s=1000.0 + number))
        book = cache._blocks.retentions
        assert sum(map(len, book.due().values())) <= 4
        assert len(book._instants) < 200
        cache.check_invariants()


def test_more_ends_at_once_than_a_call_may_take():
    cache = make(16)
    use(cache, *range(12 * SIZE), keep=Retention(60, expires_s=1.0))
    assert [cache.expire_retention(1.0, 5) for _ in range(4)] == [5, 5, 2, 0]
    cache.check_invariants()


class TestCost:
    def test_blocks_used_again_outlive_more_recent_ones(self):
        """Where blocks used twice are used a third time more often than others a second time, they are kept longer."""

        def popular_survives(policy):
            cache, number, hits = make(40, policy), 0, 0
            for _ in range(300):
                for _ in range(8):  # passers-by: more than the pool holds until the popular one comes again
                    number += 1
                    use(cache, *range(1000 * number, 1000 * number + 6 * SIZE))
                hits += use(cache, *A, *B) > 0
            return hits

        assert popular_survives(LruPolicy()) == 0
        assert popular_survives(CostPolicy(40, SIZE)) > 200

    def test_what_was_popular_once_does_not_stay_for_ever(self):
        cache = make(20, CostPolicy(20, SIZE))
        for _ in range(50):
            use(cache, *A)
        for number in range(1, 400):
            use(cache, *range(1000 * number, 1000 * number + 2 * SIZE))
        assert found(cache, *A) == 0

    def test_of_two_blocks_alike_the_one_that_costs_more_stays(self):
        cache = make(40, CostPolicy(40, block_size_tokens=4096))
        use(cache, *range(8 * SIZE))
        use(cache, *range(500, 500 + SIZE))
        (shallow,) = cache.match(pack_tokens([*range(500, 500 + SIZE), 1]), NAMESPACE).nodes
        assert evict(cache, 1) == [shallow.block_hash]  # the more recent one, as nothing has left between the two

    def test_uses_are_remembered_when_a_block_comes_back(self):
        policy = CostPolicy(4, SIZE)
        cache = make(4, policy)
        for _ in range(3):
            use(cache, *A)
        evict(cache, 4)
        use(cache, *A)
        (node,) = cache.match(pack_tokens([*A, 1]), NAMESPACE).nodes
        assert node.uses == 4

    def test_uses_that_the_disk_has_counted_are_not_counted_twice(self):
        cache = make(4, CostPolicy(4, SIZE))
        for _ in range(3):
            use(cache, *A)
        evict(cache, 4)
        (target,) = cache.begin_load(NAMESPACE, [(pack_tokens(A), 2)])
        assert target.node.uses == 3
        cache.complete_fill([target.node])

    def test_memory_of_blocks_that_left_is_bounded(self):
        policy = CostPolicy(4, SIZE)
        cache = make(4, policy)
        for number in range(200):
            use(cache, *range(100 * number, 100 * number + 2 * SIZE))
        assert len(policy._remembered) == 4

    def test_a_priority_of_its_own_does_not_age_the_others(self):
        """Blocks of priority 0 that come and go say nothing about those of 50."""
        policy = CostPolicy(16, SIZE)
        cache = make(16, policy)
        use(cache, *A)
        for number in range(1, 100):
            use(cache, *range(100 * number, 100 * number + 2 * SIZE), keep=Retention(0))
        (node,) = cache.match(pack_tokens([*A, 1]), NAMESPACE).nodes
        assert node.floor == policy._lives[50].floor == 0.0
        assert policy._lives[0].floor > 0.0
