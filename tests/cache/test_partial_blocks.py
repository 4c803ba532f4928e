"""A match that ends inside a block: what is found, what is held, what is counted."""

from __future__ import annotations

import bisect
import random

import pytest

from kvd.cache import key_order
from kvd.cache.events import BlockOrigin, BlocksUsed
from kvd.cache.hashing import Namespace
from kvd.cache.key_order import KeyOrder
from kvd.cache.manager import CacheManager, CopyOnWrite
from kvd.cache.tenants import Selection
from kvd.types import pack_tokens

NAMESPACE = Namespace(b"f")
SIZE = 4


def make(num_blocks=16, min_partial_tokens=1):
    return CacheManager(
        num_blocks=num_blocks,
        block_size_tokens=SIZE,
        free_watermark=0.0,
        max_pinned_fraction=1.0,
        min_partial_tokens=min_partial_tokens,
    )


def start(cache, tokens, **options):
    return cache.allocate(cache.match(pack_tokens(tokens), NAMESPACE), len(tokens), **options)


def compute(cache, tokens):
    table = start(cache, tokens)
    cache.complete_fill(list(table.fills))
    cache.release(table)


@pytest.mark.parametrize(
    ("tokens", "num_tokens"),
    [
        ([0, 1, 2, 3, 4, 5, 9, 9, 9], 6),
        ([0, 1, 2, 3, 4, 5, 6, 7], 7),  # the whole block is there, but its last token is computed for its logits
        ([0, 1, 2, 3, 4, 5], 5),
        ([0, 1, 2, 3, 4], 4),
        ([0, 1, 9], 2),
        ([0], 0),
        ([0, 1, 2, 3, 9, 5, 6], 4),
        ([9, 1, 2, 3], 0),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 12),
    ],
)
def test_a_match_ends_where_the_tokens_differ(tokens, num_tokens):
    cache = make()
    compute(cache, range(12))
    assert cache.match(pack_tokens(tokens), NAMESPACE).num_tokens == num_tokens
    assert cache.match(pack_tokens(tokens), Namespace(b"f", b"tenant")).num_tokens == 0


@pytest.mark.parametrize(("min_partial_tokens", "num_tokens"), [(1, 6), (2, 6), (3, 4), (4, 4)])
def test_a_few_tokens_are_not_worth_a_copy(min_partial_tokens, num_tokens):
    cache = make(min_partial_tokens=min_partial_tokens)
    compute(cache, range(9))
    table = start(cache, [0, 1, 2, 3, 4, 5, 9, 9, 9])
    assert table.num_cached_tokens == num_tokens
    assert (table.partial is None) == (num_tokens == 4)
    cache.check_invariants()


def test_of_thousands_of_children_the_most_alike_is_found():
    """Against comparing with all; negative differences in every byte of a token."""
    draw = random.Random(5)
    cache = make(3000)
    vocabulary = [0, 1, 255, 256, 65535, 65536, 2**24 - 1, 2**24, 2**31 - 1]
    children = [[draw.choice(vocabulary) for _ in range(SIZE)] for _ in range(2000)]
    for child in children:
        compute(cache, [*child, 7])
    for _ in range(500):
        wanted = [draw.choice([*vocabulary, 5]) for _ in range(SIZE)]
        common = [next((i for i in range(SIZE) if child[i] != wanted[i]), SIZE) for child in children]
        assert cache.match(pack_tokens([*wanted, 7]), NAMESPACE).num_tokens == max(common)
    cache.check_invariants()


def test_what_is_still_filling_has_no_beginning_to_give():
    cache = make()
    owner = start(cache, range(9))
    assert cache.match(pack_tokens([0, 1, 9]), NAMESPACE).num_tokens == 0
    cache.complete_fill([owner.fills[0]])
    assert cache.match(pack_tokens([0, 1, 9]), NAMESPACE).num_tokens == 2
    assert cache.match(pack_tokens([0, 1, 2, 3, 4, 9]), NAMESPACE).num_tokens == 4
    cache.complete_fill(list(owner.fills))
    assert cache.match(pack_tokens([0, 1, 2, 3, 4, 9]), NAMESPACE).num_tokens == 5


