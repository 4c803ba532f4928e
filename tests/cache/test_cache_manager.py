"""The cache's promises, one by one."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from kvd.cache.events import BlockOrigin, BlockRemoved, BlocksPinned, BlockStored, BlocksUnpinned, BlocksUsed
from kvd.cache.hashing import Namespace, block_hash
from kvd.cache.manager import CacheManager, LruPolicy, PinCapacityError, PinNotReadyError, PinTooShortError
from kvd.types import pack_tokens

NAMESPACE = Namespace(b"fingerprint")
SIZE = 4


def make(num_blocks=16, **options):
    options.setdefault("max_pinned_fraction", 0.5)
    return CacheManager(num_blocks=num_blocks, block_size_tokens=SIZE, free_watermark=0.25, **options)


def start(cache, tokens, namespace=NAMESPACE, **options):
    packed = pack_tokens(tokens)
    return cache.allocate(cache.match(packed, namespace), len(tokens), **options)


def compute(cache, tokens, namespace=NAMESPACE, **options):
    """A prompt from allocation to release."""
    table = start(cache, tokens, namespace, **options)
    cache.complete_fill(list(table.fills))
    cache.release(table)


def load(cache, tokens, namespace=NAMESPACE, origin=BlockOrigin.RESTORED, uses=1):
    packed = pack_tokens(tokens)
    chain = [(packed[i : i + 4 * SIZE], uses) for i in range(0, len(packed) // (4 * SIZE) * 4 * SIZE, 4 * SIZE)]
    return cache.begin_load(namespace, chain, origin)


def matched(cache, tokens, namespace=NAMESPACE):
    return cache.match(pack_tokens(tokens), namespace).num_tokens


def events_of(cache, kind):
    return [event for event in cache.take_events() if isinstance(event, kind)]


# ------------------------------------------------------------------------------------------------------------ match


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (20, 8)])
def test_a_match_is_whole_blocks_and_never_the_last_token(num_tokens, expected):
    cache = make()
    compute(cache, range(9))
    assert matched(cache, list(range(20))[:num_tokens]) == expected


def test_nothing_is_shared_between_namespaces():
    cache = make()
    compute(cache, range(9))
    for other in (Namespace(b"other"), Namespace(b"fingerprint", b"tenant"), Namespace(b"fingerprint", b"", b"adapter")):
        assert matched(cache, range(9), other) == 0
    assert matched(cache, range(9), Namespace(b"fingerprint")) == 8


def test_a_hash_collision_is_a_miss():
    def weak(parent, tokens):
        return hashlib.sha256(parent + tokens).digest()[:1]

    cache = make(64, hash_function=weak)
    target = weak(NAMESPACE.root, pack_tokens(range(SIZE)))
    colliding = next(
        tokens
        for tokens in itertools.product(range(50), repeat=SIZE)
        if tokens != tuple(range(SIZE)) and weak(NAMESPACE.root, pack_tokens(tokens)) == target
    )
    compute(cache, [*range(SIZE), 1])
    assert matched(cache, [*colliding, 1]) == 0
    compute(cache, [*colliding, 1])
    stored = events_of(cache, BlockStored)
    assert stored[0].block_hash == stored[1].block_hash
    assert stored[0].block_id != stored[1].block_id
    assert cache.match(pack_tokens([*colliding, 1]), NAMESPACE).nodes[0].block_id == stored[1].block_id
    cache.check_invariants()


def test_stale_matches_are_made_anew():
    cache = make()
    packed = pack_tokens(range(9))
    match = cache.match(packed, NAMESPACE)
    compute(cache, range(9))
    table = cache.allocate(match, 9)
    assert table.num_cached_tokens == 8
    cache.check_invariants()


# ---------------------------------------------------------------------------------------------- allocate, extend, record


def test_blocks_enter_the_tree_for_use_only_when_their_step_has_completed():
    cache = make()
    table = start(cache, range(10))
    assert [node.depth for node in table.fills] == [0, 1]
    assert not cache.take_events()
    cache.complete_fill([table.fills[0]])
    (stored,) = cache.take_events()
    expected_hash = block_hash(NAMESPACE.root, pack_tokens(range(4)))
    assert stored == BlockStored(
        NAMESPACE, expected_hash, NAMESPACE.root, pack_tokens(range(4)), table.block_ids[0], 0, BlockOrigin.COMPUTED
    )
    cache.complete_fill(list(table.fills))
    (stored,) = cache.take_events()
    assert (stored.parent_hash, stored.depth) == (expected_hash, 1)


def test_a_duplicate_stays_private_while_the_trees_block_is_in_use():
    cache = make()
    first, second = start(cache, [1]), start(cache, [1])
    for table in (first, second):
        assert cache.extend(table, 12) == ()
    cache.record(first, pack_tokens([1, 2, 3, 4, 5]), 5)
    tokens = bytearray(pack_tokens([1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13]))
    cache.record(second, tokens, 8)
    assert [(event.block_id, event.depth) for event in events_of(cache, BlockStored)] == [(first.block_ids[0], 0)]
    cache.release(first)
    cache.record(second, tokens, 12)  # now its own block takes the idle one's place, and the rest follows
    events = cache.take_events()
    assert [(type(event), event.block_id) for event in events] == [
        (BlockRemoved, 0),
        *((BlockStored, block_id) for block_id in second.block_ids),
    ]
    assert [event.depth for event in events[1:]] == [0, 1, 2]
    assert (cache.num_used, cache.num_cached) == (3, 0)
    cache.check_invariants()
    cache.release(second)
    assert (cache.num_cached, cache.num_free) == (3, 13)
    cache.check_invariants()


def test_an_idle_duplicate_does_not_hold_back_blocks_that_are_needed():
    cache = make(4, max_pinned_fraction=0.5)
    compute(cache, range(8))
    cache.pin("p", pack_tokens(range(4)), NAMESPACE)
    table = start(cache, range(8))  # its last block is there, but computed again
    cache.record(table, pack_tokens(range(8)), 8)
    assert cache.num_cached == 0
    assert cache.extend(table, 16) == ()
    cache.check_invariants()


def test_a_replaced_block_is_a_computed_one():
    cache = make()
    targets = load(cache, range(8))
    cache.complete_fill([target.node for target in targets])
    table = start(cache, range(8))
    assert table.num_restored_tokens == 4
    cache.take_events()
    cache.record(table, pack_tokens(range(8)), 8)
    (stored,) = events_of(cache, BlockStored)
    assert (stored.origin, stored.depth, stored.block_id) == (BlockOrigin.COMPUTED, 1, table.block_ids[1])
    assert start(cache, range(9)).num_restored_tokens == 0


def test_neither_a_leased_nor_a_filling_duplicate_is_replaced():
    cache = make()
    compute(cache, range(8))
    node = cache.match(pack_tokens(range(9)), NAMESPACE).nodes[1]
    cache.lease(node.block_id, node.block_hash)
    table = start(cache, range(8))
    cache.take_events()
    cache.record(table, pack_tokens(range(8)), 8)
    assert cache.take_events() == ()
    assert table.num_in_tree == 1
    cache.end_lease(node.block_id)
    cache.record(table, pack_tokens(range(8)), 8)
    assert table.num_in_tree == 2
    cache.check_invariants()


def test_nothing_changes_when_blocks_run_out():
    cache = make(4)
    table = start(cache, range(9))
    before = (list(table.block_ids), cache.num_free, cache.num_used)
    assert start(cache, [9] * 5) is None
    assert cache.extend(table, 17) is None
    assert (table.block_ids, cache.num_free, cache.num_used) == before
    assert table.num_tokens == 9
    assert cache.extend(table, 16) == ()
    cache.check_invariants()


def test_a_reserve_is_left_to_others():
    cache = make(4)
    assert start(cache, range(9), reserve_blocks=2) is None
    assert start(cache, range(9), reserve_blocks=1) is not None


def test_a_fork_copies_what_it_writes_and_nothing_else():
    cache = make()
    parent = start(cache, range(6))
    cache.complete_fill(list(parent.fills))
    children = [cache.fork(parent), cache.fork(parent)]
    assert (cache.num_used, cache.num_shared) == (2, 2)
    copied = [cache.extend(child, 7) for child in children]
    for child, (copy,) in zip(children, copied, strict=True):
        assert (copy.source, copy.index) == (parent.block_ids[1], 1)
        assert child.block_ids == [parent.block_ids[0], copy.target]
    assert cache.extend(parent, 7) == ()  # the last one writes in place
    assert (cache.num_used, cache.num_shared) == (4, 1)
    assert cache.stats()["copies"] == 2
    cache.check_invariants()


def test_a_fork_at_a_block_boundary_copies_nothing():
    cache = make()
    parent = start(cache, range(8))
    cache.complete_fill(list(parent.fills))
    child = cache.fork(parent)
    assert cache.extend(child, 9) == ()
    assert cache.extend(parent, 9) == ()
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert child.block_ids[2] != parent.block_ids[2]
    cache.check_invariants()


def test_truncating_into_a_tree_block_copies_it_before_it_is_written():
    cache = make()
    table = start(cache, range(8))
    cache.complete_fill(list(table.fills))
    cache.truncate(table, 6)
    (copy,) = cache.extend(table, 7)
    assert copy.index == 1
    assert matched(cache, range(9)) == 8
    cache.check_invariants()


# --------------------------------------------------------------------------------------------------- filling and followers


def test_a_follower_waits_for_the_owner_and_its_use_is_told_after_the_blocks():
    cache = make()
    owner = start(cache, range(10))
    follower = start(cache, [*range(8), 99, 98, 97, 96, 95])
    assert follower.num_cached_tokens == 8
    assert [node.depth for node in follower.waits_for] == [0, 1]
    assert [node.depth for node in follower.fills] == [2]
    assert follower.block_ids[:2] == owner.block_ids[:2]
    cache.complete_fill([owner.fills[0]])
    assert len(follower.waits_for) == 1
    cache.complete_fill([owner.fills[0]])
    assert not follower.waits_for
    kinds = [type(event) for event in cache.take_events()]
    assert kinds == [BlockStored, BlockStored, BlocksUsed]
    cache.check_invariants()


def test_when_an_owner_fails_its_nodes_and_all_below_leave_the_tree():
    cache = make()
    owner = start(cache, range(10))
    follower = start(cache, [*range(8), 99, 98, 97, 96, 95])
    grandchild = start(cache, [*range(8), 99, 98, 97, 96, 94])
    bystander = start(cache, [*range(4), 50])
    cache.complete_fill([owner.fills[0]])
    affected = cache.fail_fill(list(owner.fills))
    assert set(affected) == {follower, grandchild}
    assert all(table.is_broken and not table.fills for table in affected)
    assert matched(cache, range(10)) == 4
    assert not bystander.waits_for
    cache.check_invariants()
    for table in (owner, follower, grandchild, bystander):
        cache.release(table)
    cache.check_invariants()
    assert cache.num_cached == 1
    assert events_of(cache, BlockRemoved) == []


def test_nodes_that_have_left_are_not_completed():
    cache = make()
    owner = start(cache, range(9))
    nodes = list(owner.fills)
    cache.fail_fill(nodes)
    cache.complete_fill(nodes)
    assert cache.take_events() == ()
    cache.check_invariants()


# ---------------------------------------------------------------------------------------------------------- loads and origins


def test_restored_tokens_are_told_at_their_first_use_only():
    cache = make()
    targets = load(cache, range(8), uses=3)
    assert targets[0].block_hash == block_hash(NAMESPACE.root, pack_tokens(range(4)))
    cache.complete_fill([target.node for target in targets])
    assert [event.origin for event in events_of(cache, BlockStored)] == [BlockOrigin.RESTORED] * 2
    first, second = start(cache, range(9)), start(cache, range(9))
    assert (first.num_cached_tokens, first.num_restored_tokens, first.num_recomputed_tokens) == (8, 8, 0)
    assert (second.num_cached_tokens, second.num_restored_tokens) == (8, 0)
    assert cache.stats()["hit_tokens_restored"] == 16
    assert cache.hottest(1)[0].uses == 5


def test_recomputed_blocks_stay_fresh_until_a_user_comes():
    cache = make()
    compute(cache, range(9), origin=BlockOrigin.RECOMPUTED, counts_use=False)
    internal = start(cache, range(9), counts_use=False)
    assert (internal.num_cached_tokens, internal.num_recomputed_tokens) == (8, 0)
    assert events_of(cache, BlocksUsed) == []
    user = start(cache, range(9))
    assert (user.num_recomputed_tokens, user.num_restored_tokens) == (8, 0)
    assert cache.stats() == {
        "evictions": 0,
        "allocations": 5,
        "forks": 0,
        "copies": 0,
        "query_tokens": 9,
        "hit_tokens": 8,
        "partial_hit_tokens": 0,
        "hit_tokens_computed": 0,
        "hit_tokens_restored": 0,
        "hit_tokens_recomputed": 8,
    }


def test_a_load_skips_what_is_there_and_needs_room():
    cache = make(6)
    compute(cache, range(5))
    targets = load(cache, range(16))
    assert [target.node.depth for target in targets] == [1, 2, 3]
    assert load(cache, range(16)) == []
    before = (cache.num_free, cache.num_used, cache.num_cached)
    assert load(cache, range(100, 116)) is None
    assert (cache.num_free, cache.num_used, cache.num_cached) == before
    cache.check_invariants()


def test_nothing_is_loaded_below_what_a_request_is_filling():
    cache = make()
    start(cache, range(9))
    assert load(cache, range(16)) == []


def test_a_failed_load_gives_its_blocks_back_and_breaks_its_followers():
    cache = make()
    targets = load(cache, range(12))
    follower = start(cache, range(13))
    assert len(follower.waits_for) == 3
    cache.complete_fill([targets[0].node])
    assert cache.num_transient == 2
    affected = cache.fail_fill([targets[1].node])
    assert affected == [follower]
    cache.release(follower)
    assert (cache.num_transient, cache.num_used, cache.num_cached) == (0, 0, 1)
    cache.check_invariants()


# --------------------------------------------------------------------------------------------------------------- eviction


def test_eviction_is_leaf_first_and_least_recently_used_first():
    cache = make(10)
    compute(cache, [*range(8), 1])
    compute(cache, [*range(4), 70, 71, 72, 73, 1])
    compute(cache, [*range(8), 1])  # used again
    cache.take_events()
    cache.watermark_blocks = 10
    cache.evict_to_watermark(10)
    removed = [event.block_hash for event in events_of(cache, BlockRemoved)]
    root = block_hash(NAMESPACE.root, pack_tokens(range(4)))
    old, new = block_hash(root, pack_tokens([70, 71, 72, 73])), block_hash(root, pack_tokens(range(4, 8)))
    assert removed == [old, new, root]
    cache.check_invariants()


def test_background_eviction_stops_at_the_watermark():
    cache = make(8)
    for first in range(0, 80, 10):
        compute(cache, range(first, first + 4))
    assert cache.num_free == 0
    assert cache.evict_to_watermark(1) == 1
    assert cache.evict_to_watermark(100) == 1
    assert cache.evict_to_watermark(100) == 0


def test_allocating_evicts_when_it_must_but_never_what_it_matched():
    cache = make(4)
    compute(cache, range(9))
    table = start(cache, [*range(8), 50, 51, 52, 53, 54])
    assert table.num_cached_tokens == 8
    assert cache.stats()["evictions"] == 0
    cache.fail_fill(list(table.fills))
    cache.release(table)
    assert start(cache, range(100, 116)) is not None
    assert cache.stats()["evictions"] == 2
    assert matched(cache, range(9)) == 0


def test_used_filling_leased_and_pinned_blocks_are_never_evicted():
    cache = make(8)
    cache.watermark_blocks = 8
    user = start(cache, range(5))
    cache.complete_fill(list(user.fills))
    start(cache, range(10, 15))  # filling
    compute(cache, range(20, 25))
    cache.pin("p", pack_tokens(range(20, 24)), NAMESPACE)
    compute(cache, range(30, 35))
    node = cache.match(pack_tokens(range(30, 35)), NAMESPACE).nodes[0]
    assert cache.lease(node.block_id, node.block_hash)
    assert cache.evict_to_watermark(100) == 0
    assert start(cache, range(100, 120)) is None
    cache.end_lease(node.block_id)
    assert cache.evict_to_watermark(100) == 1
    cache.unpin("p")
    assert cache.evict_to_watermark(100) == 1
    cache.check_invariants()


def test_a_leased_block_keeps_its_ancestors_and_a_failed_attempt_changes_nothing():
    cache = make(6)
    compute(cache, range(9))
    compute(cache, range(50, 55))
    leaf = cache.match(pack_tokens(range(9)), NAMESPACE).nodes[1]
    cache.lease(leaf.block_id, leaf.block_hash)
    assert start(cache, range(100, 124)) is None  # the numbers allow it, the lease does not
    assert (matched(cache, range(9)), matched(cache, range(50, 55))) == (8, 4)
    cache.check_invariants()
    cache.end_lease(leaf.block_id)
    assert start(cache, range(100, 124)) is not None


def test_a_lease_names_content_not_a_block():
    cache = make(2)
    compute(cache, range(5))
    node = cache.match(pack_tokens(range(5)), NAMESPACE).nodes[0]
    old_hash, block_id = node.block_hash, node.block_id
    compute(cache, range(10, 18))
    assert not cache.lease(block_id, old_hash)
    filling = start(cache, range(20, 25))
    assert not cache.lease(filling.block_ids[0], filling.fills[0].block_hash)
    cache.check_invariants()


def test_another_policy_may_decide():
    class MostUsedFirst(LruPolicy):
        def priority(self, node):
            return -node.uses

    cache = make(8, policy=MostUsedFirst())
    compute(cache, range(5))
    compute(cache, range(5))
    compute(cache, range(10, 15))
    cache.watermark_blocks = cache.num_free + 1
    cache.evict_to_watermark(1)
    assert (matched(cache, range(5)), matched(cache, range(10, 15))) == (0, 4)


# ------------------------------------------------------------------------------------------------------------------- pins


def test_pins_are_bounded_with_the_numbers():
    cache = make(8)
    compute(cache, range(9))
    compute(cache, [*range(4), *range(50, 65)])
    cache.take_events()
    assert cache.pin("a", pack_tokens(range(8)), NAMESPACE) == 2
    with pytest.raises(PinCapacityError) as caught:
        cache.pin("b", pack_tokens([*range(4), *range(50, 62)]), NAMESPACE)
    assert (caught.value.num_new, caught.value.num_pinned, caught.value.max_pinned) == (3, 2, 4)
    assert set(cache.pins()) == {"a"}
    assert cache.pin("b", pack_tokens([*range(4), *range(50, 58)]), NAMESPACE) == 3  # one is shared with a
    assert cache.pinned_blocks == 4
    assert cache.pin("a", pack_tokens(range(4)), NAMESPACE) == 1  # replaced
    assert cache.pinned_blocks == 3
    info = cache.pin_info("b")
    assert (info["tokens"], info["blocks"], info["residency"], info["pinned"]) == (12, 3, "memory", True)
    kinds = [(type(event), event.name, len(event.block_hashes)) for event in cache.take_events()]
    assert kinds == [(BlocksPinned, "a", 2), (BlocksPinned, "b", 3), (BlocksUnpinned, "a", 2), (BlocksPinned, "a", 1)]
    cache.check_invariants()


def test_only_ready_full_blocks_can_be_pinned():
    cache = make()
    table = start(cache, range(9))
    cache.complete_fill([table.fills[0]])
    with pytest.raises(PinNotReadyError) as caught:
        cache.pin("a", pack_tokens(range(8)), NAMESPACE)
    assert (caught.value.num_ready, caught.value.num_blocks) == (1, 2)
    with pytest.raises(PinTooShortError):
        cache.pin("a", pack_tokens(range(3)), NAMESPACE)
    assert not cache.unpin("a")
    with pytest.raises(KeyError):
        cache.pin_info("a")


def test_a_pin_survives_any_pressure():
    cache = make(8)
    compute(cache, range(9))
    cache.pin("a", pack_tokens(range(8)), NAMESPACE)
    for first in range(100, 400, 20):
        compute(cache, range(first, first + 12))
    assert matched(cache, range(9)) == 8
    assert start(cache, range(900, 925)) is None
    cache.check_invariants()


def test_hottest_prefixes_come_first_and_evicted_ones_not_at_all():
    cache = make(6)
    for _ in range(3):
        compute(cache, range(9))
    for _ in range(2):
        compute(cache, range(20, 25))
    hottest = cache.hottest(5)
    assert [(info.num_tokens, info.uses) for info in hottest] == [(8, 3), (4, 2)]
    assert hottest[0].token_ids == pack_tokens(range(8))
    assert hottest[0].as_dict()["tokens"] == 8
    compute(cache, range(100, 121))
    assert cache.hottest(5) == []
