"""Records and segment headers of the write-ahead log, as bytes (docs/storage-format.md, "Write-ahead log").

A record is a 24-byte header and a msgpack payload, padded with zeros to a multiple of eight:

    u32 crc32c   over everything after this field, padding included, seeded with the segment's salt
    u32 length   of the payload in bytes
    u8  type     1 insert, 2 pin, 3 unpin, 4 forget
    u8  flags    bit 0: a reader that doesn't know the type may pass the record by
    u16          zero
    u32 unsynced records before it in its segment that were not known to be synced when it was written
    u64 lsn      one more than that of the record before

All integers are little-endian. The salt keeps a record from validating in a segment that it was not written to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from crc32c import crc32c

FORMAT_VERSION = 1
SEALED_FORMAT_VERSION = 256 + FORMAT_VERSION
"""The same, with each payload encrypted."""
SEGMENT_MAGIC = b"KVDWAL\r\n"
SEGMENT_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 24
MAX_PAYLOAD_BYTES = 1 << 20
ALIGNMENT = 8

FLAG_IGNORABLE = 1

_SEGMENT = struct.Struct("<8sHHI16sQQQII")
"""magic, format version, header bytes, salt, store uuid, segment number, first LSN, zero, zero, crc32c of all before."""
_RECORD = struct.Struct("<IIBBHIQ")
_RECORD_START = struct.Struct("<II")
_CRC = struct.Struct("<I")


class WalError(Exception):
    """The write-ahead log's base error."""


class WalFormatError(WalError):
    """A segment of a format that this version does not know. Never read on, never overwritten: the start is refused."""


class WalRecordTooLargeError(WalError):
    """A payload above ``MAX_PAYLOAD_BYTES``."""


class WalDamageError(WalError):
    """Bytes that are no valid segment header or record."""


def type_of(record: Record) -> int:
    """The number of a record's type."""
    return _TYPE_OF[type(record)]


