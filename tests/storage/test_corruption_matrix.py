"""The table "Damage" of docs/storage-format.md, row by row: each damage is done to a small state directory, and what comes of it is what the row says.

And exhaustively, on the files' readers: the log, the recipes, CURRENT and the marker cut at every byte and flipped at every bit. Whatever loads equals what was stored.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import corruption
import pytest
from corruption import Damage, damages, documented_rows

from kvd.observe import failpoints
from kvd.storage.errors import StoreDamagedError
from kvd.storage.generations import read_current
from kvd.storage.recipes import read_recipes
from kvd.storage.start_guard import read_failed_starts
from kvd.wal.reader import SegmentEnd, read_segments
from kvd.wal.record import SEGMENT_HEADER_BYTES, Record
from kvd.wal.repair import repair_log

pytestmark = pytest.mark.store

TESTS = Path(__file__).parents[1]
ELSEWHERE = {
    "recipes-unsynced": "storage/test_storage_recipes_interval.py::test_what_a_power_cut_left_of_the_unsynced_file_is_no_damage",
    "forgetting-bad": "storage/test_storage_forget_intent.py::test_an_intent_that_can_not_be_read_is_reported_and_not_completed",
    "forgetting-format": "storage/test_storage_forget_intent.py::test_an_intent_of_another_format_is_refused",
    "state-unwritable": "storage/test_storage_hostile.py::test_a_directory_that_is_not_ours_to_write_is_refused",
    "state-not-yet": "storage/test_first_starts.py::test_pins_in_clear_are_not_served_beside_keys_that_can_not_be_written",
    "state-full": "storage/test_storage_hostile.py::test_a_real_full_disk_at_a_start",
    "lock-held": "storage/test_storage_starts.py::test_two_daemons_on_one_state_are_refused_by_name",
    "data-short": "storage/test_storage_short_file.py::test_a_last_page_that_was_counted_and_never_written_is_no_damage",
    "data-sector": "crash/test_crash_loop.py::test_a_sector_that_can_not_be_read_kills_two_starts_and_no_third",
    "data-full": "storage/test_lost_generations.py::test_a_full_disk_keeps_the_generation_and_heals",
    "data-unwritable": "storage/test_storage_faults.py::test_a_start_that_can_not_open_the_store_for_writing_reads_it",
    "data-unread": "storage/test_storage_faults.py::test_a_store_that_can_not_even_be_read_at_a_start_stays_and_is_read_once_it_can",
    "data-large": "storage/test_storage_budget.py::test_a_lowered_budget_is_kept_before_anything_is_served",
    "recipes-full": "storage/test_storage_recipes.py::test_a_disk_that_takes_no_recipes_is_reported_once_and_once_when_it_does_again",
    "wal-full": "wal/test_wal_log.py::test_tries_that_fail_leave_no_segments_behind",
    "data-eio": "storage/test_lost_generations.py::test_an_io_error_sets_the_generation_aside_and_persistence_heals",
    "fingerprints": "models/test_fingerprint.py::test_no_flipped_bit_and_no_cut_of_the_cache_makes_another_fingerprint",
    "pin-set": "storage/test_pin_transfer.py::test_every_cut_and_every_flipped_byte_is_found_before_anything_is_changed",
    "keys-one-bad": "storage/test_storage_keys.py::test_one_damaged_file_costs_no_key_and_is_not_kept",
    "keys-all-bad": "storage/test_storage_keys.py::test_no_readable_file_is_refused",
    "keys-missing": "storage/test_encrypted_lives.py::test_without_the_keys_folder_encrypted_pins_are_not_overwritten",
    "keys-older": "storage/test_encrypted_lives.py::test_keys_older_than_the_recipes_are_not_taken_for_a_forgotten_tenant",
    "keys-wrong": "storage/test_encrypted_lives.py::test_without_the_key_or_with_another_the_start_is_refused_and_nothing_touched",
    "keys-full": "storage/test_encrypted_lives.py::test_a_disk_that_takes_no_keys_costs_no_answer_and_heals",
    "keys-taken": "storage/test_storage_keys.py::test_pins_acknowledged_after_the_keys_were_taken_away_come_back",
    "keys-gone": "storage/test_encrypted_lives.py::test_what_a_destroyed_key_had_sealed_is_a_miss_and_no_damage",
    "model": "storage/test_storage_persistence.py::test_bytes_of_another_model_are_never_used_and_are_collected",
}
"""Rows that tests of their own hold to the document."""
ROWS = documented_rows()


@dataclass(frozen=True, slots=True)
class Outcome:
    damage: Damage
    word: str
    why: str


def _watch(base: Path, every: list[Damage], first: int, step: int) -> Iterator[Outcome]:
    """Have a child do every ``step``-th damage; one that dies of it is followed by another."""
    command = [sys.executable, corruption.__file__, str(base)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    while first < len(every):
        child = subprocess.run([*command, str(first), str(step)], capture_output=True, text=True, env=environment, timeout=250, check=False)
        under_way = -1
        for line in child.stdout.splitlines():
            index, word, why = json.loads(line)
            if word == "begun":
                under_way = index
            else:
                yield Outcome(every[index], word, why)
                under_way, first = -1, index + step
        if child.returncode == 0:
            return
        assert under_way >= 0, child.stderr
        yield Outcome(every[under_way], "dies", f"exit status {child.returncode}: {child.stderr[-2000:]}")
        first = under_way + step


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corruption") / "base"
    corruption.build(path)
    return path


@pytest.fixture(scope="module")
def outcomes(base: Path) -> dict[str, list[Outcome]]:
    every = damages(base)
    with ThreadPoolExecutor(2) as pool:
        results = [outcome for part in pool.map(lambda first: list(_watch(base, every, first, 2)), (0, 1)) for outcome in part]
    assert len(results) == len(every)
    by_row: dict[str, list[Outcome]] = {}
    for outcome in results:
        by_row.setdefault(outcome.damage.row, []).append(outcome)
    return by_row


def test_each_row_of_the_document_is_held_to_by_some_test(base: Path) -> None:
    done = {damage.row for damage in damages(base)} - {"none"}
    assert done | set(ELSEWHERE) == set(ROWS)
    assert not done & set(ELSEWHERE)
    for place in ELSEWHERE.values():
        file, name = place.split("::")
        assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), place


def test_without_damage_everything_is_taken(outcomes: dict[str, list[Outcome]]) -> None:
    assert [outcome.word for outcome in outcomes["none"]] == ["taken"]


@pytest.mark.parametrize("row", sorted(set(ROWS) - set(ELSEWHERE)))
def test_each_damage_has_the_outcome_that_the_document_gives_it(outcomes: dict[str, list[Outcome]], row: str) -> None:
    wrong = [f"{each.damage.name}: {each.word} ({each.why})" for each in outcomes[row] if each.word not in ROWS[row]]
    assert wrong == []
    print(row, len(outcomes[row]), Counter(each.word for each in outcomes[row]))


# -------------------------------------------------------------------------------------------------- every byte and every bit


@dataclass(frozen=True, slots=True)
class Placed:
    """A record and where it lies."""

    entry: tuple[int, Record]
    start: int
    end: int


def layout(directory: Path) -> list[tuple[Path, bytes, list[Placed]]]:
    """Each segment with its records' places, found by cutting: the reader is trusted only as far as an undamaged log goes."""
    found = []
    for segment, fault in read_segments(directory, None):
        assert not fault
        content, placed, start = segment.path.read_bytes(), [], SEGMENT_HEADER_BYTES
        for entry in segment.records:
            length = int.from_bytes(content[start + 4 : start + 8], "little")
            end = start + -(-(24 + length) // 8) * 8
            placed.append(Placed(entry, start, end))
            start = end
        assert start == segment.valid_bytes
        found.append((segment.path, content, placed))
    return found


@pytest.fixture
def log(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the base's log; nothing is synced, which is not what is tested here."""
    directory = tmp_path / "wal"
    directory.mkdir()
    for path in corruption.segments(base):
        (directory / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return directory


Records = list[tuple[int, Record]]


def repaired(directory: Path) -> tuple[Records, bool]:
    """The records that a start takes from the log, and whether it reports damage; the log is changed by it."""
    records: Records = []
    report = repair_log(
        directory,
        None,
        lambda lsn, record: records.append((lsn, record)),
        quarantine=directory.parent / "quarantine",
        quarantine_max_bytes=1 << 20,
    )
    return records, bool(report.damage)


def read(directory: Path) -> tuple[Records, bool]:
    """The same, for looking only."""
    records: Records = []
    for segment, fault in read_segments(directory, None):
        if fault:
            return records, True
        records += segment.records
        if segment.end is SegmentEnd.DAMAGED:
            return records, True
    return records, False


def check_log(log: list[tuple[Path, bytes, list[Placed]]], which: int, offset: int, damaged: bytes, *, is_cut: bool, repairs: bool) -> str:
    """Take up the log with segment ``which`` damaged from ``offset`` on; the row of the document that it was."""
    path, _, placed = log[which]
    path.write_bytes(damaged)
    records, is_reported = (repaired if repairs else read)(path.parent)
    before = [each.entry for _, _, earlier in log[:which] for each in earlier]
    kept = [each.entry for each in placed if each.end <= offset]
    later = [each.entry for _, _, after in log[which + 1 :] for each in after]
    num_lost = len(placed) - len(kept)
    if offset < SEGMENT_HEADER_BYTES:
        row, expected = "wal-header", before
    elif not num_lost:
        row, expected = "wal-torn", before + kept + later
    elif num_lost > 1 and not is_cut:
        row, expected = "wal-damaged", before + kept
    else:
        row, expected = "wal-header" if later else "wal-torn", before + kept  # the next segment's records do not follow
    assert records == expected
    assert is_reported == (row != "wal-torn")
    for other, content, _ in log if repairs else log[which : which + 1]:
        other.write_bytes(content)
    return row


def test_the_log_cut_at_every_byte(log: Path) -> None:
    segments = layout(log)
    assert len(segments) >= 3
    rows = Counter(
        check_log(segments, which, length, content[:length], is_cut=True, repairs=True)
        for which, (_, content, _) in enumerate(segments)
        for length in range(len(content))
    )
    print(sum(rows.values()), dict(rows))
    assert set(rows) == {"wal-torn", "wal-header"} <= set(ROWS)


def test_the_log_flipped_at_every_bit(log: Path) -> None:
    segments = layout(log)
    rows: Counter[str] = Counter()
    for which, (_, content, _) in enumerate(segments):
        for bit in range(8 * len(content)):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            rows[check_log(segments, which, bit // 8, bytes(damaged), is_cut=False, repairs=bit % 32 == 0)] += 1
    print(sum(rows.values()), dict(rows))
    assert set(rows) == {"wal-torn", "wal-header", "wal-damaged"} <= set(ROWS)


@pytest.mark.parametrize("which", [0, 1], ids=["newest", "older"])
def test_the_recipes_cut_at_every_byte_and_flipped_at_every_bit(base: Path, tmp_path: Path, which: int) -> None:
    (tmp_path / "recipes").mkdir()
    for path in corruption.recipes(base):
        (tmp_path / "recipes" / path.name).write_bytes(path.read_bytes())
    whole = read_recipes(tmp_path)
    path = corruption.recipes(tmp_path)[which]
    content = path.read_bytes()

    def check(damaged: bytes) -> None:
        path.write_bytes(damaged)
        found = read_recipes(tmp_path)
        assert found.value == whole.value
        assert [each.path for each in found.damaged] == [path]

    for length in range(len(content)):
        check(content[:length])
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        check(bytes(damaged))


def test_current_flipped_at_every_bit(base: Path, tmp_path: Path) -> None:
    content = corruption.current(base).read_bytes()
    (tmp_path / "kv").mkdir()
    path = corruption.current(tmp_path)
    path.write_bytes(content)
    assert read_current(tmp_path) is not None
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(StoreDamagedError):
            read_current(tmp_path)


def test_the_marker_cut_at_every_byte_and_flipped_at_every_bit(tmp_path: Path) -> None:
    content = b"1 4711 0\n"
    path = tmp_path / "starting"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert read_failed_starts(tmp_path) == 1
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert read_failed_starts(tmp_path) >= 0


def test_failpoints_are_not_left_armed() -> None:
    assert failpoints._armed == {}
