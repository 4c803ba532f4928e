"""Forgetting in memory: what the forgotten prefix alone has kept goes with it, be it blocks above it, counts of uses or names of prefixes."""

from __future__ import annotations

import pytest

from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager, CostPolicy
from kvd.cache.tenants import Selection, tenant_salt
from kvd.types import pack_tokens

SIZE = 4
ACME, RIVAL = Namespace(b"f", tenant_salt("acme", b"")), Namespace(b"f", tenant_salt("rival", b""))
SYSTEM = pack_tokens(range(3 * SIZE))


def make():
    policy = CostPolicy(16, SIZE)
    return CacheManager(num_blocks=16, block_size_tokens=SIZE, free_watermark=0.0, max_pinned_fraction=1.0, policy=policy), policy


def use(cache, token_ids, namespace):
    """A request that ends at once: its last token is no part of a block."""
    packed = token_ids + pack_tokens([9])
    table = cache.allocate(cache.match(packed, namespace), len(packed) // 4)
    cache.complete_fill(list(table.fills))
    cache.release(table)


def salts(cache):
    return [node.namespace.tenant_salt for node in cache._blocks.tree.nodes()]


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_the_pin_of_a_forgotten_prefix_keeps_no_block_above_it(num_blocks):
    cache, _ = make()
    use(cache, SYSTEM, ACME)
    cache.pin("acme/system", SYSTEM, ACME)
    assert cache.forget(Selection("acme", ACME.tenant_salt, SYSTEM[: num_blocks * SIZE * 4])) == (3, [])
    assert not cache.pins()
    assert not salts(cache)
    cache.check_invariants()


def test_another_pin_keeps_its_blocks_above_a_forgotten_prefix():
    cache, _ = make()
    use(cache, SYSTEM, ACME)
    cache.pin("acme/system", SYSTEM, ACME)
    cache.pin("acme/short", SYSTEM[: SIZE * 4], ACME)
    assert cache.forget(Selection("acme", ACME.tenant_salt, SYSTEM))[0] == 2
    assert set(cache.pins()) == {"acme/short"}
    cache.check_invariants()


def test_uses_of_blocks_that_left_before_are_forgotten_too_and_only_those():
    cache, policy = make()
    for namespace in (ACME, RIVAL):
        for _ in range(3):
            use(cache, SYSTEM, namespace)
    cache.watermark_blocks = 16
    assert cache.evict_to_watermark(16) == 6
    assert len(policy._remembered) == 6
    cache.forget(Selection("acme"))
    assert len(policy._remembered) == 3
    for namespace, uses in ((ACME, 1), (RIVAL, 4)):
        use(cache, SYSTEM, namespace)
        assert {node.uses for node in cache._blocks.tree.nodes() if node.namespace == namespace} == {uses}


def test_no_prefix_is_kept_for_reports():
    cache, _ = make()
    for namespace in (ACME, RIVAL):
        for _ in range(2):
            use(cache, SYSTEM, namespace)
    cache.forget(Selection("acme"))
    assert [node.namespace for node in cache._uses._prefix_ends] == [RIVAL]
