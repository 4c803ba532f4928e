"""The write policies on a real store: what each puts on disk and when, and what the governor says meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from storage_harness import ROW_BYTES, World, crash, prompt

from kvd.storage import governor, store_thread

pytestmark = pytest.mark.store

BUSY_S = 0.3


def rest(world: World, condition, timeout_s: float = 60.0):
    """Go round as an engine does that has nothing to run, until ``condition`` holds."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain; {world.storage.status()} {world.storage.stats()}"
        world.storage.on_step(world.step, world.cache.take_events())
        time.sleep(0.002)
    return value


def rest_for(world: World, seconds: float) -> None:
    end = time.monotonic() + seconds
    rest(world, lambda: time.monotonic() >= end)


def blocks_on_disk(world: World) -> int:
    return world.storage.status()["blocks"]


def is_settled(world: World) -> bool:
    """Whether the planner has heard of everything, and nothing that it wants written is on its way."""
    return (
        not world.storage._running.planner._mail
        and world.storage.status()["waiting_blocks"] == world.storage.stats()["blocks_under_way"] == 0
    )


def governor_is(world: World, name: str) -> bool:
    return world.storage.status()["governor"] == name and world.storage.stats()["held_back"][name] > 0


@pytest.fixture
def soon_idle(monkeypatch):
    monkeypatch.setattr(governor, "IDLE_AFTER_S", 0.02)


def test_through_writes_every_computed_block_by_itself(tmp_path):
    world = World(tmp_path, write_policy="through")
    for number in range(4):
        world.ask(prompt(number, 81))
    world.until(lambda: blocks_on_disk(world) == world.storage.stats()["checkpoint_blocks"] == 20)
    assert world.storage.stats()["computed_blocks"] == 20
    crash(world)
    world = World(tmp_path, write_policy="through")
    assert world.report.num_blocks == 20
    assert world.storage.stats()["computed_blocks"] == 0
    world.stop()


def test_shutdown_writes_nothing_but_pins_until_the_clean_end(tmp_path):
    world = World(tmp_path, write_policy="shutdown")
    for _ in range(3):
        world.ask(prompt(0, 81))
    assert world.checkpoint().num_blocks == 0
    assert world.pin("system", prompt(1, 64)) == "recipe+bytes"
    assert world.checkpoint().num_blocks == 0
    assert blocks_on_disk(world) == 4
    assert world.stop()
    world = World(tmp_path, write_policy="shutdown")
    assert world.report.num_blocks == 9
    world.stop()


def test_shutdown_loses_what_was_not_pinned_to_a_crash(tmp_path):
    world = World(tmp_path, write_policy="shutdown")
    for _ in range(3):
        world.ask(prompt(0, 81))
    assert world.pin("system", prompt(1, 64)) == "recipe+bytes"
    crash(world)
    world = World(tmp_path, write_policy="shutdown")
    assert world.report.num_blocks == 4
    world.stop()


def test_selective_writes_a_block_used_once_after_its_dwell_time_when_nothing_runs(tmp_path, soon_idle):
    world = World(tmp_path, write_dwell_s=0.05)
    world.ask(prompt(0, 81))
    rest(world, lambda: blocks_on_disk(world) == 5)
    assert world.storage.stats()["dwelling_blocks"] == 0
    crash(world)
    world = World(tmp_path)
    assert world.report.num_blocks == 5
    world.stop()


def test_selective_waits_for_the_dwell_time(tmp_path, soon_idle):
    world = World(tmp_path, write_dwell_s=1000.0)
    world.ask(prompt(0, 81))
    rest(world, lambda: world.storage.stats()["dwelling_blocks"] == 5)
    rest_for(world, BUSY_S)
    assert blocks_on_disk(world) == 0
    assert world.storage.stats()["dwelling_blocks"] == 5
    world.stop()


def test_selective_writes_no_block_used_once_while_steps_run(tmp_path, soon_idle):
    world = World(tmp_path, write_dwell_s=0.01)
    world.ask(prompt(0, 81))
    end = time.monotonic() + BUSY_S
    while time.monotonic() < end:
        world.tick()
        time.sleep(0.002)
    assert world.storage.stats()["checkpoint_copied_bytes"] == 0
    rest(world, lambda: blocks_on_disk(world) == 5)
    world.stop()


def test_dwelling_blocks_fill_free_room_and_drive_nothing_out(tmp_path, soon_idle):
    config = {"store_max_bytes": 8 << 20, "num_blocks": 400, "row_bytes": 100_000}
    world = World(tmp_path, write_dwell_s=0.05, **config)
    for number in range(4):
        for _ in range(2):
            world.ask(prompt(number, 81))
    assert not world.checkpoint().error
    num_hot = blocks_on_disk(world)
    assert num_hot == 20
    for number in range(20, 36):
        world.ask(prompt(number, 81))
    room = world.storage._running.budget
    rest(world, lambda: blocks_on_disk(world) * room.block_bytes > room.max_block_bytes - room.block_bytes)
    rest_for(world, BUSY_S)
    stats = world.storage.stats()
    assert num_hot < blocks_on_disk(world)
    assert stats["dwelling_blocks"] > 0, "more than the room that there was"
    assert stats["expired_bytes"] == 0
    assert stats["checkpoint_refused_blocks"] == 0
    assert room.max_block_bytes - room.block_bytes < blocks_on_disk(world) * room.block_bytes <= room.max_block_bytes
    world.stop()


