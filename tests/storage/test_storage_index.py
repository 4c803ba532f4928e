"""The node index against a plain model, and the schema's rows against every flipped bit."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvd.cache.hashing import Namespace, block_hash
from kvd.storage import schema
from kvd.storage.forget_intent import Mark
from kvd.storage.node_index import NodeIndex
from kvd.storage.schema import BadRowError, NodeRow, StoreMeta
from kvd.types import BlockId, KvGroup
from kvd.wal.record import Forget, Insert, Pin, Unpin

NAMESPACE = Namespace(b"f" * 32)
PARTS = (NAMESPACE.fingerprint, b"", b"")
TOKENS = [bytes([letter]) * 64 for letter in range(3)]


def add_chain(index: NodeIndex, *letters: int, uses: int = 1, stored: int = 0) -> list:
    index.add_namespace(NAMESPACE)
    parent, nodes = NAMESPACE.root, []
    for letter in letters:
        node = index.insert(NAMESPACE.root, parent, TOKENS[letter])
        assert node is not None
        node.uses = uses
        if stored:
            index.set_stored(node, stored)
        nodes.append(node)
        parent = node.block_hash
    return nodes


paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12)


@settings(max_examples=60, deadline=None)
@given(paths, st.data())
def test_replaying_any_part_of_the_log_again_changes_nothing(chains, data):
    records = []
    for chain in chains:
        parent = NAMESPACE.root
        for letter in chain:
            records.append(Insert(NAMESPACE.root, parent, TOKENS[letter], PARTS))
            parent = block_hash(parent, TOKENS[letter])
        records.append(Pin(f"p{chain[0]}", parent) if len(chain) % 2 else Unpin(f"p{chain[0]}"))
    once = NodeIndex(100)
    for record in records:
        once.apply(record)
    again = NodeIndex(100)
    for record in records:
        again.apply(record)
    rows = {key: node.row() for key, node in once.nodes.items()}
    start = data.draw(st.integers(0, len(records)))
    for record in records[start:]:
        again.apply(record)
    assert {key: node.row() for key, node in again.nodes.items()} == rows
    assert again.pins == once.pins
    assert {key: node.num_pins for key, node in again.nodes.items()} == {key: node.num_pins for key, node in once.nodes.items()}


@settings(max_examples=60, deadline=None)
@given(paths, st.integers(0, 12), st.integers(0, 3000))
def test_expiry_and_trimming_keep_what_is_on_disk_closed_under_prefixes(chains, max_nodes, num_bytes):
    index = NodeIndex(100)
    for number, chain in enumerate(chains):
        add_chain(index, *chain, uses=number + 1)
    for node in index.nodes.values():
        index.set_stored(node, 100)
    before = index.stored_bytes
    freed = index.expire_bytes(num_bytes)
    assert freed == before - index.stored_bytes
    assert freed >= min(num_bytes, before)
    assert freed < num_bytes + 100
    for node in index.nodes.values():
        if node.stored_bytes:
            assert all(ancestor.stored_bytes for ancestor in node.chain())
    index.trim(max_nodes)
    for node in index.nodes.values():
        assert node.parent is None or index.nodes[node.parent.block_hash] is node.parent
    stored = sum(1 for node in index.nodes.values() if node.stored_bytes)
    assert index.num_stored == stored
    assert len(index.nodes) <= max(max_nodes, stored)


def test_the_least_valuable_expire_first_and_pins_last():
    index = NodeIndex(100)
    cold = add_chain(index, 0, uses=1, stored=100)
    hot = add_chain(index, 1, uses=9, stored=100)
    pinned = add_chain(index, 2, uses=1, stored=100)
    index.pin("p", pinned[-1].block_hash)
    assert index.expire_bytes(1) == 100
    assert not cold[0].stored_bytes
    assert index.expire_bytes(1) == 100
    assert not hot[0].stored_bytes
    assert index.expire_bytes(1, below=index.rank(pinned[0])) == 0
    assert index.expire_bytes(1) == 100


def test_a_deeper_block_costs_more_to_compute_and_is_worth_more():
    index = NodeIndex(100)
    nodes = add_chain(index, 0, 1, 2, uses=3)
    assert index.value(nodes[0]) < index.value(nodes[1]) < index.value(nodes[2])


def test_what_is_in_memory_pinned_or_on_disk_is_never_trimmed():
    index = NodeIndex(100)
    resident = add_chain(index, 0)[0]
    resident.block_id = BlockId(3)
    pinned = add_chain(index, 1)[0]
    index.pin("p", pinned.block_hash)
    stored = add_chain(index, 2, stored=100)[0]
    add_chain(index, 2, 0)
    assert index.trim(0) == 1
    assert set(index.nodes.values()) == {resident, pinned, stored}


def test_blocks_in_memory_that_are_not_on_disk_are_counted_whatever_happens_to_them():
    index = NodeIndex(100)
    for first in range(3):
        add_chain(index, first, 0, 1)
    random = Random(3)
    for _ in range(2000):
        node = random.choice(list(index.nodes.values()))
        match random.randrange(8):
            case 0 | 1 | 2:
                index.set_block(node, BlockId(random.choice([-1, 3, 4])))
            case 3 | 4 | 5:
                index.set_stored(node, 100)
            case 6:
                index.drop_bytes(node)
            case 7 if random.random() < 0.02:
                index.forget_stored()
        assert index.num_unwritten == sum(each.is_unwritten for each in index.nodes.values())
    assert index.collect_namespaces(b"g" * 32) == 9
    assert index.num_unwritten == 0


def test_a_namespace_without_nodes_goes_with_its_last_one():
    index = NodeIndex(100)
    add_chain(index, 0)
    index.trim(0)
    assert index.namespaces == {}
    assert NAMESPACE.root in index.dirty_namespaces


def test_an_insert_below_an_unknown_parent_is_dropped():
    index = NodeIndex(100)
    index.apply(Insert(NAMESPACE.root, b"x" * 32, TOKENS[0], PARTS))
    index.apply(Insert(b"y" * 32, b"y" * 32, TOKENS[0]))
    assert index.nodes == {}


def test_a_namespace_whose_parts_do_not_give_its_root_is_not_believed():
    index = NodeIndex(100)
    index.apply(Insert(NAMESPACE.root, NAMESPACE.root, TOKENS[0], (b"other", b"", b"")))
    assert index.namespaces == {}
    assert index.nodes == {}


def test_a_forgotten_block_is_no_longer_on_disk_but_known():
    index = NodeIndex(100)
    node = add_chain(index, 0, stored=100)[0]
    index.apply(Forget((node.block_hash,)))
    assert node.block_hash in index.nodes
    assert index.stored_bytes == 0
    assert node.block_hash in index.dropped_bytes


def test_loading_drops_rows_without_a_parent_and_blocks_without_a_node():
    index = NodeIndex(100)
    rows = [node.row() for node in add_chain(NodeIndex(100), 0, 1, 2)]
    groups = (KvGroup("target", 10, b"f"), KvGroup("draft", 10, b"f"))
    assert index.load([NAMESPACE], [rows[2], rows[0]], [("p", rows[0].block_hash), ("q", rows[2].block_hash)]) == 1
    assert set(index.nodes) == {rows[0].block_hash}
    assert index.removed == {rows[2].block_hash}
    assert index.pins == {"p": rows[0].block_hash}
    keys = [
        schema.block_key("target", rows[0].block_hash),
        schema.block_key("gone", rows[0].block_hash),
        schema.block_key("target", b"z" * 32),
        b"?",
    ]
    index.load_stored(keys, groups)
    assert index.num_stored == 0
    assert index.dropped_bytes == {rows[0].block_hash}
    assert index.dropped_keys == {(schema.DB_BLOCKS, key) for key in keys[1:]}
    index.load_stored([*keys, schema.block_key("draft", rows[0].block_hash)], groups)
    assert index.num_stored == 1


def test_another_fingerprints_nodes_are_collected():
    index = NodeIndex(100)
    nodes = add_chain(index, 0, 1, stored=100)
    index.pin("p", nodes[-1].block_hash)
    assert index.collect_namespaces(b"f" * 32) == 0
    assert index.collect_namespaces(b"g" * 32) == 2
    assert (index.nodes, index.namespaces, index.pins, index.num_stored) == ({}, {}, {}, 0)
    assert index.removed == {node.block_hash for node in nodes}
    assert index.dropped_bytes == index.removed


def flips(data: bytes):
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def test_every_flipped_bit_and_every_cut_of_a_row_is_seen():
    parent = NAMESPACE.root
    key = block_hash(parent, TOKENS[1])
    node = schema.pack_node(NodeRow(key, parent, parent, TOKENS[1], 0, 3, 99, "computed"))
    namespace = schema.pack_namespace(NAMESPACE)
    meta = schema.pack_meta(StoreMeta(b"u" * 16, 3, 77, 5, clean=True))
    assert schema.unpack_node(key, node).uses == 3
    assert schema.unpack_namespace(parent, namespace) == NAMESPACE
    assert schema.unpack_meta(meta).applied_lsn == 77
    for data, check in (
        (node, lambda row: schema.unpack_node(key, row)),
        (namespace, lambda row: schema.unpack_namespace(parent, row)),
        (meta, schema.unpack_meta),
    ):
        for damaged in [*flips(data), *(data[:length] for length in range(len(data)))]:
            with pytest.raises(BadRowError):
                check(damaged)


def test_a_node_under_another_key_is_not_believed():
    key = block_hash(NAMESPACE.root, TOKENS[1])
    with pytest.raises(BadRowError):
        schema.unpack_node(b"k" * 32, schema.pack_node(NodeRow(key, NAMESPACE.root, NAMESPACE.root, TOKENS[1], 0, 3, 99, "computed")))


def block_value(row: bytes, key: bytes = b"k" * 32) -> memoryview:
    value = memoryview(bytearray(schema.value_bytes(len(row))))
    schema.write_block_header(value, key, b"f" * 32, memoryview(row))
    value[schema.BLOCK_HEADER_BYTES : schema.BLOCK_HEADER_BYTES + len(row)] = row
    return value


def test_every_flipped_bit_of_a_block_is_seen():
    row = bytes(range(100))
    value = block_value(row)
    used = schema.BLOCK_HEADER_BYTES + len(row)
    schema.check_block(value, b"k" * 32, b"f" * 32, len(row), memoryview(row))
    for bit in range(used * 8):
        damaged = memoryview(bytearray(value))
        damaged[bit // 8] ^= 1 << bit % 8
        copied = memoryview(bytes(damaged[schema.BLOCK_HEADER_BYTES : used]))
        with pytest.raises(BadRowError):
            schema.check_block(damaged, b"k" * 32, b"f" * 32, len(row), copied)


@pytest.mark.parametrize(
    ("key", "fingerprint", "row_bytes", "reason"),
    [(b"x" * 32, b"f" * 32, 100, "identity"), (b"k" * 32, b"g" * 32, 100, "fingerprint"), (b"k" * 32, b"f" * 32, 101, "length")],
)
def test_a_block_of_another_identity_model_or_size_is_refused_by_name(key, fingerprint, row_bytes, reason):
    row = bytes(100)
    with pytest.raises(BadRowError, match=reason):
        schema.check_block(block_value(row), key, fingerprint, row_bytes, memoryview(row))


@pytest.mark.parametrize("row_bytes", [0, 1, 128, 3984, 3985, 737_280, 1 << 20])
def test_a_value_fills_whole_pages(row_bytes):
    size = schema.value_bytes(row_bytes)
    assert (size + schema.PAGE_HEADER_BYTES) % schema.PAGE_BYTES == 0
    assert 0 <= size - schema.BLOCK_HEADER_BYTES - row_bytes < schema.PAGE_BYTES


@pytest.mark.parametrize("num_named", [1, 3])
def test_the_pin_of_a_forgotten_prefix_keeps_no_node_above_it(num_named):
    """A start that completes a forget finds the pin as the store has it: nobody has unpinned before."""
    index = NodeIndex(100)
    chain = add_chain(index, 0, 1, 2, stored=100)
    index.pin("p", chain[-1].block_hash)
    assert set(index.forget(Mark("", b"", (tuple(node.block_hash for node in chain[:num_named]),)))) == set(chain)
    assert not index.nodes
    assert not index.pins


def test_another_pin_keeps_its_nodes_above_a_forgotten_prefix():
    index = NodeIndex(100)
    chain = add_chain(index, 0, 1, 2, stored=100)
    index.pin("p", chain[-1].block_hash)
    index.pin("short", chain[0].block_hash)
    assert set(index.forget(Mark("", b"", (tuple(node.block_hash for node in chain),)))) == set(chain[1:])
    assert set(index.pins) == {"short"}
