"""A wall clock that is wrong, even before 1970 (a machine without a battery): everything is persisted and comes back, and no time is negative."""

from __future__ import annotations

import time

import pytest
from storage_harness import World, crash, prompt

from kvd.storage import schema
from kvd.storage.codec import PLAIN
from kvd.storage.pin_export import export_pins, opened_store
from kvd.storage.pin_set_checks import entry_refusal
from kvd.storage.pin_sets import read_pin_set

pytestmark = pytest.mark.store

BEFORE_TIME_S = -86400.0


class WrongClock:
    def __init__(self, unix_s: float) -> None:
        self.unix_s = unix_s

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return self.unix_s


def test_a_life_before_1970_persists_and_comes_back(tmp_path):
    for number in range(2):  # the second finds what the first wrote
        world = World(tmp_path / "state", clock=WrongClock(BEFORE_TIME_S))
        assert world.pin(f"pin-{number}", prompt(number, 64)) == "recipe+bytes"
        for each in range(number + 1):
            assert world.ask(prompt(each, 65)) == 64
        assert not world.checkpoint().error
        assert not world.storage.status()["degraded"]
        crash(world)
    with opened_store(tmp_path / "state", PLAIN) as store:
        assert store.meta.written_unix_s == 0
        rows = [PLAIN.unpack_node(key, value) for key, value in store.rows(schema.DB_NODES)]
    assert len(rows) >= 8
    assert {row.last_use_unix_s for row in rows} == {0}
    export_pins(tmp_path / "state", tmp_path / "pins")
    assert [problem for entry in read_pin_set(tmp_path / "pins") if (problem := entry_refusal(entry))] == []


def test_a_clock_that_falls_back_before_1970_costs_nothing(tmp_path):
    clock = WrongClock(1.7e9)
    world = World(tmp_path, clock=clock)
    assert world.pin("before", prompt(0, 64)) == "recipe+bytes"
    for unix_s in (BEFORE_TIME_S, 6.8e10, -6e8, 1.7e9):
        clock.unix_s = unix_s
        assert world.ask(prompt(0, 65)) == 64
        assert world.pin(f"at{unix_s:+.0f}", prompt(int(abs(unix_s)) % 97 + 1, 48)) == "recipe+bytes"
        assert not world.storage.status()["degraded"]
    world.stop()
    world = World(tmp_path, clock=clock)
    assert world.report.pins_pending == ()
    assert world.storage.status()["damage"] == []
    world.stop()
