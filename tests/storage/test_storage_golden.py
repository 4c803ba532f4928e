"""The golden files of every format that was ever written: this version reads them all (docs/storage-format.md, "Versions")."""

from __future__ import annotations

import hmac
import json
import shutil
import struct
from pathlib import Path

import lmdb
import msgspec
import pytest
from crc32c import crc32c
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from storage_harness import GOLDEN_KEY, World, chain_of, prompt, row_of

from kvd.cache.hashing import Namespace
from kvd.storage import schema
from kvd.storage.errors import UnknownFormatError
from kvd.storage.store import Store
from kvd.storage.tools import check_store, dump_store

pytestmark = pytest.mark.store

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def golden(tmp_path) -> Path:
    return Path(shutil.copytree(DATA / "store-v1", tmp_path / "state"))


def test_version_1_is_read_to_the_last_field(golden):
    expected = [json.loads(line) for line in (DATA / "store-v1.jsonl").read_text().splitlines()]
    assert list(dump_store(golden)) == expected
    report = check_store(golden)
    assert report["ok"]
    assert (report["recipes"], report["nodes"], report["blocks"], report["wal_records"], report["failed_starts"]) == (1, 6, 6, 2, 1)


def test_version_1_comes_back_warm(golden):
    world = World(golden, row_bytes=200)
    assert world.report.num_blocks == 6
    assert world.report.pins_pending == ()
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    assert world.storage.status()["nodes"] == 6 + 2
    assert world.ask(prompt(0, 49, shared=16)) == 48
    assert world.ask(prompt(9, 49)) == 48
    world.stop()


def test_a_store_of_a_later_format_is_refused_and_left_alone(golden):
    store = Store(golden / "kv" / "1", 1 << 24)
    txn = store.begin()
    txn.put_meta(store.meta)
    body = struct.pack("<I", schema.FORMAT_VERSION + 1) + schema.pack_meta(store.meta)[4:-4]
    txn._put(schema.META_KEY, body + struct.pack("<I", crc32c(body)), schema.DB_META)
    txn.commit()
    store.close()
    before = (golden / "kv" / "1" / "data.mdb").read_bytes()
    with pytest.raises(UnknownFormatError, match="format 2"):
        World(golden, row_bytes=200)
    assert (golden / "kv" / "1" / "data.mdb").read_bytes() == before
    assert not check_store(golden)["ok"]


def test_a_current_of_a_later_format_is_refused(golden):
    path = golden / "kv" / "CURRENT"
    body = path.read_text().rsplit(" ", 1)[0].replace("kvd-store 1 ", "kvd-store 2 ")
    path.write_text(f"{body} {crc32c(body.encode()):08x}\n")
    with pytest.raises(UnknownFormatError, match="format 2"):
        World(golden, row_bytes=200)


# ------------------------------------------------------------------------------------------------ encrypted: 257 = 256 + 1


@pytest.fixture
def sealed(tmp_path) -> tuple[Path, str]:
    key_file = tmp_path / "key"
    key_file.write_bytes(GOLDEN_KEY)
    key_file.chmod(0o600)
    return Path(shutil.copytree(DATA / "store-v257", tmp_path / "state")), str(key_file)


def test_version_257_is_read_to_the_last_field(sealed):
    state, key_file = sealed
    expected = [json.loads(line) for line in (DATA / "store-v257.jsonl").read_text().splitlines()]
    assert list(dump_store(state, key_file=key_file)) == expected
    report = check_store(state, key_file=key_file)
    assert report["ok"], report
    assert (report["recipes"], report["nodes"], report["blocks"], report["wal_records"], report["orphan_blocks"]) == (1, 6, 6, 2, 0)


def test_version_257_comes_back_warm(sealed):
    state, key_file = sealed
    world = World(state, row_bytes=200, store_encryption_key_file=key_file)
    assert world.report.num_blocks == 6
    assert world.report.pins_pending == ()
    assert world.storage.status()["nodes"] == 6 + 2
    assert world.ask(prompt(0, 49, shared=16)) == 48
    assert world.ask(prompt(9, 49)) == 48
    world.stop()


