"""A small state that is data: it stands in two files of consecutive numbers, so that one damaged file costs nothing.

A change writes it twice, to the two numbers after the newest; when both are durable the older files are removed. So at each moment a whole file holds the old or
the new state, and what was acknowledged stands in two files and in no older one. A write that fails takes back what it got done; its numbers are used up, for a file
whose sync failed is never synced again.

Between two such changes the state may also stand in ``<folder>.unsynced``, written and renamed without a sync: the death of the process leaves it whole, a power cut
may leave anything of it. It counts if it is whole and newer than the others, and is no damage if it is not.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from kvd.observe.failpoints import failpoint
from kvd.storage.errors import EncryptionKeyError, UnknownFormatError
from kvd.wal.durable import make_directory, read_regular, remove_any, replace_file, sync_directory, write_private
from kvd.wal.quarantine import QUARANTINE_NAME, set_aside

COPIES = 2
_QUARANTINE_MAX_BYTES = 64 << 20

T = TypeVar("T")


class CopyDamagedError(Exception):
    """A file that is damaged."""


@dataclass(frozen=True, slots=True)
class DamagedCopy:
    """A file that can't be used, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What was found: the state of the newest readable file (None: there is none), its number, and the damaged files.

    ``highest`` is the highest number in use, ``num_files`` the number of files, ``num_copies`` of those that hold ``value``.
    """

    value: T | None
    generation: int
    highest: int
    num_files: int
    num_copies: int
    damaged: tuple[DamagedCopy, ...]

    @property
    def is_settled(self) -> bool:
        """Whether there are exactly the copies that an acknowledged change leaves."""
        return self.num_files == self.num_copies and self.num_copies in {0, COPIES}


def copy_points(name: str) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """The failpoints of writing the first and the second file."""
    first, second = (tuple(f"{name}.{part}{each}" for each in ("before_sync", "before_rename", "after_rename")) for part in ("", "copy."))
    return (first[0], first[1], first[2]), (second[0], second[1], second[2])


class TwoCopies:
    """The files ``<state_dir>/<folder>/<folder>.<n>``. Used by one thread at a time; reading beside a live daemon is fine.

    ``remove`` takes an old file away; the directory is synced afterwards. ``keep_damaged``: damaged files go to quarantine, else they are removed as old ones are.
    """

    def __init__(self, state_dir: Path, folder: str, *, remove: Callable[[Path], None] = remove_any, keep_damaged: bool = True) -> None:
        self._state_dir = state_dir
        self._folder = folder
        self._name = re.compile(rf"^{folder}\.(\d+)$")
        self._remove = remove
        self._keep_damaged = keep_damaged
        self.directory = state_dir / folder
        self._unsynced = self.directory / f"{folder}.unsynced"

    def path(self, generation: int) -> Path:
        return self.directory / f"{self._folder}.{generation}"

    def files(self) -> list[tuple[int, Path]]:
        """The (generation, path) of everything under such a name, newest first.

        Raises:
            OSError: the directory can't be listed.
        """
        if not os.path.lexists(self.directory):
            return []
        paths = list(self.directory.iterdir())
        return sorted(((int(match[1]), path) for path in paths if (match := self._name.match(path.name))), reverse=True)

    def read(self, decode: Callable[[int, bytes], T]) -> Found[T]:
        """The newest readable file's state. ``decode`` gets a file's number and bytes and raises ``CopyDamagedError``.

        Raises:
            UnknownFormatError, EncryptionKeyError: what ``decode`` says of the newest whole file.
            OSError: the directory can't be listed.
        """
        files = self.files()
        newest: T | None = None
        generation = num_copies = 0
        damaged: list[DamagedCopy] = []
        for number, path in files:
            try:
                value = decode(number, read_regular(path))
            except (CopyDamagedError, OSError) as error:
                if not os.path.lexists(path):
                    return self.read(decode)  # a live daemon has written newer ones meanwhile
                damaged.append(DamagedCopy(path, str(error)))
                continue
            except (UnknownFormatError, EncryptionKeyError) as error:
                if newest is None:
                    raise
                damaged.append(DamagedCopy(path, str(error)))
                continue
            if newest is None:
                newest, generation = value, number
            num_copies += value == newest
        return Found(newest, generation, files[0][0] if files else 0, len(files), num_copies, tuple(damaged))

    def write_unsynced(self, data: bytes) -> None:
        """Put ``data``, which says its generation, in the place of the unsynced file.

        Raises:
            OSError: the one before stands.
        """
        self.directory.mkdir(mode=0o700, exist_ok=True)
        temporary = self._unsynced.with_name(f".{self._unsynced.name}.tmp")
        remove_any(temporary)
        try:
            write_private(temporary, data)
            temporary.replace(self._unsynced)
        except OSError:
            with contextlib.suppress(OSError):
                self._remove(temporary)
            raise

    def read_unsynced(self, found: Found[T], decode: Callable[[bytes], tuple[int, T]]) -> Found[T]:
        """``found``, or what the unsynced file holds if that is newer. ``decode`` gives its generation and state, and raises ``CopyDamagedError``.

        Raises:
            UnknownFormatError: it is whole and of another format.
        """
        if not os.path.lexists(self._unsynced):
            return found
        is_to_go = replace(found, num_files=found.num_files + 1)  # not settled
        try:
            generation, value = decode(read_regular(self._unsynced))
        except (CopyDamagedError, OSError):
            return is_to_go
        if generation <= found.highest:
            return is_to_go
        return replace(found, value=value, generation=generation, highest=generation, num_files=found.num_files + 1, num_copies=1)

    def write(self, first: int, encode: Callable[[int], bytes]) -> None:
        """Write the state to the generations ``first`` and the next, both durable on return. ``encode`` makes a generation's bytes.

        Raises:
            OSError: it could not be written; what was, is taken back as far as possible.
            Exception: it can't be encoded; nothing was touched.
        """
        contents = [encode(first + copy) for copy in range(COPIES)]
        make_directory(self.directory)
        try:
            for copy, data in enumerate(contents):
                replace_file(self.path(first + copy), data, points=copy_points(self._folder)[copy])
        except OSError:
            with contextlib.suppress(OSError):
                for copy in range(COPIES):
                    self.path(first + copy).unlink(missing_ok=True)
                sync_directory(self.directory)
            raise

    def restore(self, found: Found[T], encode: Callable[[int], bytes]) -> int:
        """Make two files of what was found, and put damaged ones into quarantine; the number of the newest file.

        Raises:
            OSError: it could not be done; what was readable still is.
        """
        if found.is_settled:
            with contextlib.suppress(OSError):  # the next change tries again, and says so
                self._remove_unfinished()
            return found.highest
        first = found.highest + 1
        self.write(first, encode)
        for damaged in found.damaged if self._keep_damaged else ():
            failpoint(f"{self._folder}.restore.before_quarantine")
            set_aside(damaged.path, self._state_dir / QUARANTINE_NAME, _QUARANTINE_MAX_BYTES)
        self.remove_before(first)
        return first + COPIES - 1

    def remove_before(self, first: int) -> None:
        """Remove every file but ``first`` and the next, the unsynced one and unfinished ones too, durably."""
        failpoint(f"{self._folder}.before_unlink")
        for number, path in self.files():
            if not first <= number < first + COPIES:
                self._remove(path)
        if os.path.lexists(self._unsynced):
            self._remove(self._unsynced)
        self._remove_unfinished()
        sync_directory(self.directory)

    def _remove_unfinished(self) -> None:
        """What a crash or a refusing disk left of files that never got their name; they hold what any other does."""
        for path in self.directory.glob(f".{self._folder}.*.tmp"):
            self._remove(path)
