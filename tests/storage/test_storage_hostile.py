"""Starts on disks that take nothing, over things that are no files, and threads that meet what nobody foresaw: serving goes on, and whoever waits is answered."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from storage_harness import World, crash, prompt

from kvd.storage import store_thread
from kvd.storage.errors import StateLockedError
from kvd.storage.lock import StateLock, is_locked
from kvd.storage.planner import Planner
from kvd.storage.store_thread import StoreThread
from kvd.storage.tools import check_store
from kvd.wal import writer

pytestmark = pytest.mark.store

HARNESS = Path(__file__).with_name("storage_harness.py")


def live(state_dir: Path) -> None:
    """A life with a pin, a hot prompt, and a log, which no checkpoint of its own may empty."""
    world = World(state_dir, checkpoint_interval_s=1000.0)
    assert world.pin("system", prompt(9, 64)) == "recipe+bytes"
    for _ in range(2):
        world.ask(prompt(0, 81))
    assert not world.checkpoint().error
    world.ask(prompt(1, 81))
    world.until_logged()
    crash(world)
    (state_dir / "starting").unlink()


def put(path: Path, kind: str) -> None:
    """Something that is no file in the place of ``path``."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        (path / "something").write_bytes(b"x")
    else:
        path.symlink_to("no-such-folder/file")


def newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.name)


PLACES = {
    "the newest recipes": lambda root: newest(root / "recipes"),
    "a further segment": lambda root: root / "wal" / "0000000000000009.wal",
    "the only segment": lambda root: newest(root / "wal"),
    "CURRENT": lambda root: root / "kv" / "CURRENT",
    "the data file": lambda root: root / "kv" / "1" / "data.mdb",
    "the generation": lambda root: root / "kv" / "1",
    "lmdb's lock file": lambda root: root / "kv" / "1" / "lock.mdb",
    "the marker": lambda root: root / "starting",
    "an unfinished file": lambda root: root / "kv" / ".CURRENT.tmp",
    "an unfinished segment": lambda root: root / "wal" / ".0000000000000009.wal.tmp",
}


@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_neither_holds_up_nor_ends_a_start(tmp_path, place, kind):
    live(tmp_path)
    put(PLACES[place](tmp_path), kind)
    check_store(tmp_path)
    world = World(tmp_path)
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    assert world.pin("more", prompt(5, 64)) == "recipe+bytes"
    assert not world.storage.status()["degraded"]
    assert world.stop()
    report = check_store(tmp_path)
    assert report["ok"], report["problems"]
    world = World(tmp_path)
    assert world.report.pins_pending == () or place in {"CURRENT", "the data file", "the generation", "lmdb's lock file"}
    assert world.storage.status()["damage"] == []
    world.stop()


@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling"])
@pytest.mark.parametrize("place", ["the newest recipes", "a further segment", "the only segment", "CURRENT", "the data file"])
def test_the_repair_sets_aside_what_is_no_file(tmp_path, place, kind):
    live(tmp_path)
    put(PLACES[place](tmp_path), kind)
    assert not check_store(tmp_path)["ok"]
    report = check_store(tmp_path, repair=True)
    assert report["ok"], report["problems"]
    assert report["repaired"]
    assert report["recipes"] == 1


@pytest.mark.parametrize("name", ["kv", "wal"])
@pytest.mark.parametrize("kind", ["fifo", "dangling"])
def test_what_is_no_folder_is_set_aside(tmp_path, name, kind):
    live(tmp_path)
    put(tmp_path / name, kind)
    world = World(tmp_path)
    assert name in str(world.storage.status()["damage"])
    assert world.pin("more", prompt(5, 64)) == "recipe+bytes"
    assert world.stop()
    assert check_store(tmp_path)["ok"]


# -------------------------------------------------------------------------------------------------- disks that take nothing


@pytest.mark.parametrize(
    "point", ["store.marker.before_sync", "store.create.before_rename", "store.current.before_rename", "wal.segment.before_sync"]
)
def test_a_first_start_that_can_not_write_goes_on_and_says_so(tmp_path, arm, monkeypatch, point):
    monkeypatch.setattr(store_thread, "_RETRY_MIN_S", 0.01)
    arm(f"{point}=raise")
    world = World(tmp_path)
    for _ in range(2):
        world.ask(prompt(0, 81))
    if point != "wal.segment.before_sync":  # the log tries again before anybody could look
        assert world.log.named("storage.not_writable" if "marker" in point else "storage.opened")
        assert point in str(world.log.entries)
    world.until(lambda: not (world.storage.mark_served() or world.storage.status()["degraded"]))
    assert world.pin("a", prompt(1, 64)) == "recipe+bytes"
    assert world.stop()
    assert check_store(tmp_path)["ok"]


@pytest.mark.parametrize("point", ["wal.repair.before_quarantine", "wal.repair.before_cut", "store.aside.before_rename"])
def test_a_start_that_can_not_set_aside_goes_on(tmp_path, arm, point):
    live(tmp_path)
    if point.startswith("wal."):
        segment = newest(tmp_path / "wal")
        segment.write_bytes(segment.read_bytes().rstrip(b"\0") + b"\1\2\3\4\5")
    else:
        (tmp_path / "starting").write_bytes(b"2 1\n")
    arm(f"{point}=raise")
    world = World(tmp_path)
    assert world.storage.status()["damage"]
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    for number in range(3):
        world.ask(prompt(number, 81))
    world.stop()
    world = World(tmp_path)
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    assert world.stop()
    assert check_store(tmp_path)["ok"]


