"""SIGKILL between any two writes: the next start finds a working state, keeps every promise that was printed, and serves only right bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from storage_harness import World, prompt

from kvd.observe import failpoints
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store

HARNESS = Path(__file__).with_name("storage_harness.py")
ROOMS = ("wal.", "recipes.", "store.", "checkpoint.", "rehydrate.")
NOT_REACHED = {
    "wal.repair.before_quarantine",
    "wal.repair.before_cut",
    "wal.repair.after_cut",
    "store.aside.before_rename",
    "store.aside.after_rename",
    "recipes.restore.before_quarantine",
}
"""Only on damaged or set-aside state; killed there by a test of their own."""


def points() -> list[str]:
    return sorted(name for name in failpoints.NAMES if name.startswith(ROOMS))


def live(state_dir: Path, spec: str) -> tuple[int, list[str]]:
    """One life of the victim: its exit status (-9 when killed) and the promises that it printed."""
    environment = {**os.environ, "KVD_FAILPOINTS": spec}
    done = subprocess.run(
        [sys.executable, str(HARNESS), "victim", str(state_dir)], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode in {0, -9}, done.stderr
    return done.returncode, done.stdout.splitlines()


def expected_pins(promises: list[str]) -> tuple[set[str], set[str]]:
    """(pins that must be there, pins that may be there besides)."""
    pins = {line.split()[1] for line in promises if line.startswith("recipe")}
    if "unpinned pin-0" in promises:
        return pins - {"pin-0"}, set()
    return pins - ({"pin-0"} if "pin-1" in str(promises) else set()), {"pin-0"}


def check_after(state_dir: Path, promises: list[str]) -> None:
    world = World(state_dir)
    pins = set(world.storage.recipe_book.recipes())
    must, _may = expected_pins(promises)
    assert must <= pins, (must, pins)
    assert world.report.dropped == {}
    for number in range(3):
        world.ask(prompt(number, 80, shared=48))  # asserts the bytes of every block that it hits
        cached = world.ask(prompt(10 + number, 65, shared=16))
        if f"recipe+bytes pin-{number}" in promises and not (number == 0 and "unpinned pin-0" in promises):
            assert cached == 64
            assert number == 0 or world.num_restored >= 48
    assert not world.checkpoint().error
    world.stop()
    report = check_store(state_dir)
    assert report["ok"], report
    assert report["orphan_nodes"] == 0


def test_every_failpoint_of_these_rooms_is_known():
    assert len(points()) >= 25
    assert set(points()) >= NOT_REACHED


@pytest.mark.parametrize("point", [name for name in points() if name not in NOT_REACHED])
def test_killed_at_a_failpoint_every_promise_holds(tmp_path, point):
    if point.startswith("rehydrate."):
        status, promises = live(tmp_path, "")
        assert status == 0
        status, _ = live(tmp_path, f"{point}=kill")
    else:
        status, promises = live(
            tmp_path, f"{point}=kill@{2 if point.startswith(('wal.before_s', 'wal.before_w', 'wal.after', 'recipes')) else 1}"
        )
    assert status == -9, f"{point} was not reached"
    check_after(tmp_path, promises)


@pytest.mark.parametrize("point", ["checkpoint.between_blocks", "recipes.after_rename", "wal.before_sync", "store.before_commit"])
def test_killed_twice_in_a_row(tmp_path, point):
    status, first = live(tmp_path, f"{point}=kill@3")
    assert status == -9
    status, second = live(tmp_path, f"{point}=kill@2")
    assert status == -9
    world = World(tmp_path)
    kept = set(world.storage.recipe_book.recipes())
    assert {line.split()[1] for line in second if line.startswith("recipe")} - {"pin-0"} <= kept
    if "unpinned pin-0" not in first + second:
        assert {line.split()[1] for line in first if line.startswith("recipe")} - {"pin-0"} <= kept
    assert world.report.failed_starts == 2
    for number in range(3):
        world.ask(prompt(number, 80, shared=48))
    world.stop()
    assert check_store(tmp_path)["ok"]


@pytest.mark.parametrize("point", [name for name in points() if name.startswith("recipes.")])
def test_killed_while_a_damaged_file_of_the_recipes_is_restored(tmp_path, point):
    status, promises = live(tmp_path, "")
    assert status == 0
    newest = max((tmp_path / "recipes").iterdir(), key=lambda path: int(path.suffix[1:]))
    newest.write_bytes(newest.read_bytes()[:-1])
    status, _ = live(tmp_path, f"{point}=kill")
    assert status == -9, f"{point} was not reached"
    check_after(tmp_path, promises)


@pytest.mark.parametrize("point", sorted(name for name in NOT_REACHED if not name.startswith("recipes.")))
def test_killed_while_damage_is_set_aside(tmp_path, point):
    if point.startswith("wal."):
        status, promises = live(tmp_path, "wal.after_sync=kill@3")
        assert status == -9
        newest = max((tmp_path / "wal").glob("*.wal"))
        data = newest.read_bytes().rstrip(b"\0")
        newest.write_bytes(data + b"\1\2\3\4\5")
        status, _ = live(tmp_path, f"{point}=kill")
    else:
        status, promises = live(tmp_path, "")
        data = tmp_path / "kv" / "1" / "data.mdb"
        data.write_bytes(data.read_bytes()[:-1])
        status, _ = live(tmp_path, f"{point}=kill")
    assert status == -9, f"{point} was not reached"
    world = World(tmp_path)
    must, _ = expected_pins(promises)
    assert must <= set(world.storage.recipe_book.recipes())
    for number in range(3):
        world.ask(prompt(number, 80, shared=48))
    world.stop()
    assert check_store(tmp_path)["ok"]
