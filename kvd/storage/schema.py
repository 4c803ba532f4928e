"""Every key, value and version of the store (docs/storage-format.md). Nothing else in the daemon spells one.

LMDB databases of a generation:

    meta        "meta"                       -> format version, store uuid, generation, applied LSN, time, clean mark, crc32c
    namespaces  root hash (32)               -> msgpack [fingerprint, tenant salt, adapter digest], crc32c
    nodes       block hash (32)              -> root, parent, depth, uses, last use, origin, packed tokens, crc32c
    pins        name (UTF-8)                 -> block hash of the pin's last full block
    blocks      group (UTF-8) 00 block hash  -> 96-byte header, the row's bytes, zeros to k * 4096 - 16 bytes

Integers are little-endian. Times before 1970, of a wrong clock, stand as 0.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import msgspec
from crc32c import crc32c

from kvd.cache.hashing import HASH_BYTES, Namespace
from kvd.cache.hashing import block_hash as hash_of_block
from kvd.storage.errors import UnknownFormatError
from kvd.types import BlockHash

FORMAT_VERSION = 1
SEALED = 256
"""What is added to a format's version where the same content stands encrypted."""

DB_META = b"meta"
DB_NAMESPACES = b"namespaces"
DB_NODES = b"nodes"
DB_PINS = b"pins"
DB_BLOCKS = b"blocks"
DATABASES = (DB_META, DB_NAMESPACES, DB_NODES, DB_PINS, DB_BLOCKS)

META_KEY = b"meta"

BLOCK_HEADER_BYTES = 96
PAGE_BYTES = 4096
PAGE_HEADER_BYTES = 16
MAX_GROUP_BYTES = 64
MAX_PIN_NAME_BYTES = 480

_META = struct.Struct("<I16sQQQB7x")
_CRC = struct.Struct("<I")
_NODE = struct.Struct("<32s32sIIQB3x")
_BLOCK = struct.Struct("<4sHHQ32s32sI8xI")
_BLOCK_MAGIC = b"KVDB"
_BLOCK_VERSION = 1

ORIGINS = ("computed", "restored", "recomputed")


