"""The crash-loop guard: a ``starting`` marker that counts starts whose process died before READY or within ten seconds of it.

A store that kills its reader (a bad sector under the map is SIGBUS, not an exception) must not kill it for ever: after two such starts the store
generation is set aside unread, after three the pins are not computed again either. A start that is refused, or fails by an exception, has
not died: it takes its count back. But one whose executor raised while it computed what it had to bring back would do so again, for ever: such starts are
counted apart, and after two of them nothing is computed before READY. Where the marker can't be written (a full disk, a read-only one), the start goes on uncounted.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvd.observe.failpoints import declare
from kvd.wal.durable import read_regular, remove_any, remove_file, replace_file

declare("store.marker.before_sync", "store.marker.before_rename", "store.marker.after_rename")

MARKER_NAME = "starting"
STABLE_AFTER_S = 10.0
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
            self.fault = f"the state directory can't be written: {error}"

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
            self._is_counted = False
            remove_file(self._path)
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
