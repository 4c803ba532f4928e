"""Putting bytes on disk so that they are either wholly there after a power cut or not at all.

A file is written under a temporary name, synced, renamed, and then its directory is synced: without the last step the rename itself may be lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from io import BufferedReader
from pathlib import Path

from kvd.observe.failpoints import failpoint


def sync_directory(directory: Path) -> None:
    """Make renames, creations and unlinks in ``directory`` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make the folder ``path``, and those above it that are missing, for its owner alone and under names that survive a power cut.

    Also one that is there is synced by name: whoever made it may have died before that. A parent that this user may not open is somebody else's to sync.
    """
    if not path.parent.is_dir():
        make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):
        sync_directory(path.parent)


def keep_private(directory: Path) -> None:
    """Take every right over ``directory`` from others than its owner; where it is somebody else's that is theirs to do."""
    mode = directory.stat().st_mode
    if mode & 0o077:
        with contextlib.suppress(OSError):
            directory.chmod(mode & 0o700)


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """``pwrite`` until all of ``data`` is written."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def write_private(path: Path, data: bytes) -> None:
    """A new file that is its owner's alone, whatever the umask says; not durable by itself.

    Raises:
        OSError: something has that name, or it could not be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, data, 0)
    finally:
        os.close(fd)


def open_regular(path: Path) -> BufferedReader:
    """A regular file for reading. Never waits: a fifo that took a file's place would hold up an ordinary open for ever.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(fd, "rb")  # noqa: PTH123 (a descriptor)


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file, as ``open_regular``.

    Raises:
        OSError: it can't be read, or is no regular file.
    """
    with open_regular(path) as file:
        return file.read()


def remove_any(path: Path) -> None:
    """Unlink ``path``, be it a folder or nothing at all; not durable by itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def erase(path: Path) -> None:
    """Remove what ``path`` and everything below it hold: a file that can't be unlinked is emptied, durably. Otherwise not durable by itself.

    Raises:
        OSError: some of it is still there.
    """
    if path.is_dir() and not path.is_symlink():
        for each in list(path.iterdir()):
            erase(each)
        with contextlib.suppress(OSError):  # one in which an emptied file had to stay
            path.rmdir()
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_file(path: Path, data: bytes, *, points: tuple[str, str, str]) -> None:
    """Replace ``path`` by ``data`` durably. ``points`` are the failpoints before the sync, before the rename and before the directory's sync.

    Raises:
        OSError: nothing changed, or the new content stands but its name may not survive a power cut.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    remove_any(temporary)  # never again the file of an attempt whose sync failed
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            write_all(fd, data, 0)
            failpoint(points[0])
            os.fsync(fd)
        finally:
            os.close(fd)
        failpoint(points[1])
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk others can use its room
        raise
    failpoint(points[2])
    sync_directory(path.parent)


def remove_file(path: Path) -> None:
    """Unlink ``path``, if it is there, durably."""
    remove_any(path)
    sync_directory(path.parent)
