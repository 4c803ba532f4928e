"""Appending to the log: one thread, one sync for all records of a few milliseconds, preallocated segments.

``append`` never waits for the disk. At a bound (queue or log size) records are dropped and counted, for the log is a cache: what it knows could be computed
again, and pins stand in the recipes. Inserts are dropped a segment earlier than the others, which are few.

A file whose sync failed is never synced again: the kernel may have dropped the pages and would report success (PostgreSQL's "fsyncgate", 2018). Its durable
records and those that were under way are written to a new segment, and the suspect one is unlinked once that one is durable.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvd.observe.failpoints import declare, failpoint
from kvd.wal.disk_faults import fault_sentence
from kvd.wal.durable import make_directory, remove_any, sync_directory, write_all
from kvd.wal.reader import read_segment, segment_path
from kvd.wal.record import (
    SEGMENT_HEADER_BYTES,
    Forget,
    Insert,
    PayloadSeal,
    Record,
    SegmentHeader,
    WalError,
    encode_record,
    encode_segment_header,
    format_of,
)

declare(
    "wal.segment.before_sync",
    "wal.segment.before_rename",
    "wal.segment.after_rename",
    "wal.before_write",
    "wal.before_sync",
    "wal.after_sync",
    "wal.before_unlink",
)

_RETRY_MIN_S = 0.1
_RETRY_MAX_S = 30.0
_RECORD_FRAME_BYTES = 160
"""More than a record's header, padding and what msgpack adds to two hashes."""

Entry = tuple[int, Record]


