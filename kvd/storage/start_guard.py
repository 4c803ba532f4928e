"""The crash-loop guard: a ``starting`` marker that counts starts whose process died before READY or within ten seconds of it.

A store that kills its reader (a bad sector under the map is SIGBUS, not an exception) must not kill it for ever: after two such starts the store
generation is set aside unread, after three the pins are not computed again either. A start that is refused, or fails by an exception, has
not died: it takes its count back. But one whose executor raised while it computed what it had to bring back would do so again, for ever: such starts are
counted apart, and after two of them nothing is computed before READY. Where the marker can't be written (a full disk, a read-only one), the start goes on uncounted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvd.observe.failpoints import declare
from kvd.storage.ports import Log
from kvd.wal.disk_faults import fault_sentence
from kvd.wal.durable import read_regular, remove_any, remove_file, replace_file

declare("store.marker.before_sync", "store.marker.before_rename", "store.marker.after_rename")

MARKER_NAME = "starting"
STABLE_AFTER_S = 10.0
_RETRY_MIN_S = 1.0
_RETRY_MAX_S = 60.0
SET_ASIDE_AT = 2
NO_PINS_AT = 3
NO_COMPUTING_AT = 2
"""Starts whose executor raised before READY."""
_POINTS = ("store.marker.before_sync", "store.marker.before_rename", "store.marker.after_rename")


class StartGuard:
    """``failed_starts`` and ``failed_computations`` are the counts found; this start is counted from construction to ``clear`` or ``take_back``. Thread-safe.

    ``fault`` says why it is not counted; empty if it is.

    Raises:
        PermissionError: the directory is not ours to write.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / MARKER_NAME
        self._lock = threading.Lock()
        self._is_counted = True
        self.failed_starts, self.failed_computations = _read(state_dir)
        self._num_computations = self.failed_computations
        self.fault = ""
        try:
            self._write(self.failed_starts + 1)
        except PermissionError:
            raise
        except OSError as error:
            self.fault = f"{fault_sentence(error)}: the state directory can't be written"

    @property
    def set_store_aside(self) -> bool:
        return self.failed_starts >= SET_ASIDE_AT

    @property
    def skip_pins(self) -> bool:
        return self.failed_starts >= NO_PINS_AT or self.failed_computations >= NO_COMPUTING_AT

    def note_failed_computation(self) -> None:
        """The executor raised before READY: ``take_back`` remembers it."""
        with self._lock:
            self._num_computations = self.failed_computations + 1

    def clear(self) -> None:
        """The start went well, or the daemon ends cleanly."""
        with self._lock:
            remove_file(self._path)
            self._is_counted = False
            self.fault = ""

    def take_back(self) -> None:
        """The process ends in order, though not well: what was known of the starts before it holds on."""
        with self._lock:
            if not self._is_counted:
                return
            self._is_counted = False
            if self.failed_starts or self._num_computations:
                self._write(self.failed_starts)
            else:
                remove_file(self._path)

    def _write(self, count: int) -> None:
        if self._path.is_dir():
            remove_any(self._path)  # a rename would not take its place
        replace_file(self._path, f"{count} {os.getpid()} {self._num_computations}\n".encode(), points=_POINTS)


class StartVerdict:
    """When a start counts as good, and that its marker goes: on a disk that does not take that, it is tried again with growing pauses. Thread-safe."""

    def __init__(self, guard: StartGuard, log: Log) -> None:
        self._guard = guard
        self._log = log
        self._timer: threading.Timer | None = None
        self._turn = threading.Lock()
        self._is_over = False
        """The directory may be another's: a timer that comes late must not take away the marker of the next start."""
        self._is_reported = False
        self._retry_s = _RETRY_MIN_S

    def good_in(self, delay_s: float) -> None:
        """The start counts as good after ``delay_s``, unless the process dies before; takes the place of what was said before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(delay_s, self._mark_good)  # its fsync is not for the engine thread
        self._timer.daemon = True
        self._timer.start()

    def end(self, *, clean: bool) -> None:
        """The daemon ends; not ``clean``: the start counts neither as good nor as one that died."""
        if self._timer is not None:
            self._timer.cancel()
        with self._turn:
            self._is_over = True
            self._settle(self._guard.clear if clean else self._guard.take_back)

    def _mark_good(self) -> None:
        with self._turn:
            if not self._is_over and not self._settle(self._guard.clear):
                self.good_in(self._retry_s)
                self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)

    def _settle(self, mark: Callable[[], None]) -> bool:
        try:
            mark()
        except OSError as error:
            if not self._is_reported:
                self._log.warning("storage.marker_stays", error=fault_sentence(error))
            self._is_reported = True
            return False
        return True


def read_failed_starts(state_dir: Path) -> int:
    """The count in the marker; 0 without one; an unreadable marker counts as one failed start."""
    return _read(state_dir)[0]


def _read(state_dir: Path) -> tuple[int, int]:
    """Starts that died, and starts whose computing failed; the latter is missing in markers of 0.1.0."""
    try:
        fields = read_regular(state_dir / MARKER_NAME).split()
        return max(0, int(fields[0])), max(0, int(fields[2])) if len(fields) > 2 else 0
    except FileNotFoundError:
        return (1 if os.path.lexists(state_dir / MARKER_NAME) else 0), 0  # a dangling link is no marker
    except (OSError, ValueError, IndexError):
        return 1, 0
