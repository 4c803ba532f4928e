"""What a selection holds is said twice, once for the tree in memory and once for the index of what is on disk: both say the same of any tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
from kvd.cache.tenants import Selection, tenant_salt
from kvd.commands import Recipe
from kvd.storage.forget_intent import chain_of, mark_of
from kvd.storage.node_index import NodeIndex
from kvd.types import pack_tokens

SIZE = 4
BLOCK_BYTES = 4 * SIZE
FINGERPRINT = b"f" * 32
TENANTS, CACHE_SALTS = ("acme", "rival", ""), (b"", b"night")
SALTS = [tenant_salt(tenant, salt) for tenant in TENANTS for salt in CACHE_SALTS]
NAMESPACES = [Namespace(FINGERPRINT, salt, adapter) for salt in SALTS for adapter in (b"", b"a" * 32)]

prefixes = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda letters: pack_tokens([each for each in letters for _ in range(SIZE)])
)


@st.composite
def selections(draw, tenants=TENANTS, cache_salts=CACHE_SALTS) -> Selection:
    tenant = draw(st.sampled_from(tenants))
    salt = tenant_salt(tenant, draw(st.sampled_from(cache_salts)))
    return draw(st.sampled_from([Selection(tenant), Selection(tenant, salt), *[Selection(tenant, salt, draw(prefixes))] * 6]))


@dataclass
class Twins:
    """The same blocks and pins in memory and in the index."""

    cache: CacheManager = field(
        default_factory=lambda: CacheManager(num_blocks=128, block_size_tokens=SIZE, free_watermark=0.0, max_pinned_fraction=1.0)
    )
    index: NodeIndex = field(default_factory=lambda: NodeIndex(100))

    def use(self, namespace: Namespace, token_ids: bytes) -> None:
        packed = token_ids + pack_tokens([9])  # a match never covers a whole prompt
        table = self.cache.allocate(self.cache.match(packed, namespace), len(packed) // 4)
        assert table is not None
        self.cache.complete_fill(list(table.fills))
        self.cache.release(table)
        self.index.add_namespace(namespace)
        parent = namespace.root
        for start in range(0, len(token_ids), BLOCK_BYTES):
            node = self.index.insert(namespace.root, parent, token_ids[start : start + BLOCK_BYTES])
            assert node is not None
            parent = node.block_hash

    def pin(self, name: str, namespace: Namespace, token_ids: bytes) -> None:
        self.use(namespace, token_ids)
        self.cache.pin(name, token_ids, namespace)
        assert self.index.pin(name, chain_of(namespace, token_ids, BLOCK_BYTES)[-1])

    def check(self) -> None:
        assert {node.block_hash for node in self.cache._blocks.tree.nodes()} == set(self.index.nodes)
        assert set(self.cache.pins()) == set(self.index.pins)


blocks = st.lists(st.tuples(st.sampled_from(NAMESPACES[:5]), prefixes), max_size=8)


@settings(max_examples=200, deadline=None)
@given(blocks, blocks.map(lambda each: each[:3]), selections(["acme"], [b"", b"", b"night"]))
def test_memory_and_disk_forget_the_same(used, pins, selection):
    twins = Twins()
    for namespace, token_ids in used:
        twins.use(namespace, token_ids)
    for number, (namespace, token_ids) in enumerate(pins):
        twins.pin(f"pin {number}", namespace, token_ids)
    twins.check()
    num_before = len(twins.index.nodes)
    mark = mark_of(selection, twins.index.namespaces.values(), BLOCK_BYTES)
    num_forgotten, _ = twins.cache.forget(selection)
    assert len(twins.index.forget(mark)) == num_forgotten == num_before - len(twins.index.nodes)
    twins.check()
    twins.cache.check_invariants()
    event(f"prefix: {bool(selection.token_ids)}, forgotten: {min(num_forgotten, 1)}, left: {min(len(twins.index.nodes), 1)}")


@settings(max_examples=200, deadline=None)
@given(selections(), st.sampled_from(NAMESPACES), prefixes, st.integers(0, SIZE - 1))
def test_of_a_pin_and_of_a_salt_both_say_the_same(selection, namespace, token_ids, num_more):
    mark = mark_of(selection, NAMESPACES, BLOCK_BYTES)
    assert [mark.has_salt(salt) for salt in SALTS] == [selection.has_salt(salt) for salt in SALTS]
    recipe = Recipe(
        name="a",
        token_ids=token_ids + pack_tokens([7] * num_more),
        tokenizer_digest=b"",
        tenant_salt=namespace.tenant_salt,
        adapter=namespace.adapter_digest,
    )
    assert mark.takes(recipe, FINGERPRINT, BLOCK_BYTES) == selection.holds(recipe.tenant_salt, recipe.token_ids)