def test_version_257_is_what_its_specification_says(sealed):
    """Read with AES-GCM, HMAC and msgpack alone, as docs/storage-format.md spells it."""
    state, _ = sealed
    wrapping = AESGCM(hmac.digest(GOLDEN_KEY, b"kvd.key-wrapping.v1", "sha256"))

    def opened(cipher: AESGCM, data: bytes, place: bytes) -> bytes:
        return cipher.decrypt(data[:12], data[12:], place)

    newest = max((state / "keys").iterdir(), key=lambda path: int(path.suffix[1:])).read_bytes()
    magic, version, _, length = struct.unpack_from("<8sIQQ", newest)
    assert (magic, version, len(newest)) == (b"KVDKEY\r\n", 1, 28 + length + 4)
    check, wrapped_index_key, next_id, stored = msgspec.msgpack.decode(newest[28:-4])
    assert check == hmac.digest(GOLDEN_KEY, b"kvd.master-key-check.v1", "sha256")[:16]
    index_key = opened(wrapping, wrapped_index_key, b"kvd.index-key")
    ciphers: dict[int, AESGCM] = {}
    tenants: dict[int, tuple[int, bytes]] = {}
    for key_id, reserved, wrapped in stored:
        secret = opened(wrapping, wrapped, b"kvd.data-key" + struct.pack("<I", key_id))
        tenants[key_id], ciphers[key_id] = (secret[0], secret[33:]), AESGCM(secret[1:33])
        assert key_id < next_id
        assert reserved % (1 << 20) == 0
    assert sorted(tenants.values()) == [(0, b""), (1, b"")]

    def unsealed(value: bytes, place: bytes) -> tuple[int, bytes]:
        version, key_id = struct.unpack_from("<BI", value)
        assert version == 1
        return key_id, opened(ciphers[key_id], value[5:], place)

    def key_of(database: bytes, plain: bytes) -> bytes:
        return hmac.digest(index_key, database + b"\0" + plain, "sha256")

    of_store, of_tenant = (next(key_id for key_id, each in tenants.items() if each[0] == kind) for kind in (0, 1))
    recipes = (state / "recipes" / "recipes.2").read_bytes()
    assert struct.unpack_from("<8sIQ", recipes) == (b"KVDRCP\r\n", 257, 2)
    key_id, recipe = unsealed(msgspec.msgpack.decode(recipes[28:-4])[0], b"recipes\0" + struct.pack("<QI", 2, 0))
    assert key_id == of_tenant
    assert msgspec.msgpack.decode(recipe)["name"] == "system"

    current = (state / "kv" / "CURRENT").read_text().split()
    assert current[:3] == ["kvd-store", "257", "1"]
    uuid = bytes.fromhex(current[3])
    segment = (state / "wal" / "0000000000000001.wal").read_bytes()
    assert struct.unpack_from("<8sH", segment) == (b"KVDWAL\r\n", 257)
    length, number, _, lsn = struct.unpack_from("<IBB6xQ", segment, 68)
    key_id, payload = unsealed(segment[88 : 88 + length], b"wal\0" + uuid + struct.pack("<QB", lsn, number))
    assert key_id == of_tenant
    root, parent, tokens, parts = msgspec.msgpack.decode(payload)
    assert (parent, tokens, parts) == (root, prompt(1, 33)[:64], [b"f" * 32, b"", b""])

    env = lmdb.open(str(state / "kv" / "1"), max_dbs=5, readonly=True, lock=False)
    with env.begin() as txn:
        rows = {name: dict(txn.cursor(env.open_db(name, txn=txn, create=False))) for name in (b"namespaces", b"nodes", b"pins", b"blocks")}
    env.close()
    key_id, namespace = unsealed(rows[b"namespaces"][key_of(b"namespaces", root)], b"namespaces\0" + key_of(b"namespaces", root))
    assert (key_id, namespace[:32]) == (of_tenant, root)
    key_id, pin = unsealed(rows[b"pins"][key_of(b"pins", b"system")], b"pins\0" + key_of(b"pins", b"system"))
    assert (key_id, pin[32:]) == (of_store, b"system")
    hashes = chain_of(prompt(9, 48), Namespace(b"f" * 32))
    assert pin[:32] == hashes[-1]
    for block in hashes:
        place = key_of(b"nodes", block)
        key_id, node = unsealed(rows[b"nodes"][place], b"nodes\0" + place)
        assert (key_id, node[:64]) == (of_tenant, block + root)
        place = key_of(b"blocks", b"target\0" + block)
        value = rows[b"blocks"][place]
        assert len(value) == 4096 - 16
        version, key_id = struct.unpack_from("<B3xI", value)
        assert (version, key_id) == (1, of_tenant)
        header = opened(ciphers[key_id], value[8:132], b"blocks\0" + place + value[:8])
        assert header[:4] == b"KVDB"
        assert header[16:48] == block
        row = opened(ciphers[key_id], value[132 : 160 + 200], b"row\0" + place + value[116:132])
        assert row == row_of(block, 200)
        assert set(value[360:]) == {0}
