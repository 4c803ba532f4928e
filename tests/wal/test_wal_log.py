"""The log gives back a prefix of what was appended, whatever a crash or a bad bit left of it."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.wal import writer as writer_module
from kvd.wal.disk_faults import disk_bytes
from kvd.wal.reader import SegmentEnd, list_segments, parse_segment, read_segment, segment_path
from kvd.wal.record import (
    FLAG_IGNORABLE,
    SEGMENT_HEADER_BYTES,
    Forget,
    Insert,
    Pin,
    Record,
    SegmentHeader,
    Unpin,
    WalDamageError,
    WalFormatError,
    WalRecordTooLargeError,
    decode_record,
    decode_segment_header,
    encode_record,
    encode_segment_header,
)
from kvd.wal.repair import RepairReport, repair_log
from kvd.wal.writer import LogPosition, WalWriter

UUID = bytes(range(16))


def some_records(count: int) -> list[Record]:
    records: list[Record] = []
    for index in range(count):
        kind = index % 5
        if kind == 3:
            records.append(Pin(f"pin-{index}", bytes([index]) * 32))
        elif kind == 4:
            records.append(Forget((bytes([index]) * 32,)))
        else:
            namespace = (b"f" * 32, b"salt", b"") if index == 0 else None
            records.append(Insert(b"r" * 32, bytes([index]) * 32, bytes([index]) * (4 * (index % 7)), namespace))
    return records


def open_writer(directory: Path, report: RepairReport | None = None, **changes) -> WalWriter:
    report = report or RepairReport()
    position = LogPosition(report.last_lsn + 1, report.next_segment, report.num_bytes, report.last_lsns)
    settings = {
        "store_uuid": UUID,
        "sync_interval_s": 0.0,
        "segment_bytes": 2048,
        "max_bytes": 1 << 20,
        "queue_capacity": 1000,
        "on_error": lambda _: None,
    } | changes
    return WalWriter(directory, position, **settings)


def repair(directory: Path, quarantine: Path, max_bytes: int = 1 << 20) -> tuple[list[tuple[int, Record]], RepairReport]:
    found: list[tuple[int, Record]] = []
    report = repair_log(
        directory, UUID, lambda lsn, record: found.append((lsn, record)), quarantine=quarantine, quarantine_max_bytes=max_bytes
    )
    return found, report


def until(condition: Callable[[], object]) -> None:
    """What the writer's thread says of itself comes after what it did."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def wal(tmp_path: Path) -> Path:
    directory = tmp_path / "wal"
    directory.mkdir()
    return directory


def fill(wal: Path, count: int, **changes) -> list[Record]:
    records = some_records(count)
    writer = open_writer(wal, **changes)
    assert [writer.append(record) for record in records] == list(range(1, count + 1))
    assert writer.close(60)
    return records


def test_what_was_appended_comes_back_over_several_segments(wal, tmp_path):
    records = fill(wal, 60)
    assert len(list_segments(wal)) > 2
    found, report = repair(wal, tmp_path / "quarantine")
    assert found == list(enumerate(records, 1))
    assert (report.last_lsn, report.damage, report.torn_bytes) == (60, [], 0)


def test_appending_goes_on_after_a_restart(wal, tmp_path):
    records = fill(wal, 10)
    _, report = repair(wal, tmp_path / "quarantine")
    writer = open_writer(wal, report)
    assert writer.append(Unpin("x")) == 11
    assert writer.close(60)
    found, report = repair(wal, tmp_path / "quarantine")
    assert found == [*enumerate(records, 1), (11, Unpin("x"))]
    assert report.damage == []


def one_segment(wal: Path, count: int) -> tuple[list[Record], bytes, list[int]]:
    """A single small segment, its bytes up to the last record, and where each record ends."""
    records = some_records(count)
    header = encode_segment_header(SegmentHeader(UUID, 1, 1, 99))
    data, ends = bytearray(header), []
    for lsn, record in enumerate(records, 1):
        data += encode_record(record, lsn, 99)
        ends.append(len(data))
    return records, bytes(data), ends


def test_a_cut_at_every_byte_leaves_the_records_before_it(wal):
    records, data, ends = one_segment(wal, 7)
    path = segment_path(wal, 1)
    for length in range(SEGMENT_HEADER_BYTES, len(data) + 1):
        segment = parse_segment(1, path, data[:length])
        expected = sum(end <= length for end in ends)
        assert [record for _, record in segment.records] == records[:expected]
        # the same with the rest of the preallocated segment still zero
        padded = parse_segment(1, path, data[:length] + bytes(512))
        assert [record for _, record in padded.records][:expected] == records[:expected]
        assert len(padded.records) <= expected + 1  # a record whose last bytes are zero anyway may be whole


