"""One store generation: an LMDB environment, its transactions, and what its errors mean.

What lmdb leaves to its users is done here: the file's size is checked against its meta pages before anything is mapped (reading behind the end of a truncated
map is SIGBUS), every value carries its own checksum, no view of the map outlives its transaction, and the file is opened once per process.
"""

from __future__ import annotations

import errno
import math
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify

from kvd.cache.hashing import Namespace
from kvd.observe.failpoints import declare, failpoint
from kvd.storage import schema
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.errors import (
    StorageError,
    StoreBlockedError,
    StoreDamagedError,
    StoreFullError,
    StoreMapFullError,
    StoreMovedError,
    StorePanickedError,
)
from kvd.storage.schema import BadRowError, NodeRow, StoreMeta
from kvd.types import BlockHash
from kvd.wal.disk_faults import disk_bytes, errno_of, fault_sentence, is_passing
from kvd.wal.durable import open_regular

declare("store.before_put", "store.before_commit", "store.after_commit")

DATA_NAME = "data.mdb"
_META_PAGE = struct.Struct("<16xII8x8xI44x48xQQ")
"""Of an LMDB 0.9 meta page: magic, data version, page size (kept in the free list's record), last page number, transaction number."""
_LMDB_MAGIC = 0xBEEFC0DE
_LMDB_DATA_VERSION = 1
_SHRINK_ROOM_BYTES = 1 << 20
_SPARE_DISK_BYTES = 1 << 20
_LOCK_FILE_BYTES = 8192
"""Of lmdb's default 126 readers."""
_CLOSE_POLL_S = 0.001
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def check_data_file(path: Path) -> int:
    """Whether ``data.mdb`` may be mapped at all; reads its two meta pages only. The size that it must have to be mapped, which may be more than it has.

    Raises:
        StoreDamagedError: it is missing, cut within a page or no LMDB 0.9 file.
        StoreBlockedError: it can't be opened at the moment.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(_META_PAGE.size)
            metas = [_meta_page(path, first)]
            file.seek(metas[0][0])
            metas.append(_meta_page(path, file.read(_META_PAGE.size)))
    except OSError as error:
        kind = StoreBlockedError if is_passing(error) else StoreDamagedError
        raise kind(f"{fault_sentence(error)}: {path} can't be read") from error
    if metas[0][0] != metas[1][0]:
        raise StoreDamagedError(f"{path}: its two meta pages disagree on the page size")
    needed = max((last_page + 1) * page_bytes for page_bytes, last_page, _ in metas)
    if size < needed and size % metas[0][0]:
        raise StoreDamagedError(f"{path} ends within a page: it was cut short")
    return max(size, needed)


def _meta_page(path: Path, data: bytes) -> tuple[int, int, int]:
    if len(data) < _META_PAGE.size:
        raise StoreDamagedError(f"{path} is cut short within its meta pages")
    magic, version, page_bytes, last_page, txn = _META_PAGE.unpack(data)
    if magic != _LMDB_MAGIC or version != _LMDB_DATA_VERSION or page_bytes not in {1 << bits for bits in range(9, 17)}:
        raise StoreDamagedError(f"{path} is no LMDB 0.9 data file")
    return page_bytes, last_page, txn


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what lmdb and the system raise into the things that matter: full, or blocked otherwise, or not to be trusted any more."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreMapFullError("map_full: the store's part of store_max_bytes is used up") from error
    except lmdb.MapResizedError as error:
        raise StoreMovedError("the store's file has outgrown this reader's map") from error
    except lmdb.PanicError as error:
        raise StorePanickedError(str(error)) from error
    except BadRowError as error:
        raise StoreDamagedError(f"the store's {error.reason} row is damaged") from error
    except (lmdb.Error, OSError) as error:
        kind: type[StorageError] = StoreDamagedError
        if is_passing(error):
            kind = StoreFullError if errno_of(error) in _FULL_ERRNOS else StoreBlockedError
        raise kind(fault_sentence(error)) from error


class Store:
    """An open generation. Reads may come from any thread, writes from one thread at a time.

    Args:
        directory: the generation's folder, with ``data.mdb``.
        map_bytes: the most that the file may grow to; never changed while open.
        codec: how its keys and values become bytes.
        readonly: nothing can be written.
        lock: False where no other process may be writing, and lmdb's lock file can't be.

    Raises:
        StoreDamagedError: it must not be used.
        StoreBlockedError: it can't be opened at the moment.
        UnknownFormatError: it is of another format.
    """

    def __init__(
        self, directory: Path, map_bytes: int, *, codec: Codec = PLAIN, readonly: bool = False, lock: bool = True, verify: bool = True
    ) -> None:
        self.codec = codec
        self.readonly = readonly
        self.blocked_by = ""
        """Why a start could open it for reading alone."""
        self._path = directory / DATA_NAME
        self._readers: list[int] = []
        """The thread of each read of blocks. Without a lock: a signal may end the start anywhere, and a lock that it left held would never be free again."""
        self._is_closing = False
        size = check_data_file(self._path)
        is_short = size > self._path.stat().st_size
        if is_short and readonly:
            raise self._cut_short()
        if verify or is_short:
            _verify(self._path)
        if is_short:
            with _translated():
                os.truncate(self._path, size)
        with _translated():
            if not readonly:
                _allocate_lock_file(directory)
            # meminit stays on: without it freed memory of this process, be it tokens or keys, goes to disk in the unused part of pages.
            self._env = lmdb.open(
                str(directory),
                # Above its budget it still needs a little room: removing things takes new pages first.
                map_size=map_bytes if size <= map_bytes else size + max(_SHRINK_ROOM_BYTES, size // 64),
                max_dbs=len(schema.DATABASES),
                lib_version=0,
                mode=0o600,
                readonly=readonly,
                lock=lock,
                create=False,
                readahead=not readonly,
            )
        try:
            with _translated():
                self._dbs = {name: self._env.open_db(name, create=False) for name in schema.DATABASES}
                self.meta = self._read_meta()
                if is_short:
                    self._check_last_pages()
        except (StorageError, OSError):
            self._env.close()
            raise

    @classmethod
    def create(cls, directory: Path, map_bytes: int, meta: StoreMeta, codec: Codec = PLAIN) -> None:
        """Make an empty generation in the empty folder ``directory`` and close it; the caller renames the folder into place.

        Raises:
            StoreBlockedError, StoreDamagedError: it could not be written.
        """
        with _translated():
            env = lmdb.open(str(directory), map_size=map_bytes, max_dbs=len(schema.DATABASES), lib_version=0, mode=0o600, lock=False)
            try:
                dbs = {name: env.open_db(name) for name in schema.DATABASES}
                with env.begin(write=True) as txn:
                    txn.put(schema.META_KEY, codec.pack_meta(meta), db=dbs[schema.DB_META])
                env.sync(True)
            finally:
                env.close()

    def close(self, timeout_s: float = math.inf) -> bool:
        """Let the map go as soon as no other thread reads blocks in it, which would be a segmentation fault; whether that was in time. If not, it stays."""
        self._is_closing = True
        end_s = time.monotonic() + timeout_s
        own = threading.get_ident()
        while any(reader != own for reader in list(self._readers)):
            if time.monotonic() >= end_s:
                return False
            time.sleep(_CLOSE_POLL_S)
        self._env.close()
        return True

    @property
    def file_bytes(self) -> int:
        """Size of the data file."""
        return self._path.stat().st_size

    @property
    def disk_bytes(self) -> int:
        """What the data file takes on disk: pages that were counted and never written are holes."""
        return disk_bytes(self._path)

    @property
    def used_bytes(self) -> int:
        """What of the file holds something; the rest are free pages, which later commits use."""
        with _translated(), self._env.begin() as txn:
            stats = [txn.stat(db) for db in self._dbs.values()]
        return sum(each["psize"] * (each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"]) for each in stats)

    # -------------------------------------------------------------------------------- reading

    def rows(self, database: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Every (key, value) of a small database, as copies, within one read transaction that ends with the iteration."""
        with _translated(), self._env.begin(db=self._dbs[database]) as txn:
            yield from txn.cursor()

    def row(self, database: bytes, key: bytes) -> bytes | None:
        """The value of one key of a small database, as a copy."""
        with _translated(), self._env.begin(db=self._dbs[database]) as txn:
            value = txn.get(key)
            return None if value is None else bytes(value)

    def has_block(self, group: str, block_hash: bytes) -> bool:
        """Whether it has bytes, without looking at them."""
        with _translated(), self._env.begin(db=self._dbs[schema.DB_BLOCKS], buffers=True) as txn:
            return txn.get(self.codec.block_key(group, block_hash)) is not None

    def block_keys(self) -> Iterator[bytes]:
        """The keys of all blocks, without touching the values."""
        with _translated(), self._env.begin(db=self._dbs[schema.DB_BLOCKS]) as txn:
            yield from txn.cursor().iternext(keys=True, values=False)

    def num_rows(self, database: bytes) -> int:
        with _translated(), self._env.begin(db=self._dbs[database]) as txn:
            return int(txn.stat(self._dbs[database])["entries"])

    @contextmanager
    def reading_blocks(self) -> Iterator[BlockReader]:
        """A read transaction over the blocks; keep it short, for it keeps freed pages from being used again, and ``close`` waits for it.

        Raises:
            StoreBlockedError: the store is closed, or about to be.
        """
        own = threading.get_ident()
        self._readers.append(own)
        try:
            if self._is_closing:  # asked after the entry was made, as ``close`` looks at the entries after it has set this
                raise StoreBlockedError("the store is closed")
            with _translated(), self._env.begin(db=self._dbs[schema.DB_BLOCKS], buffers=True) as txn:
                yield BlockReader(txn, self.codec)
        finally:
            self._readers.remove(own)

    def _check_last_pages(self) -> None:
        """A file that ended before its last page: if that page was counted and never written (``cover_last_page``), a power cut may have come before it was
        covered, and nothing is missing. The structure was verified up to the first page of each value; a value whose last page was cut off reads as zeros there.
        """
        with self._env.begin(db=self._dbs[schema.DB_BLOCKS], buffers=True) as txn:
            for value in txn.cursor().iternext(keys=False, values=True):
                if not any(memoryview(value)[-schema.PAGE_BYTES :]):
                    raise self._cut_short()

    def _cut_short(self) -> StoreDamagedError:
        return StoreDamagedError(f"{self._path} ends before its last page: it was cut short")

    def _read_meta(self) -> StoreMeta:
        with self._env.begin(db=self._dbs[schema.DB_META]) as txn:
            data = txn.get(schema.META_KEY)
        if data is None:
            raise BadRowError("meta")
        return self.codec.unpack_meta(data)

    def copy_rows(self, fresh: Store, commit_bytes: int) -> None:
        """Put every row into ``fresh``, under its tenant's present key, but the generation's own; nothing of what was deleted here is in the copy, not even in
        unused space, and nothing of what can't be opened.

        Raises:
            StoreBlockedError, StoreDamagedError: not all could be read or written.
        """
        for database in schema.DATABASES:
            if database == schema.DB_META:
                continue
            txn = fresh.begin()
            try:
                for key, value in self.rows(database):
                    try:
                        txn.put_row(database, key, self.codec.renewed(database, key, value))
                    except BadRowError:
                        continue
                    if txn.num_bytes >= commit_bytes:
                        txn.commit()
                        txn = fresh.begin()
                txn.commit()
            except BaseException:
                txn.abort()
                raise

    # -------------------------------------------------------------------------------- writing

    def begin(self) -> StoreTransaction:
        """A write transaction of this thread. It ends with ``commit`` or ``abort``.

        Raises:
            StoreBlockedError, StoreDamagedError: none can be begun.
        """
        with _translated():
            self._env.reader_check()  # a tool that was killed while reading would keep freed pages from being used again
            return StoreTransaction(self, self._env.begin(write=True), self._dbs)

    def disk_has_room(self, num_bytes: int) -> bool:
        """Whether the file system has ``num_bytes`` to spare, and a little besides."""
        free = os.statvfs(self._path)
        return free.f_bavail * free.f_frsize > num_bytes + _SPARE_DISK_BYTES

    def cover_last_page(self) -> None:
        """Let the file reach its last page number: a page that was allocated and freed in one transaction is counted but never written,
        and ``check_data_file`` would take the store for a cut one. By path: closing a descriptor of this file would drop lmdb's locks."""
        needed = (int(self._env.info()["last_pgno"]) + 1) * int(self._env.stat()["psize"])
        if self._path.stat().st_size < needed:
            os.truncate(self._path, needed)


