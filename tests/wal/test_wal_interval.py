"""The log where it may stay unsynced for a while: written at once, synced in time, and what a failed sync costs."""

from __future__ import annotations

import errno
import os

import pytest
from test_wal_log import open_writer, repair, some_records, until

from kvd.wal import writer as writer_module

TIMEOUT_S = 30.0


@pytest.fixture
def wal(tmp_path):
    directory = tmp_path / "wal"
    directory.mkdir()
    return directory


@pytest.fixture
def syncs(monkeypatch):
    """Whether syncs of data fail, and how many there were."""
    state = {"fails": False, "count": 0}
    real = os.fdatasync

    def fdatasync(fd):
        state["count"] += 1
        if state["fails"]:
            raise OSError(errno.EIO, "as told")
        real(fd)

    monkeypatch.setattr(writer_module.os, "fdatasync", fdatasync)
    return state


def test_records_are_written_at_once_and_read_without_a_sync(wal, tmp_path, syncs):
    records = some_records(40)
    writer = open_writer(wal, unsynced_max_s=1000.0, segment_bytes=1 << 16)
    for record in records:
        writer.append(record)
    until(lambda: writer._written_lsn == 40)
    assert (writer.durable_lsn, syncs["count"]) == (0, 0)
    found, report = repair(wal, tmp_path / "quarantine")  # as after SIGKILL
    assert found == list(enumerate(records, 1))
    assert report.damage == []
    assert writer.close(60)
    assert (writer.durable_lsn, syncs["count"]) == (40, 1)


def test_what_was_written_is_synced_in_time(wal, syncs):
    writer = open_writer(wal, unsynced_max_s=0.05, segment_bytes=1 << 16)
    for round_number in range(1, 4):
        writer.append(some_records(1)[0])
        until(lambda number=round_number: writer.durable_lsn == number)
    assert syncs["count"] == 3
    assert writer.close(60)


def test_a_flush_syncs_at_once(wal, syncs):
    writer = open_writer(wal, unsynced_max_s=1000.0, segment_bytes=1 << 16)
    writer.append(some_records(1)[0])
    assert writer.flush(TIMEOUT_S)
    assert syncs["count"] == 1
    assert writer.flush(TIMEOUT_S)
    assert writer.close(60)
    assert syncs["count"] == 1


def test_a_segment_is_synced_before_the_next_one_begins(wal, tmp_path):
    records = some_records(60)
    writer = open_writer(wal, unsynced_max_s=1000.0)
    for record in records:
        writer.append(record)
    until(lambda: writer._written_lsn == 60)
    assert 0 < writer.durable_lsn < 60
    found, report = repair(wal, tmp_path / "quarantine")
    assert (found, report.damage) == (list(enumerate(records, 1)), [])
    assert writer.close(60)


def test_a_full_queue_does_not_wait_for_the_time(wal):
    writer = open_writer(wal, unsynced_max_s=1000.0, segment_bytes=1 << 18, queue_capacity=100)
    for record in some_records(51):
        writer.append(record)
    until(lambda: writer.durable_lsn == 51)
    assert writer.close(60)


def test_after_a_failed_sync_all_that_was_not_synced_is_written_anew(wal, tmp_path, syncs, monkeypatch):
    monkeypatch.setattr(writer_module, "_RETRY_MIN_S", 0.01)
    records = some_records(30)
    writer = open_writer(wal, unsynced_max_s=1000.0, segment_bytes=1 << 16)
    for record in records[:10]:
        writer.append(record)
    assert writer.flush(TIMEOUT_S)
    syncs["fails"] = True
    for record in records[10:]:
        writer.append(record)
    until(lambda: writer._written_lsn == 30)
    until(lambda: not writer.flush(0.05) and writer.fault)
    syncs["fails"] = False
    assert writer.flush(TIMEOUT_S)
    until(lambda: not writer.fault)
    assert writer.close(60)
    found, report = repair(wal, tmp_path / "quarantine")
    assert (found, report.damage) == (list(enumerate(records, 1)), [])