class Insert(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A full block exists below ``parent`` (``root`` itself for a prompt's first block), with these packed tokens.

    ``namespace`` (fingerprint, tenant salt, adapter digest) comes with the first record of a root in a log.
    """

    root: bytes
    parent: bytes
    token_ids: bytes
    namespace: tuple[bytes, bytes, bytes] | None = None


class Pin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The chain that ends with block ``leaf`` belongs to the pin ``name``."""

    name: str
    leaf: bytes


class Unpin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    name: str


class Forget(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The stored bytes of these blocks are bad and never to be offered again; the blocks stay known."""

    block_hashes: tuple[bytes, ...]


Record = Insert | Pin | Unpin | Forget

_TYPES: dict[int, type[Insert | Pin | Unpin | Forget]] = {1: Insert, 2: Pin, 3: Unpin, 4: Forget}
_TYPE_OF: dict[type, int] = {record: number for number, record in _TYPES.items()}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {number: msgspec.msgpack.Decoder(record) for number, record in _TYPES.items()}


class PayloadSeal(Protocol):
    """What payloads go through on their way to and from the disk, if they are encrypted."""

    def prepare(self, records: Iterable[Record]) -> None:
        """These will be sealed next: what is needed for that is made durable for all of them at once.

        Raises:
            Exception: it can't be.
        """

    def seal(self, record: Record, payload: bytes, lsn: int) -> bytes:
        """The bytes that stand in the segment.

        Raises:
            OSError: the key for it can't be made durable.
        """

    def open(self, number: int, sealed: bytes, lsn: int) -> bytes | None:
        """The payload of a record of type ``number``; None if its key was destroyed.

        Raises:
            WalDamageError: these are not the bytes that were sealed for it.
        """


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first 64 bytes of a segment; ``salt`` seeds its checksums."""

    store_uuid: bytes
    number: int
    first_lsn: int
    salt: int


def format_of(seal: PayloadSeal | None) -> int:
    """The format version of a segment whose payloads go through ``seal``."""
    return FORMAT_VERSION if seal is None else SEALED_FORMAT_VERSION


def encode_segment_header(header: SegmentHeader, format_version: int = FORMAT_VERSION) -> bytes:
    body = _SEGMENT.pack(
        SEGMENT_MAGIC, format_version, SEGMENT_HEADER_BYTES, header.salt, header.store_uuid, header.number, header.first_lsn, 0, 0, 0
    )[:-4]
    return body + _CRC.pack(crc32c(body))


def decode_segment_header(data: bytes | memoryview, format_version: int = FORMAT_VERSION) -> SegmentHeader:
    """Parse a segment's first ``SEGMENT_HEADER_BYTES``.

    Raises:
        WalDamageError: it is none.
        WalFormatError: it is a valid one of an unknown format.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise WalDamageError("the segment is shorter than its header")
    magic, version, header_bytes, salt, store_uuid, number, first_lsn, _, _, crc = _SEGMENT.unpack_from(data)
    if magic != SEGMENT_MAGIC or crc != crc32c(data[: _SEGMENT.size - 4]):
        raise WalDamageError("the segment's header is damaged")
    if version == SEALED_FORMAT_VERSION != format_version:
        raise WalFormatError(f"write-ahead log of format {version}, which is encrypted, and no store_encryption_key_file is given")
    if version != format_version or header_bytes != SEGMENT_HEADER_BYTES:
        raise WalFormatError(f"write-ahead log of format {version}; this version reads format {format_version}")
    return SegmentHeader(store_uuid, number, first_lsn, salt)


def encode_record(record: Record, lsn: int, salt: int, seal: PayloadSeal | None = None, *, num_unsynced: int = 0) -> bytes:
    """One record as it stands in a segment with ``salt``; ``num_unsynced`` of those before it there are not known to be synced.

    Raises:
        WalRecordTooLargeError: the payload is above ``MAX_PAYLOAD_BYTES``.
        OSError: as ``PayloadSeal.seal``.
    """
    payload = _ENCODER.encode(record)
    if seal is not None:
        payload = seal.seal(record, payload, lsn)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WalRecordTooLargeError(f"a record of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")
    body = _RECORD.pack(0, len(payload), type_of(record), 0, 0, num_unsynced, lsn)[4:] + payload + bytes(-len(payload) % ALIGNMENT)
    return _CRC.pack(crc32c(body, salt)) + body


def synced_lsn(data: memoryview, offset: int) -> int:
    """What the valid record at ``offset`` proves: every record of its segment up to this LSN had been synced before it was written."""
    _, _, _, _, _, num_unsynced, lsn = _RECORD.unpack_from(data, offset)
    return int(lsn - 1 - num_unsynced)


def record_extent(data: memoryview, offset: int) -> int:
    """Where the record at ``offset`` ends by its own account, valid or not; where that can't be, the end of its header."""
    end = offset + RECORD_HEADER_BYTES
    _, length = _RECORD_START.unpack_from(data, offset) if offset + _RECORD_START.size <= len(data) else (0, 0)
    return min(len(data), end + length + (-length % ALIGNMENT) if length <= MAX_PAYLOAD_BYTES else end)


def decode_record(data: memoryview, offset: int, salt: int, seal: PayloadSeal | None = None) -> tuple[int, Record | None, int]:
    """The record at ``offset``: its LSN, the record, and where the next one begins. None for a record that is passed by: of an unknown type that allows it, or
    one whose key was destroyed.

    Raises:
        WalDamageError: no valid record stands there.
        WalFormatError: a valid record of an unknown type that may not be passed by.
    """
    end = offset + RECORD_HEADER_BYTES
    if end > len(data):
        raise WalDamageError("a record's header is cut")
    crc, length, number, flags, _, _, lsn = _RECORD.unpack_from(data, offset)
    if not 0 < length <= MAX_PAYLOAD_BYTES:
        raise WalDamageError("a record's length is out of range")
    padded = end + length + (-length % ALIGNMENT)
    if padded > len(data) or crc != crc32c(data[offset + 4 : padded], salt):
        raise WalDamageError("a record's checksum does not match")
    decoder = _DECODERS.get(number)
    if decoder is None:
        if flags & FLAG_IGNORABLE:
            return lsn, None, padded
        raise WalFormatError(f"record type {number} in the write-ahead log is unknown to this version")
    payload: bytes | memoryview = data[end : end + length]
    if seal is not None:
        opened = seal.open(number, bytes(payload), lsn)
        if opened is None:
            return lsn, None, padded
        payload = opened
    try:
        return lsn, decoder.decode(payload), padded
    except msgspec.MsgspecError as error:
        raise WalDamageError(f"a record's payload does not decode: {error}") from error
