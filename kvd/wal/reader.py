"""Reading segments: which records are valid, how a segment ends, whether the segments follow one another. Changes nothing on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvd.wal.durable import read_regular
from kvd.wal.record import (
    ALIGNMENT,
    SEGMENT_HEADER_BYTES,
    PayloadSeal,
    Record,
    SegmentHeader,
    WalDamageError,
    decode_record,
    decode_segment_header,
    format_of,
    record_extent,
    synced_lsn,
)

_SECTOR_BYTES = 512
"""What a disk writes whole or not at all."""
_SEGMENT_NAME = re.compile(r"^(\d{16})\.wal$")


class SegmentEnd(StrEnum):
    """What follows a segment's last valid record."""

    CLEAN = "clean"
    """Zeros, or the end of the file."""
    TORN = "torn"
    """Writes that a crash cut: an incomplete record with nothing valid behind it, or one that lacks a sector, and nothing behind it says that it had been synced."""
    DAMAGED = "damaged"
    """Any other invalid record with valid ones behind it, or no valid header."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment as read: ``records`` are (LSN, record) of its valid prefix, ``valid_bytes`` long."""

    path: Path
    number: int
    size_bytes: int
    header: SegmentHeader | None
    records: list[tuple[int, Record]]
    last_lsn: int
    """``first_lsn - 1`` of an empty segment; 0 without a header."""
    valid_bytes: int
    end: SegmentEnd

    @property
    def num_records(self) -> int:
        """Of its valid prefix, those that were passed by among them."""
        return self.last_lsn - self.header.first_lsn + 1 if self.header is not None else 0


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:016d}.wal"


def list_segments(directory: Path) -> list[tuple[int, Path]]:
    """The (number, path) of every segment, in order; empty without a directory."""
    if not directory.is_dir():
        return []
    return sorted((int(match[1]), path) for path in directory.iterdir() if (match := _SEGMENT_NAME.match(path.name)))


def read_segment(number: int, path: Path, seal: PayloadSeal | None = None) -> Segment:
    """Read a segment as far as it is valid.

    Raises:
        WalFormatError: it is of an unknown format.
        OSError: it can't be read, or is no regular file.
    """
    return parse_segment(number, path, read_regular(path), seal)


def parse_segment(number: int, path: Path, data: bytes, seal: PayloadSeal | None = None) -> Segment:
    """``read_segment`` of bytes already read."""
    view = memoryview(data)
    try:
        header = decode_segment_header(view[:SEGMENT_HEADER_BYTES], format_of(seal))
    except WalDamageError:
        header = None
    if header is None or header.number != number:
        return Segment(path, number, len(data), None, [], 0, 0, SegmentEnd.DAMAGED)
    records: list[tuple[int, Record]] = []
    offset, last_lsn = SEGMENT_HEADER_BYTES, header.first_lsn - 1
    while True:
        try:
            lsn, record, after = decode_record(view, offset, header.salt, seal)
        except WalDamageError:
            break
        if lsn != last_lsn + 1:
            break
        if record is not None:
            records.append((lsn, record))
        offset, last_lsn = after, lsn
    return Segment(path, number, len(data), header, records, last_lsn, offset, _end(view, offset, header.salt, seal, last_lsn))


def _end(view: memoryview, offset: int, salt: int, seal: PayloadSeal | None, last_lsn: int) -> SegmentEnd:
    rest = view[offset:]
    used = offset + len(bytes(rest).rstrip(b"\0"))
    if used == offset:
        return SegmentEnd.CLEAN
    next_valid, start = 0, offset + ALIGNMENT
    while start < used:
        try:
            _, _, after = decode_record(view, start, salt, seal)
        except WalDamageError:
            start += ALIGNMENT
            continue
        if synced_lsn(view, start) > last_lsn:
            return SegmentEnd.DAMAGED
        next_valid, start = next_valid or start, after
    return SegmentEnd.DAMAGED if next_valid and not _lacks_sector(view, offset, next_valid) else SegmentEnd.TORN


def _lacks_sector(view: memoryview, offset: int, next_valid: int) -> bool:
    """Whether a sector under the invalid record at ``offset`` was not written since the segment was made: a power cut leaves zeros, other damage does not.

    The record ends before the next valid one, whatever a flipped length says.
    """
    first, last = offset // _SECTOR_BYTES, (min(record_extent(view, offset), next_valid) - 1) // _SECTOR_BYTES
    return any(not any(view[max(offset, sector * _SECTOR_BYTES) : (sector + 1) * _SECTOR_BYTES]) for sector in range(first, last + 1))


def read_segments(directory: Path, store_uuid: bytes | None, seal: PayloadSeal | None = None) -> Iterator[tuple[Segment, str]]:
    """Every segment in order, with what is wrong with it: empty, or why it and all after it must not be used.

    ``store_uuid`` None takes that of the first readable segment. A segment whose records overlap the one before it is fine (a failed sync
    has the log rewritten under the next number); a gap between them is not. One that can't be read at all is as one without a header.
    """
    last_lsn: int | None = None
    for number, path in list_segments(directory):
        try:
            segment = read_segment(number, path, seal)
        except OSError as error:
            if os.path.lexists(path):  # else a live daemon retired it meanwhile
                yield Segment(path, number, 0, None, [], 0, 0, SegmentEnd.DAMAGED), f"it can't be read: {error}"
            continue
        fault = ""
        if segment.header is None:
            fault = "its header is damaged"
        else:
            store_uuid = store_uuid or segment.header.store_uuid
            if segment.header.store_uuid != store_uuid:
                fault = "it belongs to another store"
            elif last_lsn is not None and segment.header.first_lsn > last_lsn + 1:
                fault = f"records {last_lsn + 1} to {segment.header.first_lsn - 1} before it are missing"
            else:
                last_lsn = max(segment.last_lsn, last_lsn or 0)
        yield segment, fault
