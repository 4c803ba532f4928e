"""An I/O error in the middle of rehydration: no block stays half loaded, and what was not loaded is computed."""

from __future__ import annotations

import threading
import time

import pytest
from storage_harness import ROW_BYTES, World, prompt

from kvd.observe import failpoints
from kvd.storage import rehydrate, store
from kvd.storage.cold_tier import ColdTier
from kvd.storage.errors import StoreBlockedError
from kvd.storage.planner import Planner
from kvd.storage.store import Store
from kvd.storage.store_thread import StoreThread
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("point", ["rehydrate.before_read", "rehydrate.before_copy_in", "rehydrate.before_complete"])
def test_an_io_error_while_rehydrating_leaves_no_block_half_loaded(tmp_path, monkeypatch, point, at):
    world = World(tmp_path)
    assert world.pin("system", prompt(9, 16 * 12)) == "recipe+bytes"
    for _ in range(2):
        world.ask(prompt(0, 16 * 12 + 1))
    assert world.stop()
    monkeypatch.setattr(failpoints, "_armed", failpoints._parse(f"{point}=raise@{at}"))
    world = World(tmp_path, checkpoint_bytes_per_step=2 * ROW_BYTES)  # two blocks a batch
    assert f"failpoint {point}" in str(world.log.named("rehydrate.store_failed"))
    assert world.cache.num_transient == 0
    assert world.report.num_blocks == world.cache.num_cached < 24
    assert world.report.pins_pending == ("system",) or world.report.num_blocks >= 12
    for number in (9, 0):
        world.ask(prompt(number, 16 * 12 + 1))
        assert world.ask(prompt(number, 16 * 12 + 1)) == 16 * 12
    assert world.stop()
    assert check_store(tmp_path)["ok"]


class Stop(BaseException):
    """What a signal handler raises."""


def test_a_signal_within_a_read_leaves_no_reader_behind(tmp_path, monkeypatch):
    """After it the store is closed: whoever still read its map would be killed by it."""
    world = World(tmp_path)
    assert world.pin("system", prompt(9, 16 * 12)) == "recipe+bytes"
    assert world.stop()
    reading = []

    def slow(*arguments):
        if threading.current_thread() is not threading.main_thread():
            reading.append(True)
            time.sleep(0.3)
            reading.pop()

    def interrupted(_futures):
        while not reading:
            time.sleep(0.001)
        raise Stop

    monkeypatch.setattr(rehydrate, "read_checked", slow)
    monkeypatch.setattr(rehydrate, "wait", interrupted)
    with pytest.raises(Stop):
        World(tmp_path)
    assert not reading
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvd-rehydrate")]


def state_with_a_pin(path):
    world = World(path)
    assert world.pin("system", prompt(9, 16 * 12)) == "recipe+bytes"
    assert world.stop()


def storage_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(("kvd-rehydrate", "kvd-store", "kvd-cold", "kvd-planner"))]


def is_second_reader():
    return threading.current_thread().name.startswith("kvd-rehydrate")


class Polls:
    """In the place of ``close``'s clock: it opens ``gate`` when ``close`` has found a reader and would wait."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, gate, events):
        self._gate, self._events = gate, events

    def sleep(self, seconds):
        if not self._gate.is_set():
            self._events.append("close waits")
            self._gate.set()
        time.sleep(seconds)


def test_the_store_is_closed_after_a_reader_that_nobody_waited_for(tmp_path, monkeypatch):
    """The edge's end and a signal right behind it: the second takes the start out of waiting for the reader, in the middle of its copy."""
    state_with_a_pin(tmp_path)
    events, inside, gate = [], threading.Event(), threading.Event()

    def held(*arguments):
        if is_second_reader() and not inside.is_set():
            inside.set()
            gate.wait(30)
            events.append("read")

    def interrupted(*_arguments, **_keywords):
        inside.wait(30)
        raise Stop

    def close(self, *arguments):
        is_closed = real_close(self, *arguments)
        events.append("closed")
        return is_closed

    real_close = Store.close
    monkeypatch.setattr(store, "time", Polls(gate, events))
    monkeypatch.setattr(rehydrate, "read_checked", held)
    monkeypatch.setattr(rehydrate, "wait", interrupted)
    monkeypatch.setattr(rehydrate.ThreadPoolExecutor, "shutdown", interrupted)
    monkeypatch.setattr(Store, "close", close)
    try:
        with pytest.raises(Stop):
            World(tmp_path)
    finally:
        gate.set()
    assert events == ["close waits", "read", "closed"]


def test_a_signal_within_the_start_of_the_second_reader_leaves_it_nothing_to_read(tmp_path, monkeypatch):
    state_with_a_pin(tmp_path)
    real_start = threading.Thread.start
    reads, readers = [], []

    def interrupted(thread):
        real_start(thread)
        if thread.name.startswith("kvd-rehydrate"):
            readers.append(thread)
            raise Stop

    monkeypatch.setattr(rehydrate, "read_checked", lambda *_arguments: reads.append(threading.current_thread().name))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(Stop):
        World(tmp_path)
    (reader,) = readers
    reader.join(30)
    assert not reader.is_alive()
    assert not reads


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("part", [StoreThread, Planner, ColdTier])
def test_a_signal_between_the_starts_of_the_threads_leaves_none_with_a_closed_store(tmp_path, monkeypatch, part, place):
    state_with_a_pin(tmp_path)
    events = []
    real_start, real_close = part.start, Store.close

    def interrupted(self, *arguments, **keywords):
        if place == "after":
            real_start(self, *arguments, **keywords)
        raise Stop

    def close(self, *arguments):
        is_alive = any(thread.name == "kvd-store" for thread in threading.enumerate())
        events.append(threading.current_thread().name if is_alive else "nobody's")
        return real_close(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(part, "start", interrupted)
        patch.setattr(Store, "close", close)
        with pytest.raises(Stop):
            World(tmp_path, cold_tier="always")
    assert events == ["nobody's" if (part, place) == (StoreThread, "before") else "kvd-store"]
    assert not storage_threads()
    world = World(tmp_path)
    assert world.report.num_blocks == 12
    assert world.stop()


def test_a_closed_store_gives_no_reader_a_view(tmp_path):
    state_with_a_pin(tmp_path)
    world = World(tmp_path)
    opened = world.storage._running.recovered.store
    inside, gate = threading.Event(), threading.Event()

    def read():
        with opened.reading_blocks():
            inside.set()
            gate.wait(30)

    reader = threading.Thread(target=read)
    reader.start()
    assert inside.wait(30)
    assert not opened.close(0.0), "the map stays while it is read"
    with pytest.raises(StoreBlockedError, match="closed"), opened.reading_blocks():
        pass
    gate.set()
    reader.join(30)
    assert opened.close(0.0)
    world.stop()
