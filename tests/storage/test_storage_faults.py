"""What the store does when its disk refuses: what is kept, what is given up, how often it is tried, and what the counters say meanwhile."""

from __future__ import annotations

import errno
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
from storage_harness import ROW_BYTES, World, chain_of, crash, prompt

from kvd.cache.tenants import Selection
from kvd.storage import generations, persistence, store, store_thread
from kvd.storage.errors import StateLockedError, StoreBlockedError, StoreDamagedError, StoreFullError, StoreMapFullError, StorePanickedError
from kvd.storage.fault_episode import FaultEpisode
from kvd.storage.lock import StateLock
from kvd.storage.store import Store, StoreTransaction
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(store_thread, "_RETRY_MIN_S", 0.01)
    monkeypatch.setattr(store_thread, "_RETRY_MAX_S", 0.05)


class Refusing:
    """Has a method of the store raise while ``error`` is set."""

    def __init__(self, monkeypatch, owner: type, name: str) -> None:
        self.error: Exception | None = None
        self.num_refused = 0
        real = getattr(owner, name)
        refusing = self

        def call(self, *arguments, **options):
            if refusing.error is not None:
                refusing.num_refused += 1
                raise refusing.error
            return real(self, *arguments, **options)

        monkeypatch.setattr(owner, name, call)


def ask_hot(world: World, *numbers: int) -> None:
    for number in numbers:
        for _ in range(2):
            world.ask(prompt(number, 81))


def events(world: World, name: str) -> int:
    return len(world.log.named(name))


def test_tries_have_growing_bounded_pauses_and_are_reported_once(tmp_path, monkeypatch):
    commit = Refusing(monkeypatch, StoreTransaction, "commit")
    world = World(tmp_path)
    commit.error = StoreFullError("enospc: the disk is full")
    ask_hot(world, 0)
    world.until(lambda: commit.num_refused >= 8)
    began_s, before = time.monotonic(), commit.num_refused
    world.until(lambda: commit.num_refused >= before + 4)
    assert time.monotonic() - began_s > 3 * 0.05
    world.until(lambda: world.storage.stats()["degradations"] == 1)
    commit.error = None
    world.until(lambda: world.storage.status()["blocks"] == 5 and not world.storage.status()["degraded"])
    assert events(world, "storage.degraded") == events(world, "storage.resumed") == 1
    assert world.storage.stats()["degradations"] == 1
    world.stop()
    assert check_store(tmp_path)["ok"]


def test_another_cause_is_shown_and_the_episode_stays_one(tmp_path, monkeypatch):
    commit = Refusing(monkeypatch, StoreTransaction, "commit")
    world = World(tmp_path)
    commit.error = StoreFullError("enospc: the disk is full")
    ask_hot(world, 0)
    world.until(lambda: world.storage.status()["reason"].startswith("enospc: "))
    commit.error = StoreBlockedError("erofs: the file system is read-only")
    world.until(lambda: world.storage.status()["reason"].startswith("erofs: "))
    commit.error = None
    world.until(lambda: not world.storage.status()["degraded"])
    assert events(world, "storage.degraded") == events(world, "storage.resumed") == 1
    world.stop()


def test_an_io_error_while_the_disk_is_full_gives_the_generation_up(tmp_path, monkeypatch):
    commit = Refusing(monkeypatch, StoreTransaction, "commit")
    world = World(tmp_path)
    ask_hot(world, 0)
    assert not world.checkpoint().error
    commit.error = StoreFullError("enospc: the disk is full")
    ask_hot(world, 1)
    world.until(lambda: world.storage.status()["degraded"])
    assert world.storage.status()["blocks"] == 5
    commit.error = StoreDamagedError("eio: the disk fails")
    world.until(lambda: world.storage.status()["reason"].startswith("eio: ") and world.storage.status()["blocks"] == 0)
    commit.error = None
    world.until(lambda: world.storage.status()["blocks"] == 10 and not world.storage.status()["degraded"])
    assert [entry["generation_lost"] for entry in world.log.named("storage.degraded")] == [False, True]
    assert world.storage._running.recovered.generations.current.generation == 2
    world.stop()
    assert check_store(tmp_path)["ok"]