def test_every_flipped_bit_leaves_a_prefix(wal):
    records, data, ends = one_segment(wal, 5)
    path = segment_path(wal, 1)
    data += bytes(64)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        segment = parse_segment(1, path, bytes(damaged))
        if bit // 8 < SEGMENT_HEADER_BYTES:
            assert segment.header is None
            assert segment.records == []
        else:
            whole = sum(end <= bit // 8 for end in ends)
            assert [record for _, record in segment.records] == records[:whole]
            assert segment.end is not SegmentEnd.CLEAN


def test_a_torn_tail_is_cut_and_is_no_damage(wal, tmp_path):
    records, data, ends = one_segment(wal, 6)
    segment_path(wal, 1).write_bytes(data[: ends[-1] - 9] + bytes(1000))
    found, report = repair(wal, tmp_path / "quarantine")
    assert [record for _, record in found] == records[:5]
    assert report.damage == []
    assert report.torn_bytes > 0
    assert segment_path(wal, 1).stat().st_size == ends[4]
    assert read_segment(1, segment_path(wal, 1)).end is SegmentEnd.CLEAN
    assert repair(wal, tmp_path / "quarantine")[1].torn_bytes == 0


def group_of(count: int, *, num_synced: int) -> tuple[bytearray, list[int]]:
    """A segment whose first ``num_synced`` records were synced, and the rest written after that in one group; where each record ends."""
    data, ends = bytearray(encode_segment_header(SegmentHeader(UUID, 1, 1, 99))), []
    for lsn, record in enumerate(some_records(count), 1):
        data += encode_record(record, lsn, 99, num_unsynced=max(0, lsn - 1 - num_synced))
        ends.append(len(data))
    return data + bytes(-len(data) % 512 + 512), ends


def test_any_sector_that_a_power_cut_kept_from_the_disk_is_no_damage(wal):
    whole, ends = group_of(45, num_synced=5)
    first, last = ends[4] // 512, (ends[-1] - 1) // 512
    assert 3 <= last - first <= 8
    for missing in range(1 << (last - first + 1)):
        data = whole.copy()
        for sector in range(first, last + 1):
            if missing >> (sector - first) & 1:
                start = max(ends[4], sector * 512)
                data[start : (sector + 1) * 512] = bytes((sector + 1) * 512 - start)
        segment = parse_segment(1, segment_path(wal, 1), bytes(data))
        assert 5 <= len(segment.records) <= 45
        assert segment.end is not SegmentEnd.DAMAGED


def test_a_lost_sector_that_had_been_synced_is_damage(wal):
    whole, ends = group_of(40, num_synced=30)
    sector = ends[10] // 512 + 1
    assert (sector + 1) * 512 < ends[29]
    whole[sector * 512 : (sector + 1) * 512] = bytes(512)
    assert parse_segment(1, segment_path(wal, 1), bytes(whole)).end is SegmentEnd.DAMAGED


def test_a_flipped_bit_in_a_group_that_was_not_synced_is_damage(wal):
    whole, ends = group_of(40, num_synced=5)
    whole[ends[10] + 30] ^= 1
    assert parse_segment(1, segment_path(wal, 1), bytes(whole)).end is SegmentEnd.DAMAGED


def test_damage_before_the_tail_keeps_what_precedes_it_and_is_reported(wal, tmp_path):
    records = fill(wal, 60)
    segments = list_segments(wal)
    first = read_segment(*segments[0])
    data = bytearray(segments[1][1].read_bytes())
    data[SEGMENT_HEADER_BYTES + 40] ^= 1
    segments[1][1].write_bytes(data)
    found, report = repair(wal, tmp_path / "quarantine")
    assert [record for _, record in found] == records[: len(first.records)]
    assert any("damaged at byte" in entry for entry in report.damage)
    assert len(report.damage) == len(segments) - 1
    assert sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert [number for number, _ in list_segments(wal)] == [1, 2]
    assert report.next_segment == segments[-1][0] + 1
    again, report = repair(wal, tmp_path / "quarantine")
    assert again == found
    assert report.damage == []


def test_a_missing_segment_is_damage(wal, tmp_path):
    fill(wal, 60)
    list_segments(wal)[1][1].unlink()
    found, report = repair(wal, tmp_path / "quarantine")
    assert [lsn for lsn, _ in found] == list(range(1, found[-1][0] + 1))
    assert "are missing" in report.damage[0]


def test_another_stores_log_is_set_aside(wal, tmp_path):
    fill(wal, 5, store_uuid=b"x" * 16)
    found, report = repair(wal, tmp_path / "quarantine")
    assert found == []
    assert "another store" in report.damage[0]
    assert list_segments(wal) == []


def test_a_records_bytes_do_not_validate_in_another_segment():
    data = encode_record(Unpin("a"), 7, 1)
    assert decode_record(memoryview(data), 0, 1)[:2] == (7, Unpin("a"))
    with pytest.raises(WalDamageError):
        decode_record(memoryview(data), 0, 2)


def test_an_unknown_format_is_refused_and_left_alone(wal, tmp_path):
    from crc32c import crc32c

    header = bytearray(encode_segment_header(SegmentHeader(UUID, 1, 1, 5)))
    header[8] = 2
    header[60:64] = struct.pack("<I", crc32c(bytes(header[:60])))
    with pytest.raises(WalFormatError, match="format 2"):
        decode_segment_header(bytes(header))
    segment_path(wal, 1).write_bytes(bytes(header))
    with pytest.raises(WalFormatError):
        repair(wal, tmp_path / "quarantine")
    assert segment_path(wal, 1).read_bytes() == bytes(header)


def test_an_unknown_record_type_is_refused_unless_it_may_be_passed_by():
    from crc32c import crc32c

    def with_type(flags: int) -> memoryview:
        data = bytearray(encode_record(Unpin("a"), 1, 0))
        data[8], data[9] = 200, flags
        data[0:4] = struct.pack("<I", crc32c(bytes(data[4:]), 0))
        return memoryview(bytes(data))

    with pytest.raises(WalFormatError, match="200"):
        decode_record(with_type(0), 0, 0)
    lsn, record, end = decode_record(with_type(FLAG_IGNORABLE), 0, 0)
    assert (lsn, record, end) == (1, None, len(with_type(0)))


def test_a_record_too_large_is_refused():
    with pytest.raises(WalRecordTooLargeError):
        encode_record(Insert(b"", b"", bytes(2 << 20)), 1, 0)


def test_inserts_are_dropped_a_segment_before_pins_and_nothing_grows_beyond_the_bound(wal, tmp_path):
    writer = open_writer(wal, max_bytes=3 * 2048)
    records = [Insert(b"r" * 32, b"p" * 32, bytes(256)) for _ in range(40)]
    num_inserts = sum(writer.append(record) > 0 for record in records)
    assert 0 < num_inserts < 40
    assert writer.append(Pin("a", b"h")) == num_inserts + 1
    num_pins = 1 + sum(writer.append(Pin(f"pin {number}", b"h" * 32)) > 0 for number in range(40))
    assert 1 < num_pins < 41
    assert writer.flush(60)
    assert writer.num_bytes == 3 * 2048
    assert sum(path.stat().st_size for path in wal.iterdir()) == 3 * 2048
    assert writer.close(60)
    assert writer.stats()["wal_dropped_records"] == 81 - num_inserts - num_pins
    assert len(repair(wal, tmp_path / "quarantine")[0]) == num_inserts + num_pins


def test_tries_that_fail_leave_no_segments_behind(wal, tmp_path, monkeypatch):
    failing = {"yes": True}
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        if failing["yes"]:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(writer_module.os, "fdatasync", fdatasync)
    monkeypatch.setattr(writer_module, "_RETRY_MIN_S", 0.001)
    monkeypatch.setattr(writer_module, "_RETRY_MAX_S", 0.001)
    heard: list[str] = []
    writer = open_writer(wal, on_error=heard.append, on_recovered=lambda: heard.append("recovered"))
    writer.append(Pin("a", b"h"))
    while writer.stats()["wal_sync_failures"] < 20:
        assert not writer.flush(0.01)
        assert len(list_segments(wal)) <= 1
    assert writer.fault.startswith("eio: the disk fails")
    failing["yes"] = False
    assert writer.flush(60)
    until(lambda: writer.fault == "")
    assert len(heard) == 2
    assert heard[1] == "recovered"
    assert writer.num_bytes == 2048
    assert writer.close(60)
    assert repair(wal, tmp_path / "quarantine")[0] == [(1, Pin("a", b"h"))]


def test_applied_segments_are_unlinked(wal):
    writer = open_writer(wal)
    for record in some_records(60):
        writer.append(record)
    assert writer.flush(60)
    before = [read_segment(*entry) for entry in list_segments(wal)]
    writer.retire(before[-2].last_lsn)
    assert writer.close(60)
    assert [number for number, _ in list_segments(wal)] == [before[-1].number]
    assert writer.num_bytes == before[-1].size_bytes


def test_after_a_failed_sync_the_log_goes_on_in_a_new_segment_and_syncs_the_old_one_never_again(wal, tmp_path, monkeypatch):
    synced: list[str] = []
    failing = {"at": 3}

    def fdatasync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        if len(synced) == failing["at"]:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer_module.os, "fdatasync", fdatasync)
    monkeypatch.setattr(writer_module, "_RETRY_MIN_S", 0.0)
    errors: list[str] = []
    writer = open_writer(wal, segment_bytes=1 << 16, on_error=errors.append)
    records = some_records(9)
    for record in records:
        writer.append(record)
        writer.flush(10)
    assert writer.durable_lsn == 9
    assert writer.close(60)
    assert synced[:3] == ["0000000000000001.wal"] * 3
    assert set(synced[3:]) == {"0000000000000002.wal"}
    assert len(errors) == 1
    assert [number for number, _ in list_segments(wal)] == [2]
    found, report = repair(wal, tmp_path / "quarantine")
    assert found == list(enumerate(records, 1))
    assert report.damage == []


