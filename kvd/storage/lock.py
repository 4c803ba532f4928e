"""One writer: an advisory lock on ``lock`` in the state directory, with the holder's pid for people to read.

The kernel drops the lock with its holder, however that ended. The file stays: unlinking it would let two processes hold two files of one name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from kvd.storage.errors import StateLockedError

LOCK_NAME = "lock"

_PATIENCE_S = 0.2
_POLL_S = 0.005


class StateLock:
    """Held from construction to ``release``. A tool that looks whether it is held takes it for an instant: that is waited for.

    Raises:
        StateLockedError: another process holds it.
        OSError: the file can't be made. On a disk that has become read-only, or is full, an existing one is taken.
    """

    def __init__(self, state_dir: Path) -> None:
        path = state_dir / LOCK_NAME
        self._fd = _open(path)
        if not _taken(self._fd):
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StateLockedError(f"{state_dir} is in use by process {holder}; one daemon per state directory")
        with contextlib.suppress(OSError):  # the pid is for people
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def _taken(fd: int) -> bool:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        try:
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise error from None


def is_locked(state_dir: Path) -> bool:
    """Whether a process holds the state directory at this moment (for tools). It takes a shared lock for an instant, which a daemon that starts just then waits
    for: the kernel has no other way to ask that sees processes of every container.
    """
    try:
        fd = os.open(state_dir / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
