"""The quarantine folder: what is damaged and not ours to delete is moved there for people to look at. It is bounded, oldest first out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvd.wal.disk_faults import disk_bytes
from kvd.wal.durable import make_directory, remove_any, sync_directory, write_private

QUARANTINE_NAME = "quarantine"


def set_aside(path: Path, quarantine: Path, max_bytes: int) -> None:
    """Move ``path``, whatever it is (a fifo, a folder, a dangling link are moved as they are), out of the way.

    Raises:
        OSError: it is still where it was.
    """
    make_directory(quarantine)
    path.rename(_free_name(quarantine, path.name))
    sync_directory(quarantine)
    sync_directory(path.parent)
    bound(quarantine, max_bytes)


def discard(path: Path, quarantine: Path, max_bytes: int) -> str:
    """``set_aside``, or where that is not possible (a full disk) remove; empty, or why neither was."""
    try:
        set_aside(path, quarantine, max_bytes)
    except OSError as error:
        with contextlib.suppress(OSError):
            remove_any(path)
        return str(error) if os.path.lexists(path) else ""
    return ""


def make_folder(path: Path, quarantine: Path, max_bytes: int) -> str:
    """Make the folder ``path``, and set aside what else stands there; empty, or a sentence on what was wrong."""
    note = ""
    if os.path.lexists(path) and not path.is_dir():
        note = f"{path} is no folder; set aside"
        discard(path, quarantine, max_bytes)
    try:
        make_directory(path)
    except OSError as error:
        note = f"{path} can't be made: {error}"
    return note


def keep_piece(name: str, data: bytes, quarantine: Path, max_bytes: int) -> None:
    """Keep a copy of ``data``, which is about to be cut off, as far as the folder's bound allows one: its beginning.

    Raises:
        OSError: it could not be written; nothing of it is left.
    """
    data = data[:max_bytes]
    make_directory(quarantine)
    bound(quarantine, max_bytes - len(data))
    path = _free_name(quarantine, name)
    try:
        write_private(path, data)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    bound(quarantine, max_bytes)


def _free_name(directory: Path, name: str) -> Path:
    path, copy = directory / name, 1
    while os.path.lexists(path):
        path, copy = directory / f"{name}.{copy}", copy + 1
    return path


def bound(quarantine: Path, max_bytes: int) -> None:
    """Remove what has lain there longest until the rest takes ``max_bytes`` of disk at most, folders and all that is in them counted."""
    if not quarantine.is_dir():
        return
    entries = sorted((path.lstat().st_ctime_ns, path.name, disk_bytes(path), path) for path in quarantine.iterdir())
    excess = sum(size for _, _, size, _ in entries) - max_bytes
    for _, _, size, path in entries:
        if excess <= 0:
            break
        remove_any(path)
        excess -= size
