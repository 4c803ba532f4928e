"""What is stored under a key: none of it can stand for another, and what can't be opened is a miss."""

from __future__ import annotations

import os

import pytest
from storage_harness import BLOCK_TOKENS, FINGERPRINT, SALTED

from kvd.cache.hashing import Namespace, block_hash
from kvd.commands import Recipe
from kvd.storage import schema
from kvd.storage.errors import NamespaceGoneError, UnknownFormatError
from kvd.storage.keys import KeyRing
from kvd.storage.keys_file import STORE
from kvd.storage.node_index import NodeIndex
from kvd.storage.recipes import decode_recipes, encode_recipes
from kvd.storage.schema import BadRowError, NodeRow
from kvd.storage.sealing import SealedCodec
from kvd.types import KvGroup, pack_tokens
from kvd.wal.record import Forget, Insert, Pin, Unpin, WalDamageError, decode_record, encode_record

pytestmark = pytest.mark.store

MASTER = b"m" * 32
TOKENS = pack_tokens(range(7000, 7000 + BLOCK_TOKENS))
GROUP = KvGroup("target", 200, b"g" * 32)


@pytest.fixture
def codec(tmp_path) -> SealedCodec:
    sealed = SealedCodec(KeyRing(tmp_path, MASTER, create=True))
    sealed.pack_namespace(SALTED)
    return sealed


def node_row(tokens: bytes = TOKENS) -> NodeRow:
    key = block_hash(SALTED.root, tokens)
    return NodeRow(key, SALTED.root, SALTED.root, tokens, 0, 3, 99, "computed")


