"""Reading a state directory that a daemon may be writing: files are replaced under the reader, and what it then finds is no damage.

Whatever fails while CURRENT, the keys, the oldest segment of the log or the lock's holder have changed is read again; after a few tries the answer is that the daemon is too busy.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvd.storage.errors import StateLockedError, StorageError, StoreBusyError, StoreMovedError
from kvd.storage.generations import CURRENT_NAME, STORE_NAME
from kvd.storage.keys_file import KEYS_NAME
from kvd.storage.lock import is_locked
from kvd.storage.recovery import WAL_NAME
from kvd.wal.durable import read_regular

TRIES = 5
_PAUSE_S = 0.05

T = TypeVar("T")


def read_steadily(state_dir: Path, attempt: Callable[[], T], is_bad: Callable[[T], bool] = lambda _: False) -> T:
    """What ``attempt``, which opens everything anew, gives; it is repeated if it fails, or gives what ``is_bad``, while a daemon moved on.

    Raises:
        StoreBusyError: the daemon was quicker each time.
        StorageError, OSError: of an attempt during which nothing changed.
    """
    for number in range(TRIES):
        before = _state_of(state_dir)
        try:
            result = attempt()
        except StateLockedError:
            raise
        except (StorageError, OSError) as error:
            if not isinstance(error, StoreMovedError) and _state_of(state_dir) == before:
                raise
        else:
            if not is_bad(result) or _state_of(state_dir) == before:
                return result
        time.sleep(_PAUSE_S * (number + 1))
    raise StoreBusyError(f"the daemon that uses {state_dir} changes it faster than it can be read; try again, or stop the daemon")


def _state_of(state_dir: Path) -> tuple[bytes, tuple[str, ...], bool]:
    """What changes whenever a reader's view of the directory may have come to an end."""
    current = b""
    names: list[str] = []
    segments: list[str] = []
    is_held = False
    with contextlib.suppress(OSError):
        current = read_regular(state_dir / STORE_NAME / CURRENT_NAME)
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(state_dir / KEYS_NAME))  # noqa: PTH208 (names)
    with contextlib.suppress(OSError):
        segments = sorted(os.listdir(state_dir / WAL_NAME))[:1]  # noqa: PTH208 (names)
    with contextlib.suppress(OSError):
        is_held = is_locked(state_dir)
    return current, (*names, *segments), is_held
