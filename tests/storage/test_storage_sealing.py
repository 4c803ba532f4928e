"""What is stored under a key: nothing of it stands in clear, none of it can stand for another, and what can't be opened is a miss."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from storage_harness import BLOCK_TOKENS, FINGERPRINT, World, chain_of, crash, prompt, row_of

from kvd.cache.hashing import Namespace, block_hash
from kvd.cache.tenants import tenant_salt
from kvd.cli import app
from kvd.cli.exits import Exit
from kvd.commands import Recipe
from kvd.config import ConfigError
from kvd.observe import failpoints
from kvd.storage import schema, two_copies
from kvd.storage.encryption import reading_encryption
from kvd.storage.errors import EncryptionKeyError, KeysUnreadableError, NamespaceGoneError, RecipesUnreadableError, UnknownFormatError
from kvd.storage.generations import read_current
from kvd.storage.key_file import read_key_file
from kvd.storage.keys import KeyRing
from kvd.storage.keys_file import STORE, key_files
from kvd.storage.node_index import NodeIndex
from kvd.storage.pin_export import export_pins
from kvd.storage.recipes import decode_recipes, encode_recipes, list_recipe_files, read_recipes
from kvd.storage.schema import BadRowError, NodeRow
from kvd.storage.sealing import SealedCodec
from kvd.storage.store import Store
from kvd.storage.tools import check_store, dump_store
from kvd.types import KvGroup, pack_tokens
from kvd.wal.record import Forget, Insert, Pin, Unpin, WalDamageError, decode_record, encode_record

pytestmark = pytest.mark.store

MASTER = b"m" * 32
SALTED = Namespace(FINGERPRINT, tenant_salt("", b"the tenant's salt"))
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


def test_a_group_of_records_has_its_new_tenants_keys_in_one_write(tmp_path, key_file):
    state = tmp_path / "state"
    # nothing is written before the flush, however slowly the records come
    world = World(state, store_encryption_key_file=key_file, wal_sync_interval_ms=600_000.0, checkpoint_interval_s=1000.0)
    before = key_files(state).files()[0][0]
    for number in range(20):
        world.ask(prompt(number, 17), Namespace(FINGERPRINT, b"salt %d" % number))
    world.until(lambda: world.storage._running.wal.last_lsn == 20)
    assert world.storage._running.wal.flush(60)
    assert len(world.storage.keys.tenants()) == 20
    assert key_files(state).files()[0][0] == before + 2
    world.stop()


def test_a_transaction_has_its_new_tenants_keys_in_one_write(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file, wal_sync_interval_ms=30000.0, checkpoint_interval_s=1000.0)
    before = key_files(state).files()[0][0]
    for number in range(20):
        world.ask(prompt(number, 17), Namespace(FINGERPRINT, b"salt %d" % number))
    assert not world.checkpoint().error
    assert len(world.storage.keys.tenants()) == 20
    assert key_files(state).files()[0][0] == before + 2
    world.stop()


def test_blocks_under_way_of_a_namespace_that_is_gone_are_not_written_and_cost_no_generation(tmp_path, key_file, monkeypatch):
    world = World(tmp_path / "state", store_encryption_key_file=key_file)
    running, codec = world.storage._running, world.storage._encryption.codec

    def tenant_of(root: bytes) -> bytes:
        if root == SALTED.root:
            raise NamespaceGoneError("its namespace has left the index")
        return SealedCodec.tenant_of(codec, root)

    world.runner.gate.clear()
    for _ in range(2):
        world.ask(prompt(0, 81), SALTED)
    world.until(lambda: running.planner._hot.num_under_way == 5 and running.store._txn is not None)
    monkeypatch.setattr(codec, "tenant_of", tenant_of)
    world.runner.gate.set()
    world.until(lambda: not running.planner._hot.num_under_way)
    status = world.storage.status()
    assert (status["blocks"], status["degraded"]) == (0, False)
    for _ in range(2):
        world.ask(prompt(1, 81))
    assert not world.checkpoint().error
    assert running.recovered.generations.current.generation == 1
    world.stop()


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


# ------------------------------------------------------------------------------------------------ lives of storage


def test_a_life_under_a_key_comes_back_warm(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, checkpoint_interval_s=1000.0, store_encryption_key_file=key_file)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    for namespace in (None, SALTED):
        for _ in range(2):
            world.ask(prompt(0, 81), namespace)
    assert not world.checkpoint().error
    world.ask(prompt(1, 33), SALTED)
    world.until_logged()
    crash(world)
    report = check_store(state, key_file=key_file)
    assert report["ok"], report
    assert (report["recipes"], report["nodes"], report["blocks"], report["namespaces"]) == (1, 3 + 5 + 5, 13, 2)
    assert (report["bad_rows"], report["orphan_nodes"], report["orphan_blocks"], report["forgotten_rows"]) == (0, 0, 0, 0)
    world = World(state, store_encryption_key_file=key_file)
    assert world.report.num_blocks == 13
    assert (world.report.dropped, world.report.pins_pending) == ({}, ())
    assert world.ask(prompt(9, 49)) == 48
    assert world.ask(prompt(0, 81)) == 80
    assert world.ask(prompt(0, 81), SALTED) == 80
    assert world.storage.status()["damage"] == []
    assert world.stop()


def test_without_the_key_or_with_another_the_start_is_refused_and_nothing_touched(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    world.stop()
    other = tmp_path / "other.key"
    other.write_bytes(b"n" * 32)
    other.chmod(0o600)
    before = snapshot(state)
    for given, says in (("", "is encrypted; store_encryption_key_file must name"), (str(other), "not the key that the state directory")):
        with pytest.raises(EncryptionKeyError, match=says):
            World(state, store_encryption_key_file=given)
    assert snapshot(state) == before
    World(state, store_encryption_key_file=key_file).stop()


def test_without_the_keys_folder_encrypted_pins_are_not_overwritten(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    world.stop()
    shutil.rmtree(state / "keys")
    before = snapshot(state)
    with pytest.raises(EncryptionKeyError, match="is missing: restore it"):
        World(state, store_encryption_key_file=key_file)
    with pytest.raises(UnknownFormatError, match="encrypted"):
        World(state)
    assert snapshot(state) == before


def snapshot(state: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in state.rglob("*") if path.is_file() and path.name not in {"lock", "starting", "lock.mdb"}
    }


def plain_state(state: Path) -> None:
    world = World(state, checkpoint_interval_s=1000.0)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    for _ in range(2):
        world.ask(prompt(0, 81))
    assert not world.checkpoint().error
    world.ask(prompt(1, 33))
    world.until_logged()
    crash(world)
    (state / "quarantine").mkdir(exist_ok=True)
    (state / "quarantine" / "old").write_bytes(prompt(9, 48))
    (state / "recipes" / ".recipes.90.tmp").write_bytes(list_recipe_files(state)[0][1].read_bytes())


CONVERSION_POINTS = [
    *(name for name in sorted(failpoints.NAMES) if name.startswith("keys.") and name != "keys.before_unlink"),
    *(name for name in sorted(failpoints.NAMES) if name.startswith("recipes.") and "restore" not in name),
]


@pytest.mark.parametrize("name", [None, *CONVERSION_POINTS])
def test_a_plain_directory_is_encrypted_with_its_pins_wherever_it_is_interrupted(tmp_path, key_file, monkeypatch, name):
    state = tmp_path / "state"
    plain_state(state)
    secrets = secrets_of([(Namespace(FINGERPRINT), number, length) for number, length in ((9, 48), (0, 80), (1, 32))])
    assert found(state, secrets) == set(secrets), "the search finds what stands in clear"
    if name is not None:
        monkeypatch.setattr(failpoints, "_armed", {name: failpoints._Armed("raise", 1)})
        with pytest.raises(OSError, match="failpoint"):
            World(state, store_encryption_key_file=key_file)
    world = World(state, store_encryption_key_file=key_file)
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    assert world.report.num_blocks == 0
    assert world.report.pins_pending == ("system",)
    if name is None:
        assert world.log.named("storage.encrypted") == [{"removed": ["quarantine", "wal", "kv"]}]
    assert found(state, secrets) == set()
    assert world.storage.status()["damage"] == []
    assert world.pin("other", prompt(5, 64)) == "recipe+bytes"
    assert world.stop()
    assert check_store(state, key_file=key_file)["ok"]


# ------------------------------------------------------------------------------------------------ nothing in clear


def secrets_of(prompts) -> dict[str, bytes]:
    """What must not be found: tokens, hashes, roots and rows of prompts, by what they are."""
    secrets: dict[str, bytes] = {"the pin's name": b"system"}
    for namespace, number, length in prompts:
        token_ids = prompt(number, length)
        secrets[f"root of {number}"] = namespace.root
        secrets[f"tokens of {number}"] = token_ids[4:24]
        for index, key in enumerate(chain_of(token_ids, namespace)):
            if number == 1:  # known to the log alone, where a block's hash shows as its child's parent
                secrets["hash of 1"] = chain_of(token_ids, namespace)[0]
                break
            secrets[f"hash {index} of {number}"] = key
            secrets[f"row {index} of {number}"] = row_of(key)[:24]
    return secrets


def found(state: Path, secrets: dict[str, bytes]) -> set[str]:
    """Which of the secrets stand in any file of a state directory, or in a name."""
    everything = [path.read_bytes() for path in state.rglob("*") if path.is_file()]
    everything.append("\n".join(map(str, state.rglob("*"))).encode())
    return {what for what, secret in secrets.items() if any(secret in data for data in everything)}


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
def test_nothing_stands_in_clear_after_a_life_with_damage(tmp_path, key_file, is_sealed):
    state = tmp_path / "state"
    options = {"store_encryption_key_file": key_file} if is_sealed else {}
    world = World(state, checkpoint_interval_s=1000.0, **options)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    for _ in range(2):
        world.ask(prompt(0, 81), SALTED)
    assert not world.checkpoint().error
    world.ask(prompt(1, 33), SALTED)
    world.until_logged()
    crash(world)
    newest = list_recipe_files(state)[0][1]
    newest.write_bytes(newest.read_bytes()[:-1])
    segment = next((state / "wal").glob("*.wal"))
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    world = World(state, **options)
    assert len(world.storage.status()["damage"]) == 2
    assert len(list((state / "quarantine").iterdir())) == 2
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    secrets = secrets_of([(Namespace(FINGERPRINT), 9, 48), (SALTED, 0, 80), (SALTED, 1, 32)])
    secrets["salt"] = SALTED.tenant_salt
    assert found(state, secrets) == (set() if is_sealed else set(secrets))
    world.stop()
    assert found(state, secrets) == (set() if is_sealed else set(secrets))


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("umask", [0o000, 0o777 & ~0o700], ids=["umask 000", "umask 077"])
def test_every_file_is_its_owners_alone_whatever_the_umask(tmp_path, key_file, umask, is_sealed):
    state = tmp_path / "state"
    state.mkdir(mode=0o777)
    state.chmod(0o777)
    options = {"store_encryption_key_file": key_file} if is_sealed else {}
    old = os.umask(umask)
    try:
        world = World(state, checkpoint_interval_s=1000.0, **options)
        assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
        assert not world.checkpoint().error
        world.ask(prompt(1, 33))
        world.until_logged()
        crash(world)
        segment = next((state / "wal").glob("*.wal"))
        data = bytearray(segment.read_bytes())
        data[70] ^= 1
        segment.write_bytes(data)
        (state / "kv" / "1" / "data.mdb").write_bytes(b"no store")
        shutil.copy(list_recipe_files(state)[0][1], state / "recipes" / "recipes.90")
        world = World(state, **options)
        seen = {str(path.relative_to(state)): stat.S_IMODE(path.stat().st_mode) for path in [state, *state.rglob("*")]}
        world.stop()
    finally:
        os.umask(old)
    kinds = {"lock", "starting", "recipes/recipes.9", "wal/0", "kv/CURRENT", "data.mdb", "lock.mdb", ".aside", "quarantine/"}
    assert all(any(kind in name for name in seen) for kind in (kinds | {"keys/keys."} if is_sealed else kinds)), seen
    wrong = {name: oct(mode) for name, mode in seen.items() if mode != (0o700 if (state / name).is_dir() else 0o600)}
    wrong = {name: mode for name, mode in wrong.items() if (state / name).exists() or not name.startswith("starting")}
    assert not wrong


# ------------------------------------------------------------------------------------------------ a forgotten tenant


def test_what_a_destroyed_key_had_sealed_is_a_miss_and_no_damage(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    for _ in range(2):
        world.ask(prompt(0, 81), SALTED)
    assert not world.checkpoint().error
    crash(world)
    assert KeyRing(state, read_key_file(Path(key_file))).destroy(SALTED.tenant_salt)
    report = check_store(state, key_file=key_file)
    assert (report["ok"], report["nodes"], report["blocks"], report["forgotten_rows"]) == (True, 3, 3, 11)
    world = World(state, store_encryption_key_file=key_file)
    assert world.report.num_blocks == 3
    assert world.report.pins_pending == ()
    assert world.ask(prompt(0, 81), SALTED) == 0
    assert world.ask(prompt(0, 81), SALTED) == 80
    assert world.stop()
    assert check_store(state, key_file=key_file)["forgotten_rows"] == 0
    world = World(state, store_encryption_key_file=key_file)
    assert world.ask(prompt(0, 81), SALTED) == 80
    assert world.num_restored == 80
    world.stop()


# ------------------------------------------------------------------------------------------------ tools


def test_a_damaged_row_of_a_pin_costs_its_bytes_in_an_export_not_the_export(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    for number, name in enumerate(("whole", "damaged")):
        assert world.pin(name, prompt(number, 48)) == "recipe+bytes"
    assert world.stop()
    codec = reading_encryption(state, key_file).codec
    store = Store(state / "kv" / str(read_current(state, codec).generation), 64 << 20, codec=codec)
    txn = store.begin()
    txn.put_row(schema.DB_PINS, codec.pin_key("damaged"), b"no row of a pin")
    txn.commit()
    store.close()
    report = export_pins(state, tmp_path / "pins.kvdpins", open_codec=lambda: codec)
    assert (report["pins"], report["blocks"], report["pins_without_all_bytes"]) == (2, 3, ["damaged"])


def test_tools_without_the_key_check_the_structure_and_show_no_content(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, checkpoint_interval_s=1000.0, store_encryption_key_file=key_file)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    assert not world.checkpoint().error
    wal = world.storage._running.wal
    before = wal.last_lsn
    world.ask(prompt(1, 33))
    world.until(lambda: wal.durable_lsn == wal.last_lsn > before)
    crash(world)
    blind, seeing = check_store(state), check_store(state, key_file=key_file)
    assert blind["ok"], blind
    assert (blind["encryption"], seeing["encryption"]) == ("contents not checked: no key file given", "checked with the key")
    same = ("recipes", "nodes", "blocks", "namespaces", "wal_records", "recipe_copies")
    assert {name: blind[name] for name in same} == {name: seeing[name] for name in same}
    with pytest.raises(EncryptionKeyError, match="is encrypted"):
        next(dump_store(state))
    entries = list(dump_store(state, key_file=key_file))
    assert {entry["kind"] for entry in entries} >= {"recipe", "wal_record", "node", "block", "pin"}
    json.dumps(entries)
    newest = list_recipe_files(state)[0][1]
    newest.write_bytes(newest.read_bytes()[:-1])
    assert not check_store(state)["ok"]
    plain = tmp_path / "plain"
    World(plain).stop()
    with pytest.raises(EncryptionKeyError, match="is not encrypted"):
        check_store(plain, key_file=key_file)
    assert check_store(plain)["encryption"] == "none"


def test_keys_older_than_the_recipes_are_not_taken_for_a_forgotten_tenant(tmp_path, key_file):
    """A backup of the keys alone, brought back: the pins are unreadable, not gone."""
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    world.stop()
    backup = tmp_path / "backup"
    shutil.copytree(state / "keys", backup)
    world = World(state, store_encryption_key_file=key_file)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    world.stop()
    shutil.rmtree(state / "keys")
    shutil.copytree(backup, state / "keys")
    with pytest.raises(RecipesUnreadableError):
        World(state, store_encryption_key_file=key_file)
    assert read_recipes_with(state, key_file) is None


def read_recipes_with(state: Path, key_file: str):
    try:
        return read_recipes(state, reading_encryption(state, key_file).codec)
    except RecipesUnreadableError:
        return None


def test_the_commands_make_use_and_change_a_key(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvd.observe.logging.configure", lambda **_: None)
    state, old, new = tmp_path / "state", tmp_path / "old.key", tmp_path / "new.key"
    assert app.main(["store", "keygen", str(old)]) == Exit.OK
    assert app.main(["store", "keygen", str(new)]) == Exit.OK
    before = old.read_bytes()
    assert app.main(["store", "keygen", str(old)]) == Exit.CANNOT_CREATE
    assert old.read_bytes() == before
    world = World(state, store_encryption_key_file=str(old))
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    rekey = ["store", "rekey", "--old", str(old), "--new", str(new), "--state-dir", str(state)]
    assert app.main(rekey) == Exit.TEMPORARY, "a daemon holds it"
    world.stop()
    assert app.main(rekey) == Exit.OK
    assert app.main(rekey) == Exit.CONFIG
    check = ["store", "check", "--state-dir", str(state), "--json"]
    assert app.main([*check, "--store-encryption-key-file", str(old)]) == Exit.CONFIG
    for command in (check, ["store", "stat", "--state-dir", str(state), "--json"]):
        for key in ([], ["--store-encryption-key-file", str(new)]):
            capsys.readouterr()
            assert app.main([*command, *key]) == Exit.OK
            report = json.loads(capsys.readouterr().out)
            assert (report["nodes"], report["blocks"], report["problems"]) == (3, 3, [])
    assert app.main(["store", "dump", "--state-dir", str(state)]) == Exit.CONFIG
    export = ["store", "export", str(tmp_path / "pins"), "--state-dir", str(state)]
    assert app.main(export) == Exit.CONFIG
    assert app.main([*export, "--store-encryption-key-file", str(new)]) == Exit.OK
    elsewhere = tmp_path / "elsewhere"
    assert (
        app.main(["store", "import", str(tmp_path / "pins"), "--state-dir", str(elsewhere), "--store-encryption-key-file", str(old)])
        == Exit.OK
    )
    assert prompt(9, 48)[4:24] in (tmp_path / "pins").read_bytes()
    assert found(elsewhere, {"tokens": prompt(9, 48)[4:24], "name": b"system"}) == set()
    for directory, key in ((state, new), (elsewhere, old)):
        world = World(directory, store_encryption_key_file=str(key))
        assert world.report.num_blocks == 3
        assert world.ask(prompt(9, 49)) == 48
        world.stop()
        assert old.read_bytes().strip() not in b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def test_a_missing_package_is_named(tmp_path, key_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"store_encryption_key_file: .*pip install '\.\[encryption\]'"):
        World(tmp_path / "state", store_encryption_key_file=key_file)
    assert not (tmp_path / "state" / "keys").exists()
    World(tmp_path / "state").stop()


def test_one_unreadable_keys_file_heals_and_two_are_refused(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    world.stop()
    newest = key_files(state).files()[0][1]
    newest.write_bytes(b"damaged")
    world = World(state, store_encryption_key_file=key_file)
    assert world.storage.status()["damage"] == [f"a file of the encryption keys was removed: {newest}: its checksum does not match"]
    assert world.report.num_blocks == 3
    world.stop()
    for _, path in key_files(state).files():
        path.write_bytes(b"damaged")
    before = snapshot(state)
    with pytest.raises(KeysUnreadableError, match="Restore one"):
        World(state, store_encryption_key_file=key_file)
    assert snapshot(state) == before
    assert not check_store(state)["ok"]


def test_a_disk_that_takes_no_keys_costs_no_answer_and_heals(tmp_path, key_file, monkeypatch):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    real = two_copies.replace_file

    def refuse(path: Path, *arguments, **options) -> None:
        if path.parent.name == "keys":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *arguments, **options)

    monkeypatch.setattr(two_copies, "replace_file", refuse)
    for _ in range(2):
        world.ask(prompt(0, 81), SALTED)
    world.until(lambda: "encryption keys" in world.storage.status()["reason"], 30)
    assert world.ask(prompt(0, 81), SALTED) == 80
    monkeypatch.setattr(two_copies, "replace_file", real)
    world.until(lambda: not world.storage.status()["degraded"], 60)
    assert not world.checkpoint().error
    assert world.stop()
    world = World(state, store_encryption_key_file=key_file)
    assert world.ask(prompt(0, 81), SALTED) == 80
    assert world.num_restored == 80
    world.stop()