def flips(data: bytes):
    """Every byte of ``data`` with one bit of it turned."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


# ------------------------------------------------------------------------------------------------ values


def test_rows_come_back_and_a_flipped_bit_of_any_byte_is_a_bad_row(codec):
    row = node_row()
    cases = [
        (codec.node_key(row.block_hash), codec.pack_node(row), codec.unpack_node, row),
        (codec.namespace_key(SALTED.root), codec.pack_namespace(SALTED), codec.unpack_namespace, SALTED),
        (codec.pin_key("rules"), codec.pack_pin("rules", row.block_hash), codec.unpack_pin, ("rules", row.block_hash)),
    ]
    for key, value, unpack, expected in cases:
        assert unpack(key, value) == expected
        for damaged in (*flips(value), *(value[:length] for length in range(len(value))), value + b"x"):
            with pytest.raises(BadRowError):
                unpack(key, damaged)


def test_a_value_is_good_in_its_own_place_alone(codec):
    rows = [node_row(), node_row(pack_tokens(range(BLOCK_TOKENS)))]
    keys, values = [codec.node_key(row.block_hash) for row in rows], [codec.pack_node(row) for row in rows]
    for key, value in ((keys[0], values[1]), (keys[1], values[0])):
        with pytest.raises(BadRowError, match="sealed"):
            codec.unpack_node(key, value)
    with pytest.raises(BadRowError, match="sealed"):
        codec.unpack_pin(keys[0], values[0])
    sealed = codec.wal_seal(b"u" * 16)
    payload = sealed.seal(Unpin("a"), b"payload", 7)
    assert sealed.open(3, payload, 7) == b"payload"
    for other, number, lsn in ((sealed, 3, 8), (sealed, 2, 7), (codec.wal_seal(b"v" * 16), 3, 7)):
        with pytest.raises(WalDamageError):
            other.open(number, payload, lsn)


def test_a_block_comes_back_and_a_flipped_bit_of_any_byte_is_a_miss(codec):
    row = os.urandom(GROUP.row_bytes)
    key = block_hash(SALTED.root, TOKENS)
    value = memoryview(bytearray(codec.value_bytes(GROUP.row_bytes)))
    codec.write_block(value, GROUP, key, SALTED.root, memoryview(row))
    memory = memoryview(bytearray(GROUP.row_bytes))
    codec.read_block(value, GROUP, key, memory)
    assert bytes(memory) == row
    assert codec.verify_block(codec.block_key("target", key), value) == ("target", key, GROUP.row_bytes)
    used = 160 + GROUP.row_bytes
    assert set(value[used:]) == {0}
    reasons = set()
    for damaged in flips(bytes(value[:used])):
        with pytest.raises(BadRowError) as caught:
            codec.read_block(memoryview(damaged + bytes(value[used:])), GROUP, key, memory)
        reasons.add(caught.value.reason)
    assert reasons == {"version", "key", "header", "checksum"}


def test_a_block_asked_for_by_another_name_or_size_is_a_miss(codec):
    row = os.urandom(GROUP.row_bytes)
    key, other = block_hash(SALTED.root, TOKENS), block_hash(SALTED.root, TOKENS[::-1])
    value = memoryview(bytearray(codec.value_bytes(GROUP.row_bytes)))
    codec.write_block(value, GROUP, key, SALTED.root, memoryview(row))
    for group, name, reason in (
        (GROUP, other, "header"),
        (KvGroup("draft", GROUP.row_bytes, GROUP.fingerprint), key, "header"),
        (KvGroup("target", GROUP.row_bytes, b"h" * 32), key, "fingerprint"),
        (KvGroup("target", GROUP.row_bytes - 1, GROUP.fingerprint), key, "length"),
        (KvGroup("target", 5000, GROUP.fingerprint), key, "length"),
    ):
        with pytest.raises(BadRowError) as caught:
            codec.read_block(value, group, name, memoryview(bytearray(group.row_bytes)))
        assert caught.value.reason == reason


def test_header_and_row_of_two_writings_do_not_mix(codec):
    key = block_hash(SALTED.root, TOKENS)
    values = []
    for _ in range(2):
        value = memoryview(bytearray(codec.value_bytes(GROUP.row_bytes)))
        codec.write_block(value, GROUP, key, SALTED.root, memoryview(bytes(GROUP.row_bytes)))
        values.append(value)
    assert values[0] != values[1]
    mixed = memoryview(bytes(values[0][:132]) + bytes(values[1][132:]))
    with pytest.raises(BadRowError, match="checksum"):
        codec.read_block(mixed, GROUP, key, memoryview(bytearray(GROUP.row_bytes)))


def test_a_block_travels_in_clear_and_is_sealed_again(codec):
    row = os.urandom(GROUP.row_bytes)
    key = block_hash(SALTED.root, TOKENS)
    value = memoryview(bytearray(codec.value_bytes(GROUP.row_bytes)))
    codec.write_block(value, GROUP, key, SALTED.root, memoryview(row))
    plain = codec.plain_block(codec.block_key("target", key), value, key)
    assert plain[96:] == row
    again = memoryview(codec.block_value("target", key, SALTED.root, plain))
    memory = memoryview(bytearray(GROUP.row_bytes))
    codec.read_block(again, GROUP, key, memory)
    assert bytes(memory) == row
    for damaged in (plain[:-1], plain[:100] + b"!" + plain[101:], b"X" + plain[1:]):
        with pytest.raises(BadRowError):
            codec.block_value("target", key, SALTED.root, damaged)


def test_values_fill_whole_pages(codec):
    for row_bytes in (1, 200, 4096 - 16 - 160, 4096 - 16 - 159, 123_456):
        size = codec.value_bytes(row_bytes)
        assert (size + schema.PAGE_HEADER_BYTES) % schema.PAGE_BYTES == 0
        assert 0 <= size - 160 - row_bytes < schema.PAGE_BYTES


def test_what_is_sealed_with_a_destroyed_key_is_gone_and_the_rest_is_not(codec):
    row = node_row()
    key, value, pin = codec.node_key(row.block_hash), codec.pack_node(row), codec.pack_pin("rules", row.block_hash)
    sealed = codec.wal_seal(b"u" * 16)
    insert, unpin = sealed.seal(Insert(SALTED.root, SALTED.root, TOKENS), b"tokens", 1), sealed.seal(Unpin("a"), b"name", 2)
    codec.ring.destroy(SALTED.tenant_salt)
    with pytest.raises(BadRowError, match="key"):
        codec.unpack_node(key, value)
    assert sealed.open(1, insert, 1) is None
    assert sealed.open(3, unpin, 2) == b"name"
    assert codec.unpack_pin(codec.pin_key("rules"), pin)[0] == "rules"


def test_a_key_that_was_never_issued_is_damage_not_a_forgotten_tenant(codec, tmp_path):
    newer = SealedCodec(KeyRing(tmp_path, MASTER))
    for number in range(5):
        newer.ring.for_tenant(b"%d" % number)
    value = newer.seal(b"4", b"data", b"place")
    with pytest.raises(BadRowError, match="key"):
        codec.open(value, b"place")
    assert not codec.was_destroyed(value)
    root = Namespace(FINGERPRINT, b"4").root
    record = newer.wal_seal(b"u" * 16).seal(Insert(root, root, TOKENS, (FINGERPRINT, b"4", b"")), b"x", 1)
    with pytest.raises(WalDamageError, match="key"):
        codec.wal_seal(b"u" * 16).open(1, record, 1)


# ------------------------------------------------------------------------------------------------ the log


def test_records_are_sealed_under_the_tenant_whose_tokens_they_hold(codec):
    sealed = codec.wal_seal(b"u" * 16)
    other = Namespace(FINGERPRINT, b"another")
    records = [
        Insert(SALTED.root, SALTED.root, TOKENS),
        Insert(other.root, other.root, TOKENS, (other.fingerprint, other.tenant_salt, other.adapter_digest)),
        Insert(other.root, block_hash(other.root, TOKENS), TOKENS),
        Pin("rules", b"l" * 32),
        Unpin("rules"),
        Forget((b"l" * 32,)),
    ]
    data = b"".join(encode_record(record, 1 + index, 99, sealed) for index, record in enumerate(records))
    assert not any(secret in data for secret in (TOKENS, SALTED.root, b"another", b"rules", b"l" * 32))
    keys = {tenant: codec.ring.for_sealing(tenant, 0)[0].key_id for tenant in (STORE, SALTED.tenant_salt, b"another")}
    offset, used = 0, []
    for index, record in enumerate(records):
        used.append(int.from_bytes(data[offset + 25 : offset + 29], "little"))
        lsn, back, offset = decode_record(memoryview(data), offset, 99, sealed)
        assert (lsn, back) == (index + 1, record)
    assert used == [keys[SALTED.tenant_salt], keys[b"another"], keys[b"another"], keys[STORE], keys[STORE], keys[STORE]]


def test_of_a_namespace_that_has_left_the_index_no_salt_is_kept_and_nothing_is_written(codec):
    sealed, other = codec.wal_seal(b"u" * 16), Namespace(FINGERPRINT, b"another")
    codec.learn(other)
    codec.retain({other.root})
    with pytest.raises(NamespaceGoneError):
        codec.pack_node(node_row())
    with pytest.raises(NamespaceGoneError):
        codec.write_block(memoryview(bytearray(codec.value_bytes(200))), GROUP, b"h" * 32, SALTED.root, memoryview(bytes(200)))
    records = [Insert(SALTED.root, SALTED.root, TOKENS), Insert(other.root, other.root, TOKENS)]
    data = b"".join(encode_record(record, 1 + index, 99, sealed) for index, record in enumerate(records))
    index = NodeIndex(1)
    index.add_namespace(other)
    lsn, offset = 0, 0
    while offset < len(data):
        lsn, record, offset = decode_record(memoryview(data), offset, 99, sealed)
        assert record is not None
        index.apply(record)
    assert lsn == 2
    assert [node.root for node in index.nodes.values()] == [other.root]
    codec.learn(SALTED)
    assert codec.unpack_node(codec.node_key(node_row().block_hash), codec.pack_node(node_row())) == node_row()


# ------------------------------------------------------------------------------------------------ recipes


def recipe(name: str, salt: bytes = b"") -> Recipe:
    return Recipe(
        name=name, token_ids=TOKENS, tokenizer_digest=b"d" * 32, messages=[{"role": "system", "content": name * 3}], tenant_salt=salt
    )


def test_recipes_are_sealed_each_under_its_tenant(codec):
    recipes = {each.name: each for each in (recipe("one", b"a"), recipe("two", b"b"), recipe("three", b"a"))}
    data = encode_recipes(7, recipes, codec)
    assert decode_recipes(data, codec) == (7, recipes)
    assert not any(secret in data for secret in (TOKENS, b"one", b"twotwo", b"three"))
    with pytest.raises(UnknownFormatError, match="encrypted, and no store_encryption_key_file"):
        decode_recipes(data)
    codec.ring.destroy(b"a")
    assert decode_recipes(data, codec) == (7, {"two": recipes["two"]})
