"""Starts over a state directory: one daemon at a time, and starts that died are counted until one is good."""

from __future__ import annotations

import time

import pytest
from storage_harness import World, crash, prompt

from kvd.storage import persistence
from kvd.storage.errors import StateLockedError

pytestmark = pytest.mark.store


def test_two_daemons_on_one_state_are_refused_by_name(tmp_path):
    import os

    world = World(tmp_path)
    with pytest.raises(StateLockedError, match=str(os.getpid())):
        World(tmp_path)
    world.stop()
    World(tmp_path).stop()


def test_two_starts_that_died_set_the_store_aside_and_three_leave_the_pins_too(tmp_path):
    world = World(tmp_path)
    world.pin("system", prompt(9, 64))
    world.stop()
    reports = []
    for _ in range(4):
        world = World(tmp_path)
        reports.append(world.report)
        crash(world)
    assert [report.failed_starts for report in reports] == [0, 1, 2, 3]
    assert [report.num_blocks for report in reports] == [4, 4, 0, 0]
    assert [report.recompute_pins for report in reports] == [True, True, True, False]
    world = World(tmp_path)
    assert "system" in world.storage.recipe_book.recipes()
    world.stop()
    world = World(tmp_path)
    assert world.report.failed_starts == 0
    world.stop()


@pytest.mark.parametrize("served", [False, True])
def test_a_start_counts_as_good_ten_seconds_after_ready_or_when_it_has_served(tmp_path, monkeypatch, served):
    assert persistence.STABLE_AFTER_S == 10.0
    monkeypatch.setattr(persistence, "STABLE_AFTER_S", 1000.0 if served else 0.0)
    world = World(tmp_path)
    world.storage.mark_ready()
    if served:
        assert (tmp_path / "starting").exists()
        world.storage.mark_served()
    end = time.monotonic() + 60
    while (tmp_path / "starting").exists():
        assert time.monotonic() < end
        time.sleep(0.001)
    crash(world)
    world = World(tmp_path)
    assert world.report.failed_starts == 0
    world.stop()


def test_a_start_that_ends_in_order_but_not_well_leaves_the_count_as_it_found_it(tmp_path):
    world = World(tmp_path)
    world.stop(clean=False)
    assert not (tmp_path / "starting").exists()
    for _ in range(2):
        crash(World(tmp_path))
    for _ in range(3):
        world = World(tmp_path)
        assert world.report.failed_starts == 2
        world.stop(clean=False)
    world = World(tmp_path)
    world.storage.mark_served()
    end = time.monotonic() + 60
    while (tmp_path / "starting").exists():
        assert time.monotonic() < end
        time.sleep(0.001)
    world.stop(clean=False)
    assert not (tmp_path / "starting").exists(), "a good start stays good, whatever its end"
