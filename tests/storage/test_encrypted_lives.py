"""Storage under a key over its lives: it comes back warm, keys are written before what needs them, and without the right ones a start is refused and nothing touched."""

from __future__ import annotations

import errno
import shutil
import sys
from pathlib import Path

import pytest
from storage_harness import FINGERPRINT, SALTED, World, crash, prompt

from kvd.cache.hashing import Namespace
from kvd.config import ConfigError
from kvd.storage import two_copies
from kvd.storage.encryption import reading_encryption
from kvd.storage.errors import EncryptionKeyError, KeysUnreadableError, NamespaceGoneError, RecipesUnreadableError, UnknownFormatError
from kvd.storage.key_file import read_key_file
from kvd.storage.keys import KeyRing
from kvd.storage.keys_file import key_files
from kvd.storage.recipes import read_recipes
from kvd.storage.sealing import SealedCodec
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store


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


# ------------------------------------------------------------------------------------------------ new tenants' keys


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


# ------------------------------------------------------------------------------------------------ keys that are not the right ones


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


def test_a_missing_package_is_named(tmp_path, key_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"store_encryption_key_file: .*pip install '\.\[encryption\]'"):
        World(tmp_path / "state", store_encryption_key_file=key_file)
    assert not (tmp_path / "state" / "keys").exists()
    World(tmp_path / "state").stop()