def test_a_segment_given_up_over_another_s_unlinking_goes_once_all_of_it_is_applied(wal, monkeypatch):
    monkeypatch.setattr(writer_module, "_RETRY_MIN_S", 0.0)
    failures = [OSError(errno.EIO, "Input/output error")]
    real = WalWriter._unlink

    def unlink(self, number: int) -> None:
        if failures:
            raise failures.pop()
        real(self, number)

    monkeypatch.setattr(WalWriter, "_unlink", unlink)
    errors: list[str] = []
    writer = open_writer(wal, on_error=errors.append)
    for record in some_records(60):
        writer.append(record)
    assert writer.flush(60)
    assert len(list_segments(wal)) > 1
    writer.retire(read_segment(*list_segments(wal)[0]).last_lsn)
    until(lambda: errors)
    writer.retire(writer.seal())
    until(lambda: not list_segments(wal))
    assert len(errors) == 1
    assert writer.append(Unpin("x")) == 61
    assert writer.close(60)
    assert [each.last_lsn for each in (read_segment(*entry) for entry in list_segments(wal))] == [61]


def test_a_sealed_segment_that_was_applied_before_it_was_written_goes(wal):
    writer = open_writer(wal, sync_interval_s=60.0)
    for record in some_records(3):
        writer.append(record)
    assert writer.flush(60)
    writer.append(Unpin("a"))
    assert writer.seal() == 4
    writer.append(Unpin("b"))  # in the same round, and nothing is applied after it
    writer.retire(4)
    assert writer.flush(60)
    until(lambda: writer.lowest_last_lsn > 4)
    assert writer.close(60)
    assert [each.last_lsn for each in (read_segment(*entry) for entry in list_segments(wal))] == [5]