def test_a_daemon_that_rests_writes_nothing(tmp_path, soon_idle):
    world = World(tmp_path, write_dwell_s=0.05)
    for number in range(2):
        world.ask(prompt(0, 81))
        world.ask(prompt(1 + number, 81))
    rest(world, lambda: blocks_on_disk(world) == 15)
    end = time.monotonic() + 60
    before = (written(world), files(tmp_path))
    rest_for(world, 2 * BUSY_S)
    while (now := (written(world), files(tmp_path))) != before:  # the rows of the nodes follow with the next checkpoint
        assert time.monotonic() < end, (before, now)
        before = now
        rest_for(world, 2 * BUSY_S)
    assert world.storage.status()["governor"] == "none"
    world.stop()


def written(world: World) -> list[int]:
    stats = world.storage.stats()
    return [stats[name] for name in ("wal_records", "wal_written_bytes", "wal_syncs", "checkpoints", "checkpoint_bytes")]


def files(state_dir: Path) -> dict[str, tuple[int, int]]:
    found = ((path, path.stat()) for path in state_dir.rglob("*") if path.is_file())
    return {path.name: (stat.st_size, stat.st_mtime_ns) for path, stat in found}


# -------------------------------------------------------------------------------- the governor's names


def test_the_rate_names_itself(tmp_path):
    world = World(tmp_path, write_policy="through", checkpoint_bytes_per_step=ROW_BYTES, checkpoint_bytes_per_s=ROW_BYTES)
    world.ask(prompt(0, 81))
    world.until(lambda: governor_is(world, "rate"))
    status = world.storage.status()
    assert 0 < status["waiting_blocks"] < 5
    assert status["waiting_bytes"] == status["waiting_blocks"] * world.storage._running.budget.block_bytes
    world.stop()


def test_copies_under_way_name_themselves(tmp_path):
    world = World(tmp_path, write_policy="through", checkpoint_bytes_per_step=ROW_BYTES)
    world.runner.gate.clear()
    world.ask(prompt(0, 81))
    world.until(lambda: governor_is(world, "in_flight") and world.storage.status()["waiting_blocks"] == 3)
    world.runner.gate.set()
    world.until(lambda: blocks_on_disk(world) == 5)
    world.until(lambda: world.storage.status()["governor"] == "none")
    world.stop()


def test_a_disk_slower_than_the_copies_names_itself(tmp_path, monkeypatch):
    gate = threading.Event()
    real = store_thread.StoreThread._write

    def write(self, batch) -> None:
        assert gate.wait(30)
        real(self, batch)

    monkeypatch.setattr(store_thread.StoreThread, "_write", write)
    world = World(tmp_path, write_policy="through", checkpoint_bytes_per_step=ROW_BYTES)
    world.ask(prompt(0, 113))
    world.until(lambda: governor_is(world, "staging"))
    gate.set()
    world.until(lambda: blocks_on_disk(world) == 7)
    world.stop()


def test_a_full_budget_names_itself(tmp_path):
    world = World(tmp_path, write_policy="through", store_max_bytes=8 << 20, num_blocks=400, row_bytes=100_000, checkpoint_interval_s=1.0)
    favourites = [prompt(number, 161) for number in range(6)]
    for favourite in favourites * 4:
        world.ask(favourite)
    world.until(lambda: is_settled(world))
    for number in range(20, 24):  # worth less than any that is there
        world.ask(prompt(number, 161))
    world.until(lambda: governor_is(world, "disk") and is_settled(world))
    world.until(lambda: (stats := world.storage.stats())["held_back"]["disk"] == stats["checkpoint_refused_blocks"] > 0)
    world.stop()


def test_hot_blocks_that_found_no_room_are_told_for_as_long_as_they_are_in_memory(tmp_path):
    world = World(tmp_path, write_policy="through", store_max_bytes=8 << 20, num_blocks=100, row_bytes=100_000, checkpoint_interval_s=0.05)
    favourites = [prompt(number, 161) for number in range(6)]
    for favourite in favourites * 4:
        world.ask(favourite)
    world.until(lambda: is_settled(world))
    for number in range(20, 23):  # worth less than any that is there
        world.ask(prompt(number, 161))
    world.until(lambda: world.storage.status()["refused_blocks"] > 0)
    end = time.monotonic() + 0.5  # long after the moment of the refusal
    world.until(lambda: time.monotonic() > end)
    world.until(lambda: is_settled(world) and world.storage.status()["governor"] == "disk")
    status = world.storage.status()
    assert status["refused_blocks"] <= status["unwritten_blocks"] == len(resident_unwritten(world)) > 0
    assert status["bytes"] <= status["max_block_bytes"] < status["max_bytes"] == 8 << 20
    for number in range(30, 50):  # everything of before leaves memory
        world.ask(prompt(number, 161))
    world.until(lambda: is_settled(world))
    status = world.storage.status()
    assert status["unwritten_blocks"] == len(resident_unwritten(world))
    refused = world.storage._running.planner._hot._refused
    assert refused <= {node.block_hash for node in resident_unwritten(world)}, "what is not in memory any more is not counted"
    world.stop()


def resident_unwritten(world: World) -> list:
    return [node for node in world.storage._running.recovered.index.nodes.values() if node.is_unwritten]


def test_a_block_that_left_memory_before_its_turn_is_counted(tmp_path):
    world = World(tmp_path, num_blocks=16, write_policy="through", checkpoint_pause_queue_depth=1, checkpoint_bytes_per_step=ROW_BYTES)
    world.storage.set_queue_depth(2)
    for number in range(6):
        world.ask(prompt(number, 113))
        world.until(lambda: not world.storage._running.planner._mail)
    world.until(lambda: governor_is(world, "queue"))
    assert world.storage.stats()["checkpoint_evicted_blocks"] > 0
    world.stop()