def test_a_tool_that_looks_at_the_lock_keeps_no_daemon_from_starting(tmp_path):
    StateLock(tmp_path).release()
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as ``is_locked`` does, in the middle of it
    threading.Timer(0.05, os.close, [looking]).start()
    lock = StateLock(tmp_path)
    assert is_locked(tmp_path)
    lock.release()


def test_a_lock_is_taken_though_its_pid_can_not_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = StateLock(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(StateLockedError):
        StateLock(tmp_path)
    lock.release()
    assert not is_locked(tmp_path)


def test_a_directory_that_is_not_ours_to_write_is_refused(tmp_path, monkeypatch):
    from kvd.storage import start_guard

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(start_guard, "replace_file", denied)
    with pytest.raises(PermissionError):
        World(tmp_path)
    assert not is_locked(tmp_path)


def in_namespace(script: str) -> list[str] | None:
    """The command that runs ``script`` in a mount namespace of its own; None where that is not allowed."""
    for flags in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        command = ["unshare", *flags, "--propagation", "private", "sh", "-ec"]
        if (
            shutil.which("unshare")
            and not subprocess.run([*command, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode
        ):
            return [*command, script]
    return None


def run_on_small_disk(folder: Path, mode: str) -> str:
    command = in_namespace(f"mount -t tmpfs -o size=16m none {folder}; exec {sys.executable} {HARNESS} {mode} {folder}/state")
    assert command is not None
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


if in_namespace("true") is not None:  # without root and without user namespaces only the failpoints above say so

    def test_a_real_full_disk_at_a_start(tmp_path):
        assert run_on_small_disk(tmp_path, "full").splitlines() == ["a first start served", "served on a full disk", "healed"]

    def test_a_real_read_only_disk_at_a_start(tmp_path):
        assert run_on_small_disk(tmp_path, "readonly").splitlines() == ["served on a read-only disk", "healed"]


# -------------------------------------------------------------------------------------------------- what nobody foresaw


def test_an_unforeseen_error_of_the_store_thread_degrades_answers_and_heals(tmp_path, monkeypatch):
    monkeypatch.setattr(store_thread, "_RETRY_MIN_S", 0.01)
    real, probe, calls, may_heal = StoreThread._apply, StoreThread._probe, [], threading.Event()

    def fails_once(self, changes) -> None:
        calls.append(changes)
        if len(calls) == 1:
            raise RuntimeError("nobody foresaw this")
        real(self, changes)

    monkeypatch.setattr(StoreThread, "_apply", fails_once)
    monkeypatch.setattr(StoreThread, "_probe", lambda self: may_heal.wait(60) and probe(self))
    world = World(tmp_path)
    world.ask(prompt(0, 81))
    done = world.checkpoint()
    assert "nobody foresaw this" in done.error
    assert "nobody foresaw this" in world.storage.status()["reason"]
    may_heal.set()
    world.until(lambda: not world.storage.status()["degraded"])
    assert world.pin("a", prompt(1, 64)) == "recipe+bytes"
    assert world.stop()
    assert check_store(tmp_path)["ok"]


@pytest.mark.parametrize("method", ["_stored", "_begin_operation", "_advance", "_committed"])
def test_an_unforeseen_error_of_the_planner_degrades_and_answers_everybody(tmp_path, monkeypatch, method):
    def fails(self, *_):
        raise RuntimeError("nobody foresaw this")

    world = World(tmp_path)
    world.pin("before", prompt(9, 64))
    monkeypatch.setattr(Planner, method, fails)
    world.storage._running.planner._handle_own()  # the table of what takes which message was made before
    world.ask(prompt(0, 81))
    for _ in range(2):
        assert "nobody foresaw this" in world.checkpoint().error
    status = world.storage.status()
    assert status["degraded"]
    assert "nobody foresaw this" in status["reason"]
    assert world.ask(prompt(0, 81)) == 80
    assert world.pin("after", prompt(1, 64)) == "recipe"
    assert not world.stop()
    monkeypatch.undo()
    world = World(tmp_path)
    assert set(world.storage.recipe_book.recipes()) == {"before", "after"}
    world.stop()


def test_an_unforeseen_error_of_the_log_shows_and_heals(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_RETRY_MIN_S", 0.01)
    real, broken = writer.encode_record, [True]

    def encode(*record, **frame):
        if broken[0]:
            raise RuntimeError("nobody foresaw this")
        return real(*record, **frame)

    monkeypatch.setattr(writer, "encode_record", encode)
    world = World(tmp_path)
    world.ask(prompt(0, 81))
    world.until(lambda: "nobody foresaw this" in world.storage.status()["reason"])
    broken[0] = False
    end = time.monotonic() + 60
    while world.storage.status()["degraded"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert world.stop()