def test_a_full_disk_that_takes_rows_and_no_blocks_has_a_tenth_expire_for_free_pages(tmp_path, monkeypatch):
    put = Refusing(monkeypatch, StoreTransaction, "put_block")
    world = World(tmp_path)
    ask_hot(world, *range(6))
    assert not world.checkpoint().error
    assert world.storage.status()["blocks"] == 30
    monkeypatch.setattr(Store, "disk_has_room", lambda *_: False)
    put.error = StoreFullError("enospc: the disk is full")
    ask_hot(world, 7)
    world.until(lambda: world.storage.stats()["expired_bytes"] > 0)
    assert world.storage.status()["degraded"]
    put.error = None
    world.until(lambda: world.storage.status()["blocks"] == 35)
    assert world.storage.status()["degraded"], "there is no room yet for more than what became free"
    assert events(world, "storage.degraded") == 1
    monkeypatch.undo()
    world.until(lambda: not world.storage.status()["degraded"])
    assert events(world, "storage.resumed") == 1
    world.stop()


def test_a_map_that_is_full_heals_in_a_fresh_generation(tmp_path, monkeypatch):
    real = persistence.plan_budget

    def plan_budget(*arguments, **options):
        return replace(real(*arguments, **options), map_bytes=1 << 20)  # the planner believes in more

    monkeypatch.setattr(persistence, "plan_budget", plan_budget)
    world = World(tmp_path, num_blocks=400, row_bytes=8 * ROW_BYTES)
    assert world.pin("system", prompt(99, 81)) == "recipe+bytes"
    number = 0
    while not events(world, "storage.degraded"):
        number += 1
        assert number < 60
        ask_hot(world, number)
        world.checkpoint()
    assert world.log.named("storage.degraded")[0]["reason"].startswith("map_full: ")
    for each in range(number + 1, number + 20):
        ask_hot(world, each)
    world.until(lambda: events(world, "storage.resumed") or world.storage.status()["blocks"])
    assert sum(path.stat().st_size for path in (tmp_path / "kv").glob("[0-9]*/data.mdb")) <= 2 << 20
    crash(world)
    world = World(tmp_path, num_blocks=400, row_bytes=8 * ROW_BYTES)
    assert world.ask(prompt(99, 81)) in {0, 80}
    crash(world)


def test_after_a_failed_write_of_the_meta_page_the_generation_is_opened_again(tmp_path, monkeypatch):
    commit = Refusing(monkeypatch, StoreTransaction, "commit")
    begin = Refusing(monkeypatch, Store, "begin")
    world = World(tmp_path)
    ask_hot(world, 0)
    assert not world.checkpoint().error
    commit.error = StoreFullError("enospc: the disk is full")
    ask_hot(world, 1)
    world.until(lambda: commit.num_refused)
    opened: list[int] = []
    real = generations.Generations.reopen

    def reopen(self):
        begin.error = None
        opened.append(self.current.generation)
        return real(self)

    monkeypatch.setattr(generations.Generations, "reopen", reopen)
    begin.error = StorePanickedError("MDB_PANIC")
    commit.error = None
    world.until(lambda: world.storage.status()["blocks"] == 10 and not world.storage.status()["degraded"])
    assert opened == [1]
    assert not list((tmp_path / "kv").glob("*.aside"))
    world.stop()
    assert check_store(tmp_path)["ok"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EMFILE, errno.ENOSPC])
def test_a_start_that_can_not_open_the_store_for_writing_reads_it(tmp_path, monkeypatch, number):
    world = World(tmp_path)
    assert world.pin("system", prompt(9, 81)) == "recipe+bytes"
    ask_hot(world, 0)
    assert not world.checkpoint().error
    crash(world)
    blocked, real = {"yes": True}, store._allocate_lock_file

    def allocate(directory: Path) -> None:
        if blocked["yes"]:
            raise OSError(number, "refused")
        real(directory)

    monkeypatch.setattr(store, "_allocate_lock_file", allocate)
    world = World(tmp_path)
    assert world.report.num_blocks == 10
    status = world.storage.status()
    assert status["blocks"] == 10
    assert status["reason"].startswith(f"{errno.errorcode[number].lower()}: ")
    assert "degraded" in world.checkpoint().error
    ask_hot(world, 1)
    blocked["yes"] = False
    world.until(lambda: world.storage.status()["blocks"] == 15 and not world.storage.status()["degraded"])
    assert world.storage._running.recovered.generations.current.generation == 1
    assert events(world, "storage.degraded") == events(world, "storage.resumed") == 1
    world.stop()
    assert check_store(tmp_path)["ok"]