def test_a_crash_between_rewriting_and_unlinking_replays_each_record_once(wal, tmp_path):
    records, data, _ = one_segment(wal, 6)
    segment_path(wal, 1).write_bytes(data)
    second = bytearray(encode_segment_header(SegmentHeader(UUID, 2, 1, 7)))
    for lsn, record in enumerate([*records, Unpin("z")], 1):
        second += encode_record(record, lsn, 7)
    segment_path(wal, 2).write_bytes(bytes(second))
    found, report = repair(wal, tmp_path / "quarantine")
    assert found == list(enumerate([*records, Unpin("z")], 1))
    assert report.damage == []


def test_a_full_disk_keeps_records_waiting_until_there_is_room(wal, tmp_path, monkeypatch):
    full = {"yes": True}
    real = writer_module.write_all

    def write_all(fd: int, data, offset: int) -> None:
        if full["yes"]:
            raise OSError(28, "No space left on device")
        real(fd, data, offset)

    monkeypatch.setattr(writer_module, "write_all", write_all)
    monkeypatch.setattr(writer_module, "_RETRY_MIN_S", 0.001)
    monkeypatch.setattr(writer_module, "_RETRY_MAX_S", 0.001)
    writer = open_writer(wal)
    writer.append(Pin("a", b"h"))
    assert not writer.flush(0.05)
    until(lambda: "No space" in writer.fault)
    full["yes"] = False
    assert writer.flush(60)
    until(lambda: writer.fault == "")
    assert writer.close(60)
    assert repair(wal, tmp_path / "quarantine")[0] == [(1, Pin("a", b"h"))]


def test_the_quarantine_is_bounded_oldest_first(wal, tmp_path):
    quarantine = tmp_path / "quarantine"
    for age in range(5):
        _, data, _ = one_segment(wal, 6)
        if age == 2:
            segment_path(wal, 1).mkdir()
            (segment_path(wal, 1) / "inside").write_bytes(data)
        else:
            segment_path(wal, 1).write_bytes(bytes([age]) * 10 + data)
        one_bytes = disk_bytes(segment_path(wal, 1))
        repair(wal, quarantine, max_bytes=2 * one_bytes + 100)
        time.sleep(0.02)  # the folder's order is by the time of the move
    assert disk_bytes(quarantine) - quarantine.lstat().st_blocks * 512 <= 2 * one_bytes + 100
    assert sorted(path.read_bytes()[0] for path in quarantine.iterdir()) == [3, 4]
    shutil.rmtree(quarantine)