class BadRowError(Exception):
    """A row of the store that fails its checks; ``reason`` is one word for the counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What a generation says of itself. ``applied_lsn``: the node table holds every log record up to here."""

    store_uuid: bytes
    generation: int
    applied_lsn: int
    written_unix_s: int
    clean: bool


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A block as the node table knows it: its place in the tree, its tokens and how often it was asked for."""

    block_hash: BlockHash
    root: BlockHash
    parent: BlockHash
    token_ids: bytes
    depth: int
    uses: int
    last_use_unix_s: int
    origin: str


def pack_meta(meta: StoreMeta, format_version: int = FORMAT_VERSION) -> bytes:
    body = _META.pack(format_version, meta.store_uuid, meta.generation, meta.applied_lsn, max(0, meta.written_unix_s), meta.clean)
    return body + _CRC.pack(crc32c(body))


def unpack_meta(data: bytes, format_version: int = FORMAT_VERSION) -> StoreMeta:
    """The meta row.

    Raises:
        BadRowError: damaged.
        UnknownFormatError: whole, but of another format.
    """
    body = _checked(data, "meta")
    version = int.from_bytes(body[:4], "little")
    check_format("a store", version, format_version)
    if len(body) != _META.size:
        raise BadRowError("meta")
    _, store_uuid, generation, applied_lsn, written_unix_s, clean = _META.unpack(body)
    return StoreMeta(store_uuid, generation, applied_lsn, written_unix_s, bool(clean))


def check_format(what: str, found: int, expected: int) -> None:
    """Whether ``found``, the version that a whole file bears, is the expected one.

    Raises:
        UnknownFormatError: it is not; the message says so by name, and whether encryption is the difference.
    """
    if found == expected:
        return
    if found >= SEALED > expected:
        raise UnknownFormatError(f"{what} of format {found}, which is encrypted, and no store_encryption_key_file is given")
    raise UnknownFormatError(f"{what} of format {found}; this version reads format {expected}")


def pack_namespace(namespace: Namespace) -> bytes:
    body = msgspec.msgpack.encode([namespace.fingerprint, namespace.tenant_salt, namespace.adapter_digest])
    return body + _CRC.pack(crc32c(body))


def unpack_namespace(root: bytes, data: bytes) -> Namespace:
    """The namespace of ``root``.

    Raises:
        BadRowError: the checksum, or the root that follows from the parts, does not match.
    """
    body = _checked(data, "namespace")
    try:
        fingerprint, tenant_salt, adapter_digest = msgspec.msgpack.decode(body, type=tuple[bytes, bytes, bytes])
    except msgspec.MsgspecError as error:
        raise BadRowError("namespace") from error
    namespace = Namespace(fingerprint, tenant_salt, adapter_digest)
    if namespace.root != root:
        raise BadRowError("namespace")
    return namespace


def pack_node(row: NodeRow) -> bytes:
    last_use_unix_s = max(0, row.last_use_unix_s)
    body = _NODE.pack(row.root, row.parent, row.depth, row.uses, last_use_unix_s, ORIGINS.index(row.origin)) + row.token_ids
    return body + _CRC.pack(crc32c(body))


def unpack_node(block_hash: bytes, data: bytes) -> NodeRow:
    """The node of ``block_hash``.

    Raises:
        BadRowError: the checksum does not match, or the hash is not that of parent and tokens.
    """
    body = _checked(data, "node")
    if len(body) < _NODE.size:
        raise BadRowError("node")
    root, parent, depth, uses, last_use, origin = _NODE.unpack_from(body)
    token_ids = body[_NODE.size :]
    if hash_of_block(BlockHash(parent), token_ids) != block_hash or origin >= len(ORIGINS):
        raise BadRowError("node")
    return NodeRow(BlockHash(block_hash), BlockHash(root), BlockHash(parent), token_ids, depth, uses, last_use, ORIGINS[origin])


def block_key(group: str, block_hash: bytes) -> bytes:
    return group.encode() + b"\0" + block_hash


def split_block_key(key: bytes) -> tuple[str, BlockHash]:
    """The group and the hash of a key of the blocks database.

    Raises:
        BadRowError: it is none.
    """
    if len(key) <= HASH_BYTES + 1 or key[-HASH_BYTES - 1] != 0:
        raise BadRowError("key")
    try:
        return key[: -HASH_BYTES - 1].decode(), BlockHash(key[-HASH_BYTES:])
    except UnicodeDecodeError as error:
        raise BadRowError("key") from error


def value_bytes(row_bytes: int, overhead_bytes: int = BLOCK_HEADER_BYTES) -> int:
    """Size of a block's value: with LMDB's page header it fills whole pages, so that the free list never fragments."""
    used = overhead_bytes + row_bytes + PAGE_HEADER_BYTES
    return -(-used // PAGE_BYTES) * PAGE_BYTES - PAGE_HEADER_BYTES


def write_block_header(value: memoryview, block_hash: bytes, fingerprint: bytes, row: memoryview) -> None:
    """Fill the header of ``value`` for ``row``; the checksum is taken from ``row`` here, once."""
    digest = hashlib.sha256(fingerprint).digest()
    header = _BLOCK.pack(_BLOCK_MAGIC, _BLOCK_VERSION, BLOCK_HEADER_BYTES, row.nbytes, block_hash, digest, crc32c(row), 0)[:-4]
    value[: len(header)] = header
    value[len(header) : BLOCK_HEADER_BYTES] = _CRC.pack(crc32c(header))


def check_block(value: memoryview, block_hash: bytes, fingerprint: bytes, row_bytes: int, row: memoryview) -> None:
    """Check a value whose row was copied to ``row``, where it will be used from.

    Raises:
        BadRowError: ``header`` (damaged), ``version``, ``identity`` (another block's), ``fingerprint``, ``length`` or ``checksum``.
    """
    length, expected_crc = check_block_header(value, block_hash, fingerprint)
    if len(value) != value_bytes(length) or length != row_bytes:
        raise BadRowError("length")
    if crc32c(row) != expected_crc:
        raise BadRowError("checksum")


def check_block_header(value: memoryview, block_hash: bytes | None, fingerprint: bytes | None) -> tuple[int, int]:
    """The row's bytes and checksum, from a value's header; None: not known, not compared.

    Raises:
        BadRowError: ``header``, ``version``, ``identity`` or ``fingerprint``, as ``check_block``.
    """
    if len(value) < BLOCK_HEADER_BYTES:
        raise BadRowError("header")
    magic, version, header_bytes, length, stored_hash, digest, row_crc, header_crc = _BLOCK.unpack_from(value)
    if magic != _BLOCK_MAGIC or header_crc != crc32c(value[: BLOCK_HEADER_BYTES - 4]):
        raise BadRowError("header")
    if version != _BLOCK_VERSION or header_bytes != BLOCK_HEADER_BYTES:
        raise BadRowError("version")
    if block_hash is not None and stored_hash != block_hash:
        raise BadRowError("identity")
    if fingerprint is not None and digest != hashlib.sha256(fingerprint).digest():
        raise BadRowError("fingerprint")
    return int(length), int(row_crc)


def block_hash_of(header: memoryview) -> BlockHash:
    """The hash that a header which passed its checks names."""
    return BlockHash(_BLOCK.unpack_from(header)[4])


def verify_block(value: memoryview, block_hash: bytes) -> int:
    """Check a value by itself, without knowing its group (for tools); the row's bytes.

    Raises:
        BadRowError: as ``check_block``.
    """
    length, row_crc = check_block_header(value, block_hash, None)
    if len(value) != value_bytes(length):
        raise BadRowError("length")
    if crc32c(value[BLOCK_HEADER_BYTES : BLOCK_HEADER_BYTES + length]) != row_crc:
        raise BadRowError("checksum")
    return length


def _checked(data: bytes, reason: str) -> bytes:
    if len(data) <= _CRC.size or _CRC.unpack_from(data, len(data) - _CRC.size)[0] != crc32c(data[: -_CRC.size]):
        raise BadRowError(reason)
    return data[: -_CRC.size]