@dataclass(slots=True)
class _Active:
    """The segment being written."""

    fd: int
    path: Path
    number: int
    salt: int
    size_bytes: int
    offset: int
    first_lsn: int
    last_lsn: int
    synced_lsn: int


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where the log stands when the writer takes it up: what ``repair_log`` reported."""

    next_lsn: int
    next_segment: int
    num_bytes: int
    last_lsns: dict[int, int]


class WalWriter:
    """``append``, ``flush``, ``retire`` and the counters may be used from any thread. ``close`` ends the thread.

    Records are collected for ``sync_interval_s`` and written together, and synced at once; or, with ``unsynced_max_s``, synced when the first that is not has been
    written for so long: a power cut may then lose what was written since, the death of the process may not.
    """

    def __init__(
        self,
        directory: Path,
        position: LogPosition,
        *,
        store_uuid: bytes,
        sync_interval_s: float,
        unsynced_max_s: float = 0.0,
        segment_bytes: int,
        max_bytes: int,
        queue_capacity: int,
        seal: PayloadSeal | None = None,
        on_error: Callable[[str], None],
        on_recovered: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._store_uuid = store_uuid
        self._payload_seal = seal
        self._sync_interval_s = sync_interval_s
        self._unsynced_max_s = unsynced_max_s
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        self._queue_capacity = queue_capacity
        self._on_error = on_error
        self._on_recovered = on_recovered
        self._wake = threading.Condition()
        self._queue: deque[Entry] = deque()
        self._queued_bytes = 0
        self._next_lsn = position.next_lsn
        self._durable_lsn = self._written_lsn = position.next_lsn - 1
        self._unsynced_since_s: float | None = None
        self._retire_lsn = 0
        self._retired_lsn = 0
        self._seal_lsn = 0
        self._closing = False
        self._flushing = 0
        # the thread's own from here on
        self._last_lsns = dict(position.last_lsns)
        self._sizes = {number: segment_path(directory, number).stat().st_size for number in position.last_lsns}
        self._next_segment = position.next_segment
        self._num_bytes = position.num_bytes
        self._active: _Active | None = None
        self._suspect: _Active | None = None
        self._fault = ""
        self._retry_s = _RETRY_MIN_S
        self._num_dropped = self._num_records = self._num_written_bytes = self._num_syncs = self._num_failures = 0
        self._sync_s_total = self._sync_s_max = 0.0
        self._thread = threading.Thread(target=self._run, name="kvd-wal", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------- any thread

    @property
    def last_lsn(self) -> int:
        """Of the newest record taken."""
        return self._next_lsn - 1

    @property
    def durable_lsn(self) -> int:
        """Every record up to here is on disk."""
        return self._durable_lsn

    @property
    def num_bytes(self) -> int:
        """Size of all segments."""
        return self._num_bytes

    @property
    def fault(self) -> str:
        """Why records do not reach the disk at the moment; empty when they do."""
        return self._fault

    @property
    def is_alive(self) -> bool:
        """Whether its thread may still write."""
        return self._thread.is_alive()

    def append(self, record: Record) -> int:
        """Take a record; its LSN, or 0 if a bound was reached."""
        with self._wake:
            num_bytes = _about_bytes(record)
            reserve = self._segment_bytes if isinstance(record, Insert) else 0
            is_full = self._num_bytes + self._new_segment_bytes(num_bytes) + reserve > self._max_bytes
            if is_full or (reserve and len(self._queue) >= self._queue_capacity):
                self._num_dropped += 1
                return 0
            self._queued_bytes += num_bytes
            lsn = self._next_lsn
            self._next_lsn += 1
            self._queue.append((lsn, record))
            if lsn == self._written_lsn + 1:
                self._wake.notify_all()
        return lsn

    def _new_segment_bytes(self, num_bytes: int) -> int:
        """Of the segments that what waits, and ``num_bytes`` more, will need."""
        active = self._active
        rest = self._queued_bytes + num_bytes - (active.size_bytes - active.offset if active is not None else 0)
        return -(-rest // self._segment_bytes) * self._segment_bytes if rest > 0 else 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything taken so far is durable; whether it is."""
        return self._flush(timeout_s, lambda: False)

    def _flush(self, timeout_s: float, is_vain: Callable[[], bool]) -> bool:
        with self._wake:
            target = self._next_lsn - 1
            self._flushing += 1  # syncs at once, whatever unsynced_max_s allows
            self._wake.notify_all()
            try:
                self._wake.wait_for(lambda: self._durable_lsn >= target or is_vain(), timeout_s)
            finally:
                self._flushing -= 1
            return self._durable_lsn >= target

    def seal(self) -> int:
        """Have every record from now on written to another segment than those so far; the last one's LSN."""
        with self._wake:
            self._seal_lsn = self._next_lsn - 1
            self._wake.notify_all()
            return self._seal_lsn

    @property
    def lowest_last_lsn(self) -> int:
        """Of the segments, which may be none, the lowest last LSN: everything above is in others."""
        return min(tuple(self._last_lsns.values()), default=self._next_lsn)

    def retire(self, applied_lsn: int) -> None:
        """Everything up to ``applied_lsn`` is durable elsewhere: unlink the segments that hold nothing newer."""
        with self._wake:
            self._retire_lsn = max(self._retire_lsn, applied_lsn)
            self._wake.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Write what waits and end the thread; False if some of it is not durable. During a fault one more try is all."""
        self._flush(timeout_s, lambda: bool(self._fault))
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return self._durable_lsn >= self._next_lsn - 1

    def stats(self) -> dict[str, Any]:
        return {
            "wal_records": self._num_records,
            "wal_dropped_records": self._num_dropped,
            "wal_written_bytes": self._num_written_bytes,
            "wal_syncs": self._num_syncs,
            "wal_sync_failures": self._num_failures,
            "wal_sync_ms_total": round(self._sync_s_total * 1e3, 3),
            "wal_sync_ms_max": round(self._sync_s_max * 1e3, 3),
            "wal_bytes": self._num_bytes,
            "wal_queue": len(self._queue),
        }

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work, self._unsynced_for_s())
                if self._has_new() and not self._closing:
                    self._wake.wait_for(lambda: self._closing or self._flushing > 0, self._sync_interval_s)
                batch = self._new()
                closing = self._closing
                must_sync = closing or self._flushing > 0 or 2 * len(self._queue) > self._queue_capacity
            try:
                self._retire()
                if batch:
                    self._write(batch)
                if must_sync or self._unsynced_for_s() == 0.0:
                    self._sync()
                num_bytes = sum(_about_bytes(record) for _, record in batch)
            except Exception as error:  # whatever it was: it shows as a fault, and the thread lives on to try again
                self._fail(error)
                num_bytes = 0
                if not closing:
                    with self._wake:
                        self._wake.wait_for(lambda: self._closing, self._retry_s)
                    self._retry_s = min(self._retry_s * 2, _RETRY_MAX_S)
            else:
                if self._fault:
                    self._on_recovered()
                self._fault, self._retry_s = "", _RETRY_MIN_S
            self._drop_durable(num_bytes)
            if closing:
                break
        self._seal()
        with contextlib.suppress(OSError):
            self._retire()

    def _has_new(self) -> bool:
        return self._next_lsn - 1 > self._written_lsn

    def _new(self) -> list[Entry]:
        """What waits to be written; what was written and is not durable waits in the queue as well."""
        first = self._queue[0][0] if self._queue else 0
        return list(islice(self._queue, max(0, self._written_lsn + 1 - first), None))

    def _has_work(self) -> bool:
        waited_for = self._flushing > 0 and self._written_lsn > self._durable_lsn
        return self._has_new() or self._closing or self._retire_lsn > self._retired_lsn or waited_for or self._is_sealed_and_applied()

    def _unsynced_for_s(self) -> float | None:
        """How long what was written may stay unsynced from now on; None if nothing is."""
        if self._unsynced_since_s is None:
            return None
        return max(0.0, self._unsynced_since_s + self._unsynced_max_s - time.monotonic())

    def _drop_durable(self, num_written_bytes: int) -> None:
        """Take what is durable from the queue; ``num_written_bytes`` of it were written, 0 if that failed."""
        with self._wake:
            while self._queue and self._queue[0][0] <= self._durable_lsn:
                self._queue.popleft()
            if self._fault:
                self._queued_bytes = sum(_about_bytes(record) for _, record in self._queue)
            else:
                self._queued_bytes -= num_written_bytes
            self._wake.notify_all()

    def _write(self, batch: list[Entry]) -> None:
        """Write ``batch``, and sync it if it may not wait; what is durable shows in ``_durable_lsn``, also if this raises."""
        suspect, self._suspect = self._suspect, None
        rescued: list[Entry] = []
        try:
            if suspect is not None:
                rescued = self._rescue(suspect)
            entries = deque([*rescued, *batch])
            if self._payload_seal is not None:
                self._payload_seal.prepare(record for _, record in entries)
            while entries:
                self._write_some(entries)
            if rescued:
                self._sync()
        except Exception:
            self._suspect = self._suspect or suspect
            raise
        if suspect is not None and rescued:
            self._unlink(suspect.number)
        elif suspect is not None:
            self._retired_lsn = min(self._retired_lsn, suspect.last_lsn - 1)  # as ``_seal``

    def _rescue(self, suspect: _Active) -> list[Entry]:
        """The durable records of a segment whose sync failed; none if they can't all be read back, and then the segment stays."""
        try:
            segment = read_segment(suspect.number, suspect.path, self._payload_seal)
        except (OSError, WalError):
            return []
        records = [entry for entry in segment.records if entry[0] <= suspect.synced_lsn]
        return records if segment.last_lsn >= suspect.synced_lsn else []

    def _write_some(self, entries: deque[Entry]) -> None:
        """Write as many of ``entries`` as fit into the active segment; a full one is synced and closed instead."""
        active = self._active
        if active is None:
            active = self._create(entries[0])
        chunk = bytearray()
        last_lsn = active.last_lsn
        while entries:
            lsn, record = entries[0]
            data = encode_record(record, lsn, active.salt, self._payload_seal, num_unsynced=lsn - 1 - active.synced_lsn)
            if active.offset + len(chunk) + len(data) > active.size_bytes or active.first_lsn <= self._seal_lsn < lsn:
                break
            chunk += data
            last_lsn = lsn
            entries.popleft()
        if not chunk:
            self._sync()  # before the next one: a gap between two segments would be damage
            self._seal()
            return
        failpoint("wal.before_write")
        write_all(active.fd, chunk, active.offset)
        self._num_records += last_lsn - active.last_lsn
        self._num_written_bytes += len(chunk)
        active.offset += len(chunk)
        active.last_lsn = last_lsn
        self._last_lsns[active.number] = last_lsn
        self._written_lsn = max(self._written_lsn, last_lsn)
        if self._unsynced_since_s is None:
            self._unsynced_since_s = time.monotonic()
        if not self._unsynced_max_s:
            self._sync()

    def _sync(self) -> None:
        """Make what was written to the active segment durable."""
        active = self._active
        if active is None or active.synced_lsn == active.last_lsn:
            return
        failpoint("wal.before_sync")
        started = time.monotonic()
        os.fdatasync(active.fd)
        elapsed = time.monotonic() - started
        failpoint("wal.after_sync")
        active.synced_lsn = active.last_lsn
        self._unsynced_since_s = None
        self._num_syncs += 1
        self._sync_s_total += elapsed
        self._sync_s_max = max(self._sync_s_max, elapsed)
        self._durable_lsn = max(self._durable_lsn, active.synced_lsn)

    def _create(self, first: Entry) -> _Active:
        """A fresh segment, all zeros behind its header, durable under its name before the first record."""
        number, salt = self._next_segment, int.from_bytes(os.urandom(4), "little")
        needed = SEGMENT_HEADER_BYTES + len(encode_record(first[1], first[0], salt, self._payload_seal))
        size_bytes = max(self._segment_bytes, needed)
        path = segment_path(self._directory, number)
        temporary = path.with_name(f".{path.name}.tmp")
        make_directory(self._directory)
        remove_any(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            header = encode_segment_header(SegmentHeader(self._store_uuid, number, first[0], salt), format_of(self._payload_seal))
            # Real zeros, not fallocate: the later data syncs then change no metadata, and nothing stale can ever validate.
            write_all(fd, header + bytes(size_bytes - len(header)), 0)
            failpoint("wal.segment.before_sync")
            os.fsync(fd)
            failpoint("wal.segment.before_rename")
            temporary.rename(path)
            failpoint("wal.segment.after_rename")
            sync_directory(self._directory)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)  # on a full disk others can use its room
            raise
        self._next_segment += 1
        self._sizes[number] = size_bytes
        self._last_lsns[number] = first[0] - 1
        self._num_bytes += size_bytes
        self._active = _Active(fd, path, number, salt, size_bytes, SEGMENT_HEADER_BYTES, first[0], first[0] - 1, first[0] - 1)
        return self._active

    def _seal(self) -> None:
        if self._active is not None:
            os.close(self._active.fd)
            self._retired_lsn = min(
                self._retired_lsn, self._active.last_lsn - 1
            )  # it could not be unlinked while it was written to: now it may be
            self._active = None

    def _fail(self, error: Exception) -> None:
        """Give the active segment up: no further write or sync on it."""
        self._num_failures += 1
        sentence = fault_sentence(error)
        if not self._fault:
            self._on_error(f"the write-ahead log can't be written: {sentence}")
        self._fault = sentence
        self._written_lsn, self._unsynced_since_s = self._durable_lsn, None
        active = self._active
        if active is None:
            return
        self._seal()
        if active.synced_lsn < active.first_lsn:  # nothing in it was ever durable: left there, one would stay from each try
            with contextlib.suppress(OSError):
                self._unlink(active.number)
        elif self._suspect is None or active.synced_lsn > self._suspect.synced_lsn:
            self._suspect = active

    def _retire(self) -> None:
        target = self._retire_lsn
        if self._is_sealed_and_applied():
            self._sync()
            self._seal()
        active = self._active.number if self._active is not None else None
        if self._suspect is not None and self._last_lsns.get(self._suspect.number, 0) <= target:
            self._suspect = None  # nothing of it has to be written anew
        suspect = self._suspect.number if self._suspect is not None else None
        for number, last_lsn in list(self._last_lsns.items()):
            if last_lsn <= target and number not in {active, suspect}:
                self._unlink(number)
        self._retired_lsn = target

    def _is_sealed_and_applied(self) -> bool:
        """Whether the segment being written holds nothing but what is durable elsewhere and was sealed off."""
        active = self._active
        return active is not None and active.first_lsn <= active.last_lsn <= min(self._retire_lsn, self._seal_lsn)

    def _unlink(self, number: int) -> None:
        failpoint("wal.before_unlink")
        segment_path(self._directory, number).unlink(missing_ok=True)
        sync_directory(self._directory)
        self._last_lsns.pop(number, None)
        self._num_bytes -= self._sizes.pop(number, 0)


def _about_bytes(record: Record) -> int:
    """At least what a record takes in a segment."""
    if isinstance(record, Insert):
        parts = record.namespace or ()
        return _RECORD_FRAME_BYTES + len(record.token_ids) + sum(len(part) for part in parts)
    if isinstance(record, Forget):
        return _RECORD_FRAME_BYTES + 34 * len(record.block_hashes)
    return _RECORD_FRAME_BYTES + 4 * len(record.name)
