"""The table of docs/durability.md, cell by cell: at every promise of a life the worst that SIGKILL or a power cut can leave is started from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from check_states import Promises, check, is_ignored
from power_harness import HERE, record_life, scratch
from replay import Disk, Op, materialise, read_log

pytestmark = pytest.mark.store

DOCUMENT = Path(__file__).parents[2] / "docs" / "durability.md"
ROWS = {
    "Acknowledged pins and unpins": "pin",
    "Prefixes that the log has taken": "log",
    "Bytes of blocks that a checkpoint has written": "bytes",
}
MODES = ("fsync", "interval")
EVENTS = ("SIGKILL", "power cut")
LAST_INTERVAL = "the last `durability_interval_s`"


def documented() -> dict[tuple[str, str, str], str]:
    """The cells: (mode, event, row) → what may be lost."""
    lines = [
        [cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in DOCUMENT.read_text().splitlines() if line.startswith("|")
    ]
    (head,) = [line for line in lines if "`fsync`, SIGKILL" in line]
    columns = [tuple(cell.replace("`", "").split(", ")) for cell in head if cell != "|" and "," in cell]
    return {
        (mode, event, line[0]): cell for line in lines if line[0] in ROWS for (mode, event), cell in zip(columns, line[1:], strict=True)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = scratch(tmp_path)
    yield place
    shutil.rmtree(place)


def kinds(wrong: list[str]) -> set[str]:
    return {entry.split(":")[0] for entry in wrong}


def lost(log: Path, folder: Path, event: str) -> tuple[set[str], set[str]]:
    """What kinds of promises the event breaks right after one of them was made: of all, and of those that the mode holds by then."""
    disk, marks = Disk(is_ignored=is_ignored), []
    of_all, of_held = set(), set()
    for record in read_log(log):
        if record.op is not Op.MARK:
            disk.play(record)
            continue
        marks.append(json.loads(record.data))
        pending = tuple(disk.pending)
        tree = disk.tree(pending, (event == "SIGKILL",) * len(pending))
        for keeps_unsynced, broken in ((True, of_all), (event == "SIGKILL", of_held)):
            shutil.rmtree(folder / "disk", ignore_errors=True)
            (folder / "disk").mkdir()
            materialise(tree, folder / "disk")
            broken.update(kinds(check(folder / "disk" / "state", Promises(marks, keeps_unsynced=keeps_unsynced))))
    assert marks
    return of_all, of_held


@pytest.mark.parametrize("mode", MODES)
def test_the_table_says_what_is_lost(folder, mode):
    table = documented()
    assert len(table) == len(ROWS) * len(MODES) * len(EVENTS)
    log = record_life(folder, mode)
    for event in EVENTS:
        of_all, of_held = lost(log, folder, event)
        assert of_held == set(), f"{mode}, {event}"
        for row, kind in ROWS.items():
            assert table[mode, event, row] == (LAST_INTERVAL if kind in of_all else "nothing"), (mode, event, row)
        assert of_all <= set(ROWS.values()), f"{mode}, {event}: more than promises is lost"


@pytest.mark.parametrize("mode", MODES)
def test_a_real_kill_at_a_promise_loses_nothing(tmp_path, mode):
    """SIGKILL as soon as the promise is read, of a process that goes on working."""
    for num_marks in (3, 12, 25, 31):
        root = tmp_path / f"{num_marks}"
        root.mkdir()
        log = root / "marks"
        log.touch()
        with subprocess.Popen([sys.executable, str(HERE / "recorded_life.py"), mode, str(root / "state"), str(log)]) as process:
            end = time.monotonic() + 60
            while len(marks := [json.loads(record.data) for record in read_log(log)]) < num_marks:
                assert time.monotonic() < end
                assert process.poll() is None
            os.kill(process.pid, signal.SIGKILL)
        marks = [json.loads(record.data) for record in read_log(log)]
        assert check(root / "state", Promises(marks, keeps_unsynced=True)) == []
