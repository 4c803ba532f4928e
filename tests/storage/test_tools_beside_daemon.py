"""Tools beside a daemon that grows, rewrites and replaces what they read: it is read again, and never called damage."""

from __future__ import annotations

import subprocess
import sys

import pytest
from storage_harness import World, prompt

from kvd.cli import app
from kvd.cli.exits import Exit
from kvd.storage import schema
from kvd.storage.beside_daemon import TRIES, read_steadily
from kvd.storage.codec import PLAIN
from kvd.storage.errors import StoreDamagedError, StoreMovedError
from kvd.storage.generations import read_current
from kvd.storage.pin_export import export_pins, opened_store
from kvd.storage.store import Store
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store

READER = """
import sys
from pathlib import Path
from kvd.storage.codec import PLAIN
from kvd.storage.pin_export import opened_store
with opened_store(Path(sys.argv[1]), PLAIN) as store:
    print("open", flush=True)
    sys.stdin.readline()
    with store.reading_blocks() as reader:
        print(sum(1 for _ in reader.items()), flush=True)
"""


@pytest.fixture
def pinned(tmp_path):
    world = World(tmp_path / "state")
    world.pin("mine", prompt(0, 96))
    assert not world.checkpoint().error
    world.stop()
    return tmp_path / "state"


def changed(state_dir, condition):
    """Change the store by ``condition`` on a transaction, as no daemon would."""
    store = Store(state_dir / "kv" / str(read_current(state_dir).generation), 64 << 20)
    txn = store.begin()
    with store.reading_blocks() as reader:
        keys = [key for key, _ in reader.items()]
    condition(txn, keys)
    txn.commit()
    store.close()


def test_a_store_that_grows_eightfold_under_a_reader_is_read_on(tmp_path):
    world = World(tmp_path, row_bytes=100_000, num_blocks=200, store_max_bytes=256 << 20)
    world.pin("small", prompt(0, 32))
    assert not world.checkpoint().error
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout.readline() == "open\n"
        before = world.storage._running.store._store.file_bytes
        world.pin("large", prompt(1, 16 * 90))
        assert not world.checkpoint().error
        assert world.storage._running.store._store.file_bytes > 8 * before
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "92\n"
    world.stop()


def test_a_map_that_was_outgrown_all_the_same_is_told_from_damage(pinned, monkeypatch):
    with opened_store(pinned, PLAIN) as store:
        import lmdb

        def outgrown(*_args, **_kwargs):
            raise lmdb.MapResizedError("mdb_txn_begin")

        monkeypatch.setattr(store, "_env", type("Env", (), {"begin": outgrown, "close": store._env.close})())
        with pytest.raises(StoreMovedError):
            store.num_rows(schema.DB_BLOCKS)


def test_what_fails_while_the_generation_is_replaced_is_tried_again(pinned):
    current = pinned / "kv" / "CURRENT"
    outcomes = [StoreDamagedError("cut"), FileNotFoundError(2, "gone"), StoreMovedError("outgrown"), ["a problem"], []]

    def attempt():
        outcome = outcomes.pop(0)
        current.write_bytes(current.read_bytes() + b".")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert read_steadily(pinned, attempt, is_bad=bool) == []
    assert not outcomes


def test_what_fails_though_nothing_moved_is_damage(pinned):
    attempts = []

    def attempt():
        attempts.append(1)
        raise StoreDamagedError("cut")

    with pytest.raises(StoreDamagedError, match="cut"):
        read_steadily(pinned, attempt)
    assert read_steadily(pinned, lambda: ["a problem"], is_bad=bool) == ["a problem"]
    assert len(attempts) == 1


@pytest.mark.parametrize("command", [("check",), ("stat",), ("dump",), ("export", "out")])
def test_a_daemon_that_is_too_busy_is_named_and_the_exit_code_is_temporary(pinned, tmp_path, capsys, monkeypatch, command):
    """Each look at the store finds that the one before is over."""
    monkeypatch.setattr("kvd.observe.logging.configure", lambda **_: None)
    monkeypatch.setattr("kvd.storage.beside_daemon._PAUSE_S", 0.0)
    tries = []

    def moved(*_args, **_kwargs):
        tries.append(1)
        raise StoreMovedError("replaced")

    monkeypatch.setattr("kvd.storage.pin_export.Store", moved)
    arguments = [str(tmp_path / each) if each == "out" else each for each in command]
    assert app.main(["store", *arguments, "--state-dir", str(pinned)]) == Exit.TEMPORARY
    assert "changes it faster than it can be read" in capsys.readouterr().err
    assert len(tries) >= TRIES
    assert not (tmp_path / "out").exists()


def test_a_generation_that_is_replaced_between_two_looks_is_followed(pinned, monkeypatch):
    """CURRENT is read, and then its folder is gone, for the next one took its place."""
    generation = read_current(pinned).generation
    looks = []

    def late(state_dir, codec):
        current = read_current(state_dir, codec)
        if not looks:
            (state_dir / "kv" / str(generation)).rename(state_dir / "kv" / str(generation + 1))
            (state_dir / "kv" / "CURRENT").write_bytes(encode_current(Current(generation + 1, current.store_uuid)))
        looks.append(current)
        return current

    from kvd.storage.generations import Current, encode_current

    monkeypatch.setattr("kvd.storage.pin_export.read_current", late)
    with opened_store(pinned, PLAIN) as store:
        assert store is not None
        assert store.num_rows(schema.DB_BLOCKS) == 6
    assert len(looks) == 3


def test_a_pin_without_all_its_blocks_is_exported_with_those_that_are_there(pinned, tmp_path):
    last = []
    changed(pinned, lambda txn, keys: (last.append(keys[3]), txn.delete_key(schema.DB_BLOCKS, keys[3])))
    report = export_pins(pinned, tmp_path / "out")
    assert report["pins_without_all_bytes"] == ["mine"]
    assert report["blocks"] < 6
    assert report["bad_blocks"] == 0


def test_a_bad_block_of_a_pin_is_counted_and_the_rest_is_exported(pinned, tmp_path):
    changed(pinned, lambda txn, keys: [txn.put_row(schema.DB_BLOCKS, key, bytes(4080)) for key in keys])
    report = export_pins(pinned, tmp_path / "out")
    assert (report["pins_without_all_bytes"], report["blocks"], report["bad_blocks"]) == (["mine"], 0, 1)
    assert not check_store(pinned)["ok"]
