r"""A set of pins as one portable file: recipes, and the blocks that were on disk for them (docs/storage-format.md, "Pin sets").

    8 bytes "KVDPIN\r\n", u32 format version, u32 zero
    entries: u32 length of the payload, u8 type, 3 zeros, u32 crc32c of type, zeros and payload, payload

The last entry has the number of entries before it and the SHA-256 of all bytes before it, so that a cut file is told from a whole one.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from crc32c import crc32c

from kvd.cache.hashing import Namespace, block_hash
from kvd.commands import Recipe
from kvd.storage.errors import StorageError, UnknownFormatError
from kvd.types import BlockHash
from kvd.wal.durable import open_regular, sync_directory

FORMAT_VERSION = 1
MAX_ENTRY_BYTES = 1 << 30
_MAGIC = b"KVDPIN\r\n"
_HEADER = struct.Struct("<8sII")
_ENTRY = struct.Struct("<IB3xI")
_END = struct.Struct("<Q32s")
_RECIPE, _NAMESPACE, _NODE, _BLOCK, _END_TYPE = 1, 2, 3, 4, 255


class PinSetError(StorageError):
    """The file is no whole pin set; nothing of it may be used."""


class PinTransferError(StorageError):
    """What was asked for can't be carried over; nothing was changed, and the message says what to do."""


class NoSuchPinError(PinTransferError):
    """There is no pin of that name, or none at all."""


@dataclass(frozen=True, slots=True)
class PinSetNode:
    """A block's place and tokens: a child of ``parent``, which is ``root`` for the first of a prompt."""

    root: BlockHash
    parent: BlockHash
    token_ids: bytes
    uses: int

    @property
    def block_hash(self) -> BlockHash:
        return block_hash(self.parent, self.token_ids)


@dataclass(frozen=True, slots=True)
class PinSetBlock:
    """A block's bytes in one KV group: ``plain`` is the header and the row as a plain store keeps them."""

    group: str
    block_hash: BlockHash
    root: BlockHash
    plain: bytes


PinSetEntry = Recipe | Namespace | PinSetNode | PinSetBlock


class PinSetWriter:
    """Appends entries to an open file; a namespace and the nodes above precede what refers to them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._num_entries = 0
        self.num_bytes = 0
        self._put(_HEADER.pack(_MAGIC, FORMAT_VERSION, 0))

    def add(self, entry: PinSetEntry) -> None:
        if isinstance(entry, Recipe):
            self._entry(_RECIPE, msgspec.msgpack.encode(entry))
        elif isinstance(entry, Namespace):
            self._entry(_NAMESPACE, msgspec.msgpack.encode([entry.fingerprint, entry.tenant_salt, entry.adapter_digest]))
        elif isinstance(entry, PinSetNode):
            self._entry(_NODE, msgspec.msgpack.encode([entry.root, entry.parent, entry.token_ids, entry.uses]))
        else:
            self._entry(_BLOCK, msgspec.msgpack.encode([entry.group, entry.block_hash, entry.root, entry.plain]))

    def end(self) -> None:
        """The last entry; the file is whole after it."""
        payload = _END.pack(self._num_entries, self._digest.digest())
        self._entry(_END_TYPE, payload)

    def _entry(self, kind: int, payload: bytes) -> None:
        crc = crc32c(payload, crc32c(bytes((kind, 0, 0, 0))))
        self._put(_ENTRY.pack(len(payload), kind, crc))
        self._put(payload)
        self._num_entries += 1

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)


@contextmanager
def new_pin_set(path: Path) -> Iterator[PinSetWriter]:
    """A pin set that appears under ``path`` whole and durable, readable by its owner alone, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123 (a descriptor)
            writer = PinSetWriter(file)
            yield writer
            writer.end()
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
        sync_directory(path.absolute().parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_pin_set(path: Path) -> Iterator[PinSetEntry]:
    """The entries in their order, each checked; memory is bounded by the largest one.

    What was yielded may be used only if the iteration came to its end.

    Raises:
        PinSetError: damaged, cut short, or no pin set.
        UnknownFormatError: of another format.
        OSError: it can't be read.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:

        def take(num_bytes: int) -> bytes:
            data = file.read(num_bytes)
            if len(data) < num_bytes:
                raise PinSetError(f"{path} is cut short")
            return data

        header = take(_HEADER.size)
        magic, version, _ = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise PinSetError(f"{path} is no pin set")
        if version != FORMAT_VERSION:
            raise UnknownFormatError(f"{path}: a pin set of format {version}; this version reads format {FORMAT_VERSION}")
        digest.update(header)
        num_entries = 0
        while True:
            head = take(_ENTRY.size)
            length, kind, crc = _ENTRY.unpack(head)
            if length > MAX_ENTRY_BYTES:
                raise PinSetError(f"{path} is damaged: its entry {num_entries} says {length} bytes")
            payload = take(length)
            if head[4:8] != bytes((kind, 0, 0, 0)) or crc32c(payload, crc32c(head[4:8])) != crc:
                raise PinSetError(f"{path} is damaged: the checksum of its entry {num_entries} does not match")
            if kind == _END_TYPE:
                if payload != _END.pack(num_entries, digest.digest()) or file.read(1):
                    raise PinSetError(f"{path} is damaged: its end does not match")
                return
            digest.update(head)
            digest.update(payload)
            num_entries += 1
            yield _decoded(kind, payload, path, num_entries - 1)


def _decoded(kind: int, payload: bytes, path: Path, number: int) -> PinSetEntry:
    try:
        if kind == _RECIPE:
            return msgspec.msgpack.decode(payload, type=Recipe)
        if kind == _NAMESPACE:
            return Namespace(*msgspec.msgpack.decode(payload, type=tuple[bytes, bytes, bytes]))
        if kind == _NODE:
            root, parent, token_ids, uses = msgspec.msgpack.decode(payload, type=tuple[bytes, bytes, bytes, int])
            return PinSetNode(BlockHash(root), BlockHash(parent), token_ids, uses)
        if kind == _BLOCK:
            group, key, root, plain = msgspec.msgpack.decode(payload, type=tuple[str, bytes, bytes, bytes])
            return PinSetBlock(group, BlockHash(key), BlockHash(root), plain)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise PinSetError(f"{path} is damaged: its entry {number} does not decode: {error}") from error
    raise PinSetError(f"{path}: its entry {number} is of the unknown type {kind}")
