"""Store generations: ``kv/<n>/data.mdb``, and ``kv/CURRENT`` that names the one in use and the store's identity.

A generation comes into being under a temporary name, is synced and renamed; then CURRENT is replaced by rename. Whatever a crash leaves
between is swept at the next start. A generation that must not be used any more is renamed to ``<n>.aside``; one such is kept, if it is small enough, for people
to look at. No generation is begun while others than the one it follows, and that one aside, are there: two full ones would be twice the budget.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from crc32c import crc32c

from kvd.observe.failpoints import declare, failpoint
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.errors import StoreBlockedError, StoreDamagedError, StoreFullError
from kvd.storage.schema import FORMAT_VERSION, StoreMeta, check_format
from kvd.storage.store import DATA_NAME, Store
from kvd.wal.disk_faults import disk_bytes, is_passing
from kvd.wal.durable import erase, read_regular, remove_any, replace_file, sync_directory
from kvd.wal.quarantine import QUARANTINE_NAME, discard, make_folder

declare(
    "store.create.before_rename",
    "store.create.after_rename",
    "store.current.before_sync",
    "store.current.before_rename",
    "store.current.after_rename",
    "store.aside.before_rename",
    "store.aside.after_rename",
)

STORE_NAME = "kv"
CURRENT_NAME = "CURRENT"
_CURRENT = re.compile(r"^kvd-store (\d+) (\d+) ([0-9a-f]{32}) ([0-9a-f]{8})\n$")
_POINTS = ("store.current.before_sync", "store.current.before_rename", "store.current.after_rename")


@dataclass(frozen=True, slots=True)
class Current:
    """What CURRENT says."""

    generation: int
    store_uuid: bytes


def encode_current(current: Current, codec: Codec = PLAIN) -> bytes:
    body = f"kvd-store {codec.format_of(FORMAT_VERSION)} {current.generation} {current.store_uuid.hex()}"
    return f"{body} {crc32c(body.encode()):08x}\n".encode()


def read_current(state_dir: Path, codec: Codec = PLAIN) -> Current | None:
    """CURRENT's content; None without the file.

    Raises:
        StoreDamagedError: it does not parse or its checksum does not match.
        UnknownFormatError: it is whole and of another format.
        OSError: it can't be read for a reason that says nothing about it (no descriptors).
    """
    path = state_dir / STORE_NAME / CURRENT_NAME
    try:
        text = read_regular(path).decode("ascii", "replace")
    except OSError as error:
        if not os.path.lexists(path):
            return None
        if is_passing(error):
            raise
        raise StoreDamagedError(f"{path} can't be read: {error}") from error
    match = _CURRENT.match(text)
    if match is None or int(match[4], 16) != crc32c(text.rsplit(" ", 1)[0].encode()):
        raise StoreDamagedError(f"{path} is damaged")
    check_format(f"{path}: a store", int(match[1]), codec.format_of(FORMAT_VERSION))
    return Current(int(match[2]), bytes.fromhex(match[3]))


class Generations:
    """The state directory's generations. Used by one thread at a time; the state lock is held.

    ``max_aside_bytes`` bounds a generation that is kept aside, ``max_quarantine_bytes`` the quarantine folder. ``damage`` collects, as sentences, what was found wrong. Where nothing can be written
    (a full disk), what can't be done is left and shows when a generation is opened.
    """

    def __init__(
        self, state_dir: Path, *, map_bytes: int, max_aside_bytes: int, max_quarantine_bytes: int = 0, codec: Codec = PLAIN
    ) -> None:
        self.codec = codec
        self._state_dir = state_dir
        self._root = state_dir / STORE_NAME
        self._map_bytes = map_bytes
        self._max_aside_bytes = max_aside_bytes
        self.damage: list[str] = []
        if note := make_folder(self._root, state_dir / QUARANTINE_NAME, max_quarantine_bytes):
            self.damage.append(note)
        try:
            current = read_current(state_dir, codec)
        except StoreDamagedError as error:
            self.damage.append(str(error))
            current = None
            discard(self._root / CURRENT_NAME, state_dir / QUARANTINE_NAME, max_quarantine_bytes)
        self._is_new = current is None
        if current is None and not self.damage and self._highest():
            self.damage.append(f"{self._root / CURRENT_NAME} is missing")
        self.current = current or Current(self._highest(), os.urandom(16))
        self._sweep()
        self._bound_aside()

    @property
    def has_current(self) -> bool:
        """Whether the generation that CURRENT names is there."""
        return not self._is_new and self._directory().is_dir()

    def open(self, now_unix_s: int) -> Store:
        """Open the current generation, for reading alone where it can't be written; a fresh one if there is none that may be used.

        Raises:
            UnknownFormatError: the generation is of another format.
            StoreBlockedError, StoreDamagedError, OSError: not even a fresh one can be made.
        """
        directory = self._directory()
        if not self.has_current:
            if os.path.lexists(directory) and not self._is_new:
                self.damage.append(f"{directory} is no folder")
            return self.create_fresh(now_unix_s)
        try:
            store = self._open_current()
        except StoreDamagedError as error:
            self.damage.append(str(error))
            self.set_aside()
            return self.create_fresh(now_unix_s)
        return store

    def reopen(self) -> Store:
        """Open the current generation once more after it was closed, for reading alone where it can't be written yet.

        Raises:
            StoreBlockedError: not even that; it may be tried again.
            StoreDamagedError, UnknownFormatError: it must not be used.
        """
        store = self._open_current()
        if store.file_bytes > self._map_bytes:
            store.close()
            raise StoreDamagedError(f"the store is larger than its part of store_max_bytes ({store.file_bytes} of {self._map_bytes} bytes)")
        return store

    def create_fresh(self, now_unix_s: int) -> Store:
        """Make and open the next generation, empty, under the same identity. The current one, closed or never opened, is set aside.

        Raises:
            StoreBlockedError, StoreDamagedError, OSError: it can't be made. The next try begins anew.
        """
        self.set_aside()
        self._remove_others()
        generation = max(self._highest(), self.current.generation) + 1
        if self._is_new and not self.damage:
            self._point_to(generation)  # first: a first generation that a crash leaves alone would look like one whose CURRENT was lost
        try:
            temporary = self._created(generation, now_unix_s)
        except StoreFullError:
            self._remove_aside()  # what is kept for people to look at yields to what serves
            temporary = self._created(generation, now_unix_s)
        self._adopt(temporary, generation)
        return self._open_current()

    def rebuilt(self, old: Store, fill: Callable[[Store], None], now_unix_s: int) -> Store:
        """Put a new generation in the place of ``old``, the open current one, which is closed and removed; ``fill`` writes what it is to hold.

        The identity stays, and the log's records are applied as far as they were. While ``fill`` runs both are on disk.

        Raises:
            StoreBlockedError, StoreDamagedError, OSError: ``old`` stands and is still open.
            Exception: of ``fill``; likewise.
        """
        self._remove_aside()
        generation = max(self._highest(), self.current.generation) + 1
        temporary = self._created(generation, now_unix_s, old.meta.applied_lsn)
        try:
            store = Store(temporary, self._map_bytes, codec=self.codec, verify=False)
            try:
                fill(store)
            finally:
                store.close()
            replaced = self._directory()
            self._adopt(temporary, generation)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        old.close()
        shutil.rmtree(replaced, ignore_errors=True)
        return self._open_current()

    def rewritten(self, old: Store, commit_bytes: int, now_unix_s: int) -> Store | None:
        """All of ``old``'s rows in a new generation in its place, as ``rebuilt``; None where there is no room for both: ``old`` stands."""
        needed = old.used_bytes
        if old.file_bytes + needed > self._map_bytes + self._max_aside_bytes or not old.disk_has_room(needed):
            return None
        try:
            return self.rebuilt(old, lambda fresh: old.copy_rows(fresh, commit_bytes), now_unix_s)
        except StoreFullError:
            return None

    def replaced_by_empty(self, old: Store | None, now_unix_s: int) -> Store:
        """An empty generation in the place of ``old`` (None: it is not open), which is closed and removed.

        Raises:
            StoreBlockedError, StoreDamagedError, OSError: there is none yet.
        """
        if old is not None:
            old.close()
        self.set_aside()
        self._remove_aside()  # first: on a full disk the new one has no other room
        return self.create_fresh(now_unix_s)

    def erase_others(self, *, keep_current: bool) -> None:
        """Leave nothing of generations but the current one: folders that are replaced, set aside or unfinished.

        Raises:
            OSError: some of it is still there.
        """
        for path in list(self._root.iterdir()):
            is_current = keep_current and path == self._directory()
            if not is_current and (path.name.isdecimal() or path.name.startswith(".") or path.suffix == ".aside"):
                erase(path)
        sync_directory(self._root)  # a power cut would bring them back

    def set_aside(self) -> None:
        """Take the current generation, closed or never opened, out of use.

        Raises:
            OSError: it is where it was.
        """
        directory = self._directory()
        if not os.path.lexists(directory):
            return
        self._remove_aside()
        failpoint("store.aside.before_rename")
        aside = directory.with_name(f"{directory.name}.aside")
        directory.rename(aside)
        failpoint("store.aside.after_rename")
        sync_directory(self._root)
        self._bound_aside()

    # -------------------------------------------------------------------------------- within

    def _remove_aside(self) -> None:
        for old in self._root.glob("*.aside"):
            shutil.rmtree(old, ignore_errors=True)

    def _bound_aside(self) -> None:
        if sum(disk_bytes(path) for path in self._root.glob("*.aside")) > self._max_aside_bytes:
            self._remove_aside()

    def _remove_others(self) -> None:
        """Every generation that has a number: the one that follows is all that counts."""
        for path in self._entries():
            if path.name.isdecimal():
                remove_any(path)

    def _directory(self) -> Path:
        return self._root / str(self.current.generation)

    def _open_current(self) -> Store:
        try:
            store = Store(self._directory(), self._map_bytes, codec=self.codec)
        except StoreBlockedError as error:
            store = Store(self._directory(), self._map_bytes, codec=self.codec, readonly=True, lock=False)
            store.blocked_by = str(error)
        if store.meta.store_uuid != self.current.store_uuid:
            store.close()
            raise StoreDamagedError(f"{self._directory()} belongs to another store than {CURRENT_NAME} names")
        return store

    def _created(self, generation: int, now_unix_s: int, applied_lsn: int = 0) -> Path:
        """An empty generation under a temporary name."""
        temporary = self._root / f".{generation}.tmp"
        remove_any(temporary)
        try:
            temporary.mkdir(mode=0o700, parents=True)
            meta = StoreMeta(self.current.store_uuid, generation, applied_lsn, now_unix_s, clean=False)
            Store.create(temporary, self._map_bytes, meta, self.codec)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return temporary

    def _adopt(self, temporary: Path, generation: int) -> None:
        data = os.open(temporary / DATA_NAME, os.O_RDONLY)
        try:
            os.fsync(data)
        finally:
            os.close(data)
        sync_directory(temporary)
        failpoint("store.create.before_rename")
        adopted = self._root / str(generation)
        temporary.rename(adopted)
        try:
            failpoint("store.create.after_rename")
            sync_directory(self._root)
            self._point_to(generation)
        except OSError:
            with contextlib.suppress(StoreDamagedError, OSError):
                found = read_current(self._state_dir, self.codec)
                if found is None or found.generation != generation:  # the one before goes on: this would be a second full one beside it
                    shutil.rmtree(adopted, ignore_errors=True)
                else:
                    self.current = found
            raise

    def _point_to(self, generation: int) -> None:
        current = replace(self.current, generation=generation)
        replace_file(self._root / CURRENT_NAME, encode_current(current, self.codec), points=_POINTS)
        self.current = current
        self._is_new = False

    def _highest(self) -> int:
        return max((int(path.name) for path in self._entries() if path.name.isdecimal()), default=0)

    def _entries(self) -> list[Path]:
        try:
            return list(self._root.iterdir())
        except OSError:
            return []

    def _sweep(self) -> None:
        """Remove what a crash left: temporary folders, and generations that CURRENT does not name."""
        for path in self._entries():
            is_leftover = path.name.startswith(".") or (
                path.name.isdecimal() and int(path.name) != self.current.generation and not self._is_new
            )
            if is_leftover:
                with contextlib.suppress(OSError):
                    remove_any(path)
