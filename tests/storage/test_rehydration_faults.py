"""An I/O error in the middle of rehydration: no block stays half loaded, and what was not loaded is computed."""

from __future__ import annotations

import threading
import time

import pytest
from storage_harness import ROW_BYTES, World, prompt

from kvd.observe import failpoints
from kvd.storage import rehydrate
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
