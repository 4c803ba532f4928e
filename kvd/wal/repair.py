"""Taking up a log after a crash: replay what is valid, cut a torn tail, set aside what lies behind damage.

The outcome is always a prefix of what was appended. Nothing is deleted that might be asked for: bytes that are cut or unusable are copied or moved to a
quarantine folder. Where that can't be written (a full disk) the log is taken up without a copy, and the report says so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvd.observe.failpoints import declare, failpoint
from kvd.wal.durable import remove_any
from kvd.wal.quarantine import discard, keep_piece
from kvd.wal.reader import Segment, SegmentEnd, read_segments
from kvd.wal.record import PayloadSeal, Record

declare("wal.repair.before_quarantine", "wal.repair.before_cut", "wal.repair.after_cut")


@dataclass(slots=True)
class RepairReport:
    """What was found. ``damage`` is empty unless something other than a torn tail was wrong; each entry is a sentence for the log."""

    num_segments: int = 0
    num_records: int = 0
    first_lsn: int = 0
    last_lsn: int = 0
    next_segment: int = 1
    num_bytes: int = 0
    last_lsns: dict[int, int] = field(default_factory=dict)
    """Last LSN by segment number, of the segments that are kept."""
    torn_bytes: int = 0
    damage: list[str] = field(default_factory=list)


def repair_log(
    directory: Path,
    store_uuid: bytes | None,
    apply: Callable[[int, Record], None],
    *,
    quarantine: Path,
    quarantine_max_bytes: int,
    seal: PayloadSeal | None = None,
) -> RepairReport:
    """Hand every usable record to ``apply`` in order, once, and leave only usable segments in ``directory``.

    ``store_uuid`` None: of whichever store the first segment is.

    Raises:
        WalFormatError: a segment of an unknown format; nothing was changed on its account.
        OSError: the directory can't be read.
    """
    report = RepairReport()
    for unfinished in directory.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            remove_any(unfinished)
    broken = False
    for segment, fault in read_segments(directory, store_uuid, seal):
        report.num_segments += 1
        report.next_segment = segment.number + 1
        if broken or fault:
            report.damage.append(f"{segment.path.name}: {fault or 'it follows damage'}; set aside")
            broken = True
            _set_aside(segment.path, quarantine, quarantine_max_bytes, report)
            continue
        _replay(segment, report, apply)
        if segment.end is SegmentEnd.CLEAN:
            continue
        if segment.end is SegmentEnd.DAMAGED:
            report.damage.append(f"{segment.path.name}: damaged at byte {segment.valid_bytes}; what follows is set aside")
        else:
            report.torn_bytes += segment.size_bytes - segment.valid_bytes
        _cut(segment, quarantine, quarantine_max_bytes, report)
    return report


def _replay(segment: Segment, report: RepairReport, apply: Callable[[int, Record], None]) -> None:
    for lsn, record in segment.records:
        if lsn > report.last_lsn:
            apply(lsn, record)
            report.num_records += 1
    header = segment.header
    if header is not None and not report.first_lsn:
        report.first_lsn = header.first_lsn
    report.last_lsn = max(report.last_lsn, segment.last_lsn)
    report.last_lsns[segment.number] = segment.last_lsn
    report.num_bytes += segment.size_bytes


def _set_aside(path: Path, quarantine: Path, max_bytes: int, report: RepairReport) -> None:
    failpoint("wal.repair.before_quarantine")
    if error := discard(path, quarantine, max_bytes):
        report.damage.append(f"{path.name}: it stays where it is: {error}")


def _cut(segment: Segment, quarantine: Path, max_bytes: int, report: RepairReport) -> None:
    """Keep the valid prefix of a segment; the rest goes to quarantine without its trailing zeros.

    A tail that stays, because nothing can be written, is harmless: the next segment goes on where the valid prefix ends.
    """
    try:
        rest = segment.path.read_bytes()[segment.valid_bytes :].rstrip(b"\0")
        failpoint("wal.repair.before_quarantine")
        keep_piece(f"{segment.path.name}@{segment.valid_bytes}", rest, quarantine, max_bytes)
    except OSError as error:
        report.damage.append(f"{segment.path.name}: what is cut off can't be kept: {error}")
    try:
        failpoint("wal.repair.before_cut")
        fd = os.open(segment.path, os.O_WRONLY)
        try:
            os.ftruncate(fd, segment.valid_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        failpoint("wal.repair.after_cut")
    except OSError as error:
        report.damage.append(f"{segment.path.name}: its tail can't be cut: {error}")