def test_a_disk_that_does_not_say_how_full_it_is_costs_no_generation(tmp_path, monkeypatch):
    room = Refusing(monkeypatch, Store, "disk_has_room")
    world = World(tmp_path)
    room.error = OSError(errno.EIO, "Input/output error")
    ask_hot(world, 0)
    assert not world.checkpoint().error
    assert room.num_refused
    ask_hot(world, 1)
    assert not world.checkpoint().error
    assert (world.storage.status()["blocks"], world.storage._running.recovered.generations.current.generation) == (10, 1)
    assert not events(world, "storage.degraded")
    world.stop()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
@pytest.mark.parametrize("where", ["open_regular", "Store.rows"])
def test_a_store_that_can_not_even_be_read_at_a_start_stays_and_is_read_once_it_can(tmp_path, monkeypatch, number, where):
    world = World(tmp_path, num_blocks=96)
    assert world.pin("system", prompt(9, 81)) == "recipe+bytes"
    ask_hot(world, 0)
    world.ask(prompt(2, 81))
    assert not world.checkpoint().error
    world.stop()
    blocked = {"yes": True, "tries": 0}
    owner, name = (Store, "rows") if where == "Store.rows" else (store, where)
    real = getattr(owner, name)

    def refuses(*arguments, **options):
        if blocked["yes"]:
            blocked["tries"] += 1
            raise StoreBlockedError(f"{errno.errorcode[number].lower()}: refused") if where == "Store.rows" else OSError(number, "refused")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, refuses)
    world = World(tmp_path, num_blocks=96)
    status = world.storage.status()
    assert (world.report.num_blocks, status["blocks"], status["damage"]) == (0, 0, [])
    assert errno.errorcode[number].lower() in status["reason"]
    ask_hot(world, 0, 1)
    assert "degraded" in world.checkpoint().error
    world.until(lambda: blocked["tries"] > 4)
    blocked["yes"] = False
    world.until(lambda: not world.storage.status()["degraded"] and world.storage.status()["blocks"] == 20)
    running = world.storage._running
    assert running.recovered.generations.current.generation == 1
    assert not list((tmp_path / "kv").glob("*.aside"))
    assert all(running.recovered.index.nodes[key].stored_bytes for key in chain_of(prompt(2, 81), world.namespace))
    world.storage.forget(b"forget", Selection("", b"", prompt(2, 81)[:64]), {})
    assert not world.wait_for(b"forget").error
    crash(world)
    assert check_store(tmp_path)["ok"]
    world = World(tmp_path, num_blocks=96)
    assert world.report.num_blocks == world.storage.status()["blocks"] == 15
    assert world.ask(prompt(2, 81)) == 0
    assert [world.ask(prompt(number, 81)) for number in (9, 0, 1)] == [80, 80, 80]
    world.stop()


def test_a_generation_that_can_not_be_moved_is_not_left_beside_the_next_one(tmp_path, monkeypatch):
    commit = Refusing(monkeypatch, StoreTransaction, "commit")
    aside = Refusing(monkeypatch, generations.Generations, "set_aside")
    world = World(tmp_path)
    ask_hot(world, 0)
    assert not world.checkpoint().error
    commit.error, aside.error = StoreDamagedError("eio: the disk fails"), OSError(errno.EIO, "Input/output error")
    ask_hot(world, 1)
    world.until(lambda: aside.num_refused >= 3)
    assert [path.name for path in (tmp_path / "kv").iterdir() if path.name.isdecimal()] == ["1"]
    commit.error = aside.error = None
    world.until(lambda: world.storage.status()["blocks"] == 10 and not world.storage.status()["degraded"])
    assert [path.name for path in (tmp_path / "kv").iterdir() if path.name.isdecimal()] == ["2"]
    world.stop()


def test_a_generation_that_can_not_be_named_leaves_the_one_before(tmp_path, monkeypatch):
    world = World(tmp_path)
    ask_hot(world, 0)
    assert not world.checkpoint().error
    world.stop()
    found = generations.Generations(tmp_path, map_bytes=1 << 24, max_aside_bytes=1 << 20)
    old = found.open(0)

    def refuses(*_, **__) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(generations, "replace_file", refuses)
        with pytest.raises(OSError, match="No space left"):
            found.rebuilt(old, lambda _: None, 0)
    assert found.current.generation == 1
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["1", "CURRENT"]
    assert len(list(old.block_keys())) == 5
    new = found.rebuilt(old, lambda _: None, 0)
    assert (found.current.generation, new.meta.generation) == (2, 2)
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["2", "CURRENT"]
    new.close()