class BlockReader:
    """Values of blocks, as views that end with their transaction."""

    __slots__ = ("_txn", "codec")

    def __init__(self, txn: Any, codec: Codec) -> None:
        self._txn = txn
        self.codec = codec

    def get(self, group: str, block_hash: bytes) -> memoryview | None:
        value = self._txn.get(self.codec.block_key(group, block_hash))
        return memoryview(value) if value is not None else None

    def items(self) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in self._txn.cursor():
            yield bytes(key), memoryview(value)


class StoreTransaction:
    """Changes that become durable together. Every method may raise ``StoreBlockedError`` or ``StoreDamagedError``; then ``abort``."""

    __slots__ = ("_codec", "_dbs", "_meta", "_store", "_txn", "num_bytes")

    def __init__(self, store: Store, txn: Any, dbs: dict[bytes, Any]) -> None:
        self._store = store
        self._codec = store.codec
        self._txn = txn
        self._dbs = dbs
        self._meta = store.meta
        self.num_bytes = 0

    def put_row(self, database: bytes, key: bytes, value: bytes | memoryview) -> None:
        """A row as another generation has it."""
        self._put(key, value, database)
        self.num_bytes += len(value)

    def put_namespace(self, namespace: Namespace) -> None:
        self._put(self._codec.namespace_key(namespace.root), self._codec.pack_namespace(namespace), schema.DB_NAMESPACES)

    def delete_namespace(self, root: bytes) -> None:
        self._delete(self._codec.namespace_key(root), schema.DB_NAMESPACES)

    def put_node(self, row: NodeRow) -> None:
        self._put(self._codec.node_key(row.block_hash), self._codec.pack_node(row), schema.DB_NODES)

    def delete_node(self, block_hash: bytes) -> None:
        self._delete(self._codec.node_key(block_hash), schema.DB_NODES)

    def put_pin(self, name: str, leaf: BlockHash) -> None:
        self._put(self._codec.pin_key(name), self._codec.pack_pin(name, leaf), schema.DB_PINS)

    def delete_pin(self, name: str) -> None:
        self._delete(self._codec.pin_key(name), schema.DB_PINS)

    def put_block(self, group: str, block_hash: bytes, value: memoryview) -> None:
        failpoint_translated("store.before_put")
        self._put(self._codec.block_key(group, block_hash), value, schema.DB_BLOCKS)
        self.num_bytes += len(value)

    def delete_block(self, group: str, block_hash: bytes) -> None:
        self._delete(self._codec.block_key(group, block_hash), schema.DB_BLOCKS)

    def delete_key(self, database: bytes, key: bytes) -> None:
        """Remove a row by the key under which it stands, whatever it may be."""
        self._delete(key, database)

    def put_meta(self, meta: StoreMeta) -> None:
        self._meta = meta
        self._put(schema.META_KEY, self._codec.pack_meta(meta), schema.DB_META)

    def commit(self) -> None:
        try:
            failpoint_translated("store.before_commit")
            with _translated():
                self._txn.commit()
                self._store.cover_last_page()
        except StoreDamagedError as error:
            if self._store.disk_has_room(2 * self.num_bytes):
                raise
            # lmdb reports the short write of a full disk as an I/O error. Nothing that was committed has been touched.
            raise StoreFullError(f"enospc: the disk is full ({error.__cause__ or error})") from error
        self._store.meta = self._meta
        failpoint_translated("store.after_commit")

    def abort(self) -> None:
        self._txn.abort()

    def _put(self, key: bytes, value: bytes | memoryview, database: bytes) -> None:
        with _translated():
            self._txn.put(key, value, db=self._dbs[database])

    def _delete(self, key: bytes, database: bytes) -> None:
        with _translated():
            self._txn.delete(key, db=self._dbs[database])


def failpoint_translated(name: str) -> None:
    """A failpoint whose error counts as the store's own."""
    with _translated():
        failpoint(name)


def _allocate_lock_file(directory: Path) -> None:
    """Give lmdb's lock file its blocks before lmdb maps it for writing: it would leave a hole there, and writing to a mapped hole of a full disk is SIGBUS.

    Without lmdb's lock a tool could not read beside the daemon; this is why it is not simply switched off.
    """
    fd = os.open(directory / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)


def _verify(path: Path) -> None:
    """Check the tree's structure offline, before it is mapped: a damaged inner page may crash the engine instead of raising.

    Values are not looked at (their own checksums are for that), so the time goes with the number of nodes, not of bytes.
    """
    try:
        problems: list[str] = lmdb.verify.verify(str(path), subdir=False)  # type: ignore[no-untyped-call]
    except (lmdb.verify.VerifyError, OSError) as error:
        if is_passing(error):
            raise StoreBlockedError(fault_sentence(error)) from error
        raise StoreDamagedError(f"{path}: {error}") from error
    if problems:
        raise StoreDamagedError(f"{path}: {problems[0]} ({len(problems)} problems)")