def test_the_source_is_held_until_the_copy_is_submitted():
    cache = make(4)
    compute(cache, range(9))
    source = cache.match(pack_tokens(range(9)), NAMESPACE).nodes[1].block_id
    table = start(cache, [0, 1, 2, 3, 4, 5, 9])
    assert table.partial == CopyOnWrite(source, table.block_ids[1], 1)
    assert table.num_cached_tokens == 6
    assert cache.num_used == 3
    cache.evict_to_watermark(4)
    assert cache.extend(table, 9) == ()
    assert cache.extend(table, 13) is None  # the last block that could go is the source
    cache.check_invariants()
    cache.end_copy(table)
    cache.end_copy(table)
    assert cache.extend(table, 13) == ()
    cache.check_invariants()
    cache.release(table)
    assert cache.num_used == 0


def test_a_table_that_never_ran_gives_the_source_back():
    cache = make()
    compute(cache, range(9))
    cache.release(start(cache, [0, 1, 9], is_private=True))
    assert cache.num_used == 0
    cache.check_invariants()


def test_without_room_for_source_and_target_the_beginning_is_computed():
    cache = make(3)
    compute(cache, range(9))
    table = start(cache, [0, 1, 2, 3, 4, 5, 9, 9, 9])
    assert (table.num_cached_tokens, table.partial) == (4, None)
    assert cache.num_used == 3
    cache.check_invariants()


def test_a_forgotten_source_keeps_its_content_until_it_was_copied():
    cache = make()
    compute(cache, range(9))
    table = start(cache, [0, 1, 9])
    source = table.partial.source
    cache.forget(Selection("", b"", pack_tokens(range(8))))
    assert cache._blocks.pool.ref_counts[source] == 1
    assert cache.match(pack_tokens([0, 1, 9]), NAMESPACE).num_tokens == 0
    cache.check_invariants()
    cache.end_copy(table)
    assert source in cache._pool.free_ids()
    cache.check_invariants()


def test_a_beginning_counts_its_own_tokens_once():
    cache = make()
    packed = pack_tokens(range(8))
    targets = cache.begin_load(NAMESPACE, [(packed[:16], 1), (packed[16:], 1)])
    cache.complete_fill([target.node for target in targets])
    cache.take_events()
    first = start(cache, [0, 1, 2, 3, 4, 5, 9])
    assert (first.num_cached_tokens, first.num_restored_tokens) == (6, 6)
    second = start(cache, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert (second.num_cached_tokens, second.num_restored_tokens) == (8, 0)
    used = [event for event in cache.take_events() if isinstance(event, BlocksUsed)]
    assert [len(event.block_hashes) for event in used] == [1, 2]  # of whole blocks only
    stats = cache.stats()
    assert (stats["hit_tokens"], stats["hit_tokens_restored"], stats["partial_hit_tokens"]) == (14, 14, 2)


def test_work_that_is_no_users_leaves_the_beginning_fresh():
    cache = make()
    packed = pack_tokens(range(4))
    targets = cache.begin_load(NAMESPACE, [(packed, 1)], BlockOrigin.RECOMPUTED)
    cache.complete_fill([target.node for target in targets])
    internal = start(cache, [0, 1, 9], counts_use=False)
    assert (internal.num_cached_tokens, internal.num_recomputed_tokens) == (2, 0)
    user = start(cache, [0, 1, 8])
    assert (user.num_cached_tokens, user.num_recomputed_tokens) == (2, 2)


def test_keys_in_order(monkeypatch):
    monkeypatch.setattr(key_order, "_CHUNK_KEYS", 3)
    draw, order, known = random.Random(1), KeyOrder(), []
    for _ in range(4000):
        key = bytes(draw.randrange(3) for _ in range(draw.randint(1, 5)))
        if key in known and draw.random() < 0.6:
            order.remove(key)
            known.remove(key)
        elif key not in known and len(known) < draw.choice([10, 100]):
            order.add(key)
            bisect.insort(known, key)
        asked = bytes(draw.randrange(3) for _ in range(draw.randint(1, 5)))
        place = bisect.bisect_left(known, asked)
        beside = order.beside(asked)
        assert set(beside) <= set(known[max(0, place - 1) : place + 1])
        assert asked in beside if asked in known else set(beside) == set(known[max(0, place - 1) : place + 1])
        assert order.keys() == known
        assert len(order) == len(known)