def test_the_data_file_is_mapped_for_reading_alone(tmp_path):
    """A write through the map of a full disk would be SIGBUS, not an error."""
    world = World(tmp_path)
    ask_hot(world, 0)
    assert not world.checkpoint().error
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line and line.endswith("data.mdb")]
    assert maps
    assert all(re.match(r"\S+ r--s ", line) for line in maps)
    assert (tmp_path / "kv" / "1" / "lock.mdb").stat().st_blocks * 512 >= 8192
    world.stop()


def test_lmdb_says_which_errno_it_met(tmp_path):
    """The classification of its errors goes by the system's texts."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(lmdb.Error, match="Not a directory"):
        lmdb.open(str(tmp_path / "file" / "below"), create=False)


class BrokenTransaction:
    """Stands for lmdb's: its commit fails as that of a short write does."""

    def commit(self) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    def abort(self) -> None:
        pass


def test_the_short_write_of_a_full_disk_has_one_diagnosis(tmp_path, monkeypatch):
    World(tmp_path).stop()
    store = Store(tmp_path / "kv" / "1", 1 << 24)
    monkeypatch.setattr(Store, "disk_has_room", lambda *_: False)
    txn = store.begin()
    real, txn._txn = txn._txn, BrokenTransaction()
    with pytest.raises(StoreFullError) as refused:
        txn.commit()
    assert str(refused.value) == "enospc: the disk is full (mdb_txn_commit: Input/output error)"
    real.abort()
    store.close()


def test_an_episode_is_reported_once_for_each_cause():
    lines: list[tuple] = []

    class Log:
        def error(self, event, **fields):
            lines.append((event, fields["reason"], fields["generation_lost"]))

        def info(self, event, **_):
            lines.append((event,))

        warning = debug = error

    episode = FaultEpisode(Log())
    assert episode.refused("enospc: full", generation_lost=False)
    assert not episode.refused("enospc: full again", generation_lost=False)
    assert not episode.refused("eio: fails", generation_lost=True)
    assert not episode.refused("eio: fails", generation_lost=False)
    episode.over()
    episode.over()
    assert episode.refused("eio: fails", generation_lost=False)
    assert lines == [
        ("storage.degraded", "enospc: full", False),
        ("storage.degraded", "eio: fails", True),
        ("storage.resumed",),
        ("storage.degraded", "eio: fails", False),
    ]


def test_map_full_is_a_full_store():
    assert issubclass(StoreMapFullError, StoreFullError)


def test_while_a_thread_hangs_on_its_disk_the_state_directory_stays_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(persistence, "_STOP_S", 0.2)
    disk, real = threading.Event(), StoreTransaction.commit

    def commit(self) -> None:
        assert disk.wait(60)
        real(self)

    world = World(tmp_path, checkpoint_interval_s=1000.0)
    monkeypatch.setattr(StoreTransaction, "commit", commit)
    store = world.storage._running.store
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: store._txn is not None)
    world.executor.close(10)
    world.storage.close(clean=False)
    with pytest.raises(StateLockedError):
        StateLock(tmp_path)
    disk.set()
    assert store.stop(60)
    world.storage._lock.release()


def test_changes_that_were_sent_before_the_store_was_known_to_begin_anew_do_not_count(tmp_path, monkeypatch):
    """They say nothing of what the store has lost, and an LSN up to which the log would not be replayed."""
    world = World(tmp_path, checkpoint_interval_s=1000.0)
    ask_hot(world, 0)
    assert not world.checkpoint().error
    running = world.storage._running
    planner, store, generations_ = running.planner, running.store, running.recovered.generations
    entered, gate = threading.Event(), threading.Event()

    class Stall:
        pass

    planner.handle(Stall, lambda _: entered.set() or gate.wait(30))
    planner.post(Stall())
    assert entered.wait(30)
    with monkeypatch.context() as patched:
        patched.setattr(generations_, "rewritten", lambda *_: None)  # no room for a copy
        assert store.rewrite() == ""
    planner._handover.send(commit=True)
    assert store.rewrite() == "", "whatever came before has been taken"
    assert store._store.meta.applied_lsn == 0
    gate.set()
    assert not world.checkpoint().error
    assert store._store.meta.applied_lsn == running.wal.last_lsn
    assert store._store.num_rows(b"nodes") == len(running.recovered.index.nodes)
    world.stop()
