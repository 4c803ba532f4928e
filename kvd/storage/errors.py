"""The storage room's named errors.

Only ``StateLockedError``, ``StateDirError``, ``DiskFaultError``, ``UnknownFormatError``, ``RecipesUnreadableError`` and ``EncryptionKeyError`` stop a start.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DISK_FAULTS = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class StorageError(Exception):
    """The storage room's base error."""


class StateLockedError(StorageError):
    """Another process holds the state directory; the message names it."""


class StateDirError(StorageError):
    """The path of the state directory is not one that can be made, read and written; the message names the key."""


class DiskFaultError(StorageError):
    """The state directory is the right one, but its disk fails, is full or is read-only: another start may succeed with the same configuration."""


class UnknownFormatError(StorageError):
    """A file of a format that this version does not know. It is neither read on nor overwritten."""


class RecipesUnreadableError(StorageError):
    """Neither generation of the recipes can be read: going on would lose acknowledged pins."""


class EncryptionKeyError(StorageError):
    """The key file can't be used, is not the right one, or is missing (or given) where the state directory is (or is not) encrypted. Nothing was touched."""


class KeysUnreadableError(EncryptionKeyError):
    """Neither file of the encryption keys can be read: going on would lose acknowledged pins."""


class StorageClosedError(StorageError):
    """The start goes on though the storage was closed: nobody waits for what it does."""


class NamespaceGoneError(StorageError):
    """Something of a namespace that has left the index, and was not encrypted before it did: nobody will ask for it."""


class StoreDamagedError(StorageError):
    """A store generation that must not be opened or read any further; it is set aside."""


class StorePanickedError(StoreDamagedError):
    """lmdb refuses everything after a failed write of its meta page; the file is as it was committed and may be opened again if nothing else failed."""


class StoreBlockedError(StorageError):
    """Nothing can be written or opened at the moment: a full or read-only disk, no descriptors. The generation is as of its last commit; nothing is wrong with it."""


class StoreMovedError(StoreBlockedError):
    """The daemon that writes the store has gone on too far for the view of a reader beside it: opened again it can be read."""


class StoreBusyError(StorageError):
    """A daemon changes the state directory faster than a tool beside it can read; nothing is known to be wrong with it."""


class StoreFullError(StoreBlockedError):
    """The disk or the map is full."""


class StoreMapFullError(StoreFullError):
    """The map, that is the store's own budget, is full; the disk is not."""


@contextmanager
def state_dir_errors(state_dir: Path) -> Iterator[None]:
    """Around what a start does with its state directory.

    Raises:
        DiskFaultError, StateDirError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        place = "" if error.filename is None or Path(error.filename) == state_dir else f" at {error.filename}"
        kind, what = (DiskFaultError, "its disk fails") if error.errno in _DISK_FAULTS else (StateDirError, "can't be used")
        raise kind(f"state_dir = {state_dir}: {what}: {error.strerror or error}{place}") from error
