"""The crash-loop guard: a ``starting`` marker that counts starts which died before READY or within a minute of it.

A store that kills its reader (a bad sector under the map is SIGBUS, not an exception) must not kill it for ever: after two such starts the store
generation is set aside unread, after three the pins are not computed again either.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvd.observe.failpoints import declare
from kvd.wal.durable import remove_file, replace_file

declare("store.marker.before_sync", "store.marker.before_rename", "store.marker.after_rename")

MARKER_NAME = "starting"
STABLE_AFTER_S = 60.0
SET_ASIDE_AT = 2
NO_PINS_AT = 3
_POINTS = ("store.marker.before_sync", "store.marker.before_rename", "store.marker.after_rename")


class StartGuard:
    """``failed_starts`` is the count found; this start is counted from construction to ``clear``."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / MARKER_NAME
        self.failed_starts = read_failed_starts(state_dir)
        replace_file(self._path, f"{self.failed_starts + 1} {os.getpid()}\n".encode(), points=_POINTS)

    @property
    def set_store_aside(self) -> bool:
        return self.failed_starts >= SET_ASIDE_AT

    @property
    def skip_pins(self) -> bool:
        return self.failed_starts >= NO_PINS_AT

    def clear(self) -> None:
        """The start went well, or the daemon ends cleanly."""
        remove_file(self._path)


def read_failed_starts(state_dir: Path) -> int:
    """The count in the marker; 0 without one; an unreadable marker counts as one failed start."""
    try:
        return max(0, int((state_dir / MARKER_NAME).read_bytes().split()[0]))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, IndexError):
        return 1
