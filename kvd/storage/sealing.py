"""What is stored, under encryption (docs/storage-format.md, "Encryption"): the codec of a state directory with a key file.

A sealed value is u8 version, u32 key id, nonce, ciphertext, tag. Its place (database and key, or the log's identity and LSN, or the recipes' generation and position)
is authenticated with it, so that none can stand for another. LMDB's keys are HMACs: block hashes, roots and names of pins could be guessed
from known prompts.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
from crc32c import crc32c

from kvd.cache.hashing import HASH_BYTES, Namespace
from kvd.commands import Recipe
from kvd.storage import schema
from kvd.storage.cipher import KEY_BYTES, NONCE_BYTES, TAG_BYTES, Cipher, SealBrokenError
from kvd.storage.codec import BlockPlace
from kvd.storage.errors import EncryptionKeyError, NamespaceGoneError
from kvd.storage.keys import DataKey
from kvd.storage.keys_file import STORE
from kvd.storage.schema import BLOCK_HEADER_BYTES, SEALED, BadRowError, NodeRow, StoreMeta
from kvd.types import BlockHash, KvGroup
from kvd.wal.record import Insert, PayloadSeal, Record, WalDamageError, type_of

KEY_LOST = "key"
"""Why a value can't be opened whose key was destroyed, or never was in this ring."""

_VERSION = 1
_PREFIX = struct.Struct("<BI")
_BLOCK_PREFIX = struct.Struct("<B3xI")
_HEADER_AT = _BLOCK_PREFIX.size + NONCE_BYTES
_HEADER_END = _HEADER_AT + BLOCK_HEADER_BYTES + TAG_BYTES
_ROW_AT = _HEADER_END + NONCE_BYTES
BLOCK_OVERHEAD_BYTES = _ROW_AT + TAG_BYTES
"""160: what a sealed block's value has besides the row."""
_RECIPE_PLACE = struct.Struct("<8sQI")
_RECORD_PLACE = struct.Struct("<4s16sQB")
_GROUPS = ("target", "draft")
_OF_NOTHING = msgspec.msgpack.encode(Insert(b"", b"", b"", None))
"""An insert that an index does not take."""


class Keys(Protocol):
    """What the codec needs of the key ring."""

    @property
    def index_key(self) -> bytes: ...

    def by_id(self, key_id: int) -> DataKey | None: ...

    def was_issued(self, key_id: int) -> bool: ...

    def is_current(self, key_id: int) -> bool: ...

    def for_sealing(self, tenant: bytes | None, num_values: int = 1) -> tuple[DataKey, list[bytes]]: ...

    def prepare(self, tenants: Collection[bytes]) -> None: ...

    def hold_tenants(self, tenant_salts: Collection[bytes]) -> None: ...


class SealedCodec:
    """Implements ``Codec``."""

    is_sealed = True

    def __init__(self, ring: Keys) -> None:
        self.ring = ring
        self._salts: dict[bytes, bytes] = {}
        """Tenant salt by root, of the namespaces that there are and those written since ``retain``: clients choose salts, so there is no end of them."""

    def format_of(self, plain_version: int) -> int:
        return SEALED + plain_version

    def wal_seal(self, store_uuid: bytes) -> PayloadSeal | None:
        return _RecordSeal(self, store_uuid)

    # -------------------------------------------------------------------------------- small values

    def seal(self, tenant: bytes | None, data: bytes, place: bytes) -> bytes:
        """``data`` under the key of ``tenant``.

        Raises:
            StoreBlockedError: the tenant's key can't be made durable.
        """
        key, (nonce,) = self.ring.for_sealing(tenant)
        return _PREFIX.pack(_VERSION, key.key_id) + nonce + key.cipher.seal(nonce, data, place)

    def open(self, sealed: bytes, place: bytes) -> bytes:
        """What was sealed.

        Raises:
            BadRowError: ``sealed`` (not what was sealed for this place) or ``key`` (its key is gone).
        """
        if len(sealed) < _PREFIX.size + NONCE_BYTES + TAG_BYTES:
            raise BadRowError("sealed")
        version, key_id = _PREFIX.unpack_from(sealed)
        cipher = self._cipher(version, key_id, "sealed")
        try:
            return cipher.open(sealed[_PREFIX.size : _PREFIX.size + NONCE_BYTES], sealed[_PREFIX.size + NONCE_BYTES :], place)
        except SealBrokenError as error:
            raise BadRowError("sealed") from error

    def was_destroyed(self, sealed: bytes) -> bool:
        """Whether the key of a value was in the ring and is no more."""
        version, key_id = _PREFIX.unpack_from(sealed) if len(sealed) >= _PREFIX.size else (0, 0)
        return version == _VERSION and self.ring.was_issued(key_id) and self.ring.by_id(key_id) is None

    def _cipher(self, version: int, key_id: int, reason: str) -> Cipher:
        if version != _VERSION:
            raise BadRowError(reason)
        key = self.ring.by_id(key_id)
        if key is None:
            raise BadRowError(KEY_LOST)
        return key.cipher

    # -------------------------------------------------------------------------------- keys

    def _key(self, database: bytes, plain: bytes) -> bytes:
        return hmac.digest(self.ring.index_key, database + b"\0" + plain, "sha256")

    def namespace_key(self, root: bytes) -> bytes:
        return self._key(schema.DB_NAMESPACES, root)

    def node_key(self, block_hash: bytes) -> bytes:
        return self._key(schema.DB_NODES, block_hash)

    def pin_key(self, name: str) -> bytes:
        return self._key(schema.DB_PINS, name.encode())

    def block_key(self, group: str, block_hash: bytes) -> bytes:
        return self._key(schema.DB_BLOCKS, schema.block_key(group, block_hash))

    def find_blocks(
        self, keys: Iterable[bytes], groups: Sequence[str], block_hashes: Collection[BlockHash]
    ) -> Iterator[tuple[bytes, BlockPlace | None]]:
        places = {self.block_key(group, block_hash): (group, block_hash) for group in groups for block_hash in block_hashes}
        for key in keys:
            yield key, places.get(key)

    # -------------------------------------------------------------------------------- rows

    def pack_meta(self, meta: StoreMeta) -> bytes:
        return schema.pack_meta(meta, self.format_of(schema.FORMAT_VERSION))

    def unpack_meta(self, data: bytes) -> StoreMeta:
        return schema.unpack_meta(data, self.format_of(schema.FORMAT_VERSION))

    def prepare(self, tenant_salts: Collection[bytes]) -> None:
        self.ring.prepare(tenant_salts)

    def learn(self, namespace: Namespace) -> None:
        """What is under this root belongs to its tenant."""
        self._salts[namespace.root] = namespace.tenant_salt

    def tenant_of(self, root: bytes) -> bytes:
        """The tenant of a root: whoever names a root has written or read its namespace before.

        Raises:
            NamespaceGoneError: it has left the index since.
        """
        try:
            return self._salts[root]
        except KeyError:
            raise NamespaceGoneError("its namespace has left the index") from None

    def retain(self, roots: Collection[bytes]) -> None:
        for root in list(self._salts):  # other threads learn meanwhile
            if root not in roots:
                self._salts.pop(root, None)

    def pack_namespace(self, namespace: Namespace) -> bytes:
        self.learn(namespace)
        place = _place(schema.DB_NAMESPACES, self.namespace_key(namespace.root))
        return self.seal(namespace.tenant_salt, namespace.root + schema.pack_namespace(namespace), place)

    def unpack_namespace(self, key: bytes, value: bytes) -> Namespace:
        data = self.open(value, _place(schema.DB_NAMESPACES, key))
        namespace = schema.unpack_namespace(data[:HASH_BYTES], data[HASH_BYTES:])
        self.learn(namespace)
        return namespace

    def pack_node(self, row: NodeRow) -> bytes:
        place = _place(schema.DB_NODES, self.node_key(row.block_hash))
        return self.seal(self.tenant_of(row.root), row.block_hash + schema.pack_node(row), place)

    def unpack_node(self, key: bytes, value: bytes) -> NodeRow:
        data = self.open(value, _place(schema.DB_NODES, key))
        return schema.unpack_node(data[:HASH_BYTES], data[HASH_BYTES:])

    def pack_pin(self, name: str, leaf: BlockHash) -> bytes:
        return self.seal(STORE, leaf + name.encode(), _place(schema.DB_PINS, self.pin_key(name)))

    def unpack_pin(self, key: bytes, value: bytes) -> tuple[str, BlockHash]:
        data = self.open(value, _place(schema.DB_PINS, key))
        return data[HASH_BYTES:].decode("utf-8", "replace"), BlockHash(data[:HASH_BYTES])

    # -------------------------------------------------------------------------------- blocks

    def value_bytes(self, row_bytes: int) -> int:
        return schema.value_bytes(row_bytes, BLOCK_OVERHEAD_BYTES)

    def write_block(self, value: memoryview, group: KvGroup, block_hash: bytes, root: bytes, row: memoryview) -> None:
        header = memoryview(bytearray(BLOCK_HEADER_BYTES))
        schema.write_block_header(header, block_hash, group.fingerprint, row)
        self._write(value, self.block_key(group.name, block_hash), self.tenant_of(root), bytes(header), row)

    def _write(self, value: memoryview, place: bytes, tenant: bytes | None, header: bytes, row: memoryview) -> None:
        key, nonces = self.ring.for_sealing(tenant, 2)
        value[: _BLOCK_PREFIX.size] = _BLOCK_PREFIX.pack(_VERSION, key.key_id)
        value[_BLOCK_PREFIX.size : _HEADER_AT] = nonces[0]
        value[_HEADER_AT:_HEADER_END] = key.cipher.seal(nonces[0], header, _header_place(place, value))
        value[_HEADER_END:_ROW_AT] = nonces[1]
        key.cipher.seal_into(nonces[1], row, _row_place(place, value), value[_ROW_AT : _ROW_AT + row.nbytes + TAG_BYTES])

    def read_block(self, value: memoryview, group: KvGroup, block_hash: bytes, memory: memoryview) -> None:
        if len(value) != self.value_bytes(group.row_bytes):
            raise BadRowError("length")
        key = self.block_key(group.name, block_hash)
        cipher, header = self._open_header(key, value)
        length, row_crc = schema.check_block_header(header, block_hash, group.fingerprint)
        if length != group.row_bytes:
            raise BadRowError("length")
        _open_row(cipher, key, value, memory, row_crc)

    def verify_block(self, key: bytes, value: memoryview) -> tuple[str, BlockHash, int]:
        header, row = self._open_block(key, value, None)
        block_hash = schema.block_hash_of(header)
        return next((group for group in _GROUPS if self.block_key(group, block_hash) == key), ""), block_hash, row.nbytes

    def plain_block(self, key: bytes, value: memoryview, block_hash: bytes) -> bytes:
        header, row = self._open_block(key, value, block_hash)
        return bytes(header) + bytes(row)

    def block_value(self, group: str, block_hash: bytes, root: bytes, plain: bytes) -> bytes:
        header, row = memoryview(plain)[:BLOCK_HEADER_BYTES], memoryview(plain)[BLOCK_HEADER_BYTES:]
        length, row_crc = schema.check_block_header(header, block_hash, None)
        if length != row.nbytes:
            raise BadRowError("length")
        if crc32c(row) != row_crc:
            raise BadRowError("checksum")
        value = bytearray(self.value_bytes(length))
        self._write(memoryview(value), self.block_key(group, block_hash), self.tenant_of(root), bytes(header), row)
        return bytes(value)

    def renewed(self, database: bytes, key: bytes, value: memoryview | bytes) -> memoryview | bytes:
        is_block = database == schema.DB_BLOCKS
        _, key_id = (_BLOCK_PREFIX if is_block else _PREFIX).unpack_from(value) if len(value) >= _BLOCK_PREFIX.size else (0, 0)
        if self.ring.is_current(key_id):
            return value
        data_key = self.ring.by_id(key_id)
        if data_key is None:
            raise BadRowError(KEY_LOST)
        if not is_block:
            return self.seal(data_key.tenant, self.open(bytes(value), _place(database, key)), _place(database, key))
        header, row = self._open_block(key, memoryview(value), None)
        renewed = memoryview(bytearray(len(value)))
        self._write(renewed, key, data_key.tenant, bytes(header), row)
        return renewed

    def _open_block(self, key: bytes, value: memoryview, block_hash: bytes | None) -> tuple[memoryview, memoryview]:
        cipher, header = self._open_header(key, value)
        length, row_crc = schema.check_block_header(header, block_hash, None)
        if len(value) != self.value_bytes(length):
            raise BadRowError("length")
        row = memoryview(bytearray(length))
        _open_row(cipher, key, value, row, row_crc)
        return header, row

    def _open_header(self, key: bytes, value: memoryview) -> tuple[Cipher, memoryview]:
        if len(value) < BLOCK_OVERHEAD_BYTES:
            raise BadRowError("header")
        version, key_id = _BLOCK_PREFIX.unpack_from(value)
        cipher = self._cipher(version, key_id, "version")
        try:
            nonce = bytes(value[_BLOCK_PREFIX.size : _HEADER_AT])
            return cipher, memoryview(cipher.open(nonce, value[_HEADER_AT:_HEADER_END], _header_place(key, value)))
        except SealBrokenError as error:
            raise BadRowError("header") from error

    # -------------------------------------------------------------------------------- other files

    def pack_private(self, what: bytes, data: bytes) -> bytes:
        return self.seal(STORE, data, what)

    def unpack_private(self, what: bytes, data: bytes) -> bytes:
        return self.open(data, what)

    # -------------------------------------------------------------------------------- recipes

    def hold_tenants(self, tenant_salts: Collection[bytes]) -> None:
        self.ring.hold_tenants(tenant_salts)

    def pack_recipes(self, generation: int, recipes: Sequence[Recipe]) -> bytes:
        return msgspec.msgpack.encode(
            [
                self.seal(recipe.tenant_salt, msgspec.msgpack.encode(recipe), _recipe_place(generation, position))
                for position, recipe in enumerate(recipes)
            ]
        )

    def unpack_recipes(self, generation: int, payload: bytes) -> list[Recipe]:
        recipes = []
        for position, sealed in enumerate(msgspec.msgpack.decode(payload, type=list[bytes])):
            if not self.was_destroyed(sealed):
                recipes.append(msgspec.msgpack.decode(self.open(sealed, _recipe_place(generation, position)), type=Recipe))
        return recipes


class _NoKeys:
    """The ring of somebody who has no key."""

    index_key = bytes(KEY_BYTES)

    def by_id(self, key_id: int) -> DataKey | None:  # noqa: ARG002 (the port's)
        return None

    def was_issued(self, key_id: int) -> bool:  # noqa: ARG002
        return True

    def is_current(self, key_id: int) -> bool:  # noqa: ARG002
        return False

    def for_sealing(self, tenant: bytes | None, num_values: int = 1) -> tuple[DataKey, list[bytes]]:  # noqa: ARG002
        raise EncryptionKeyError("without store_encryption_key_file nothing can be encrypted")

    def prepare(self, tenants: Collection[bytes]) -> None:
        pass

    def hold_tenants(self, tenant_salts: Collection[bytes]) -> None:
        pass


class BlindCodec(SealedCodec):
    """For tools without the key: formats, checksums, counts and sizes can be read, no content. Each recipe shows as one without a name or a token."""

    def __init__(self) -> None:
        super().__init__(_NoKeys())

    def unpack_recipes(self, generation: int, payload: bytes) -> list[Recipe]:  # noqa: ARG002 (the port's)
        sealed = msgspec.msgpack.decode(payload, type=list[bytes])
        return [Recipe(name=f"encrypted {position}", token_ids=b"", tokenizer_digest=b"") for position in range(len(sealed))]


class _RecordSeal:
    """The log's payloads: each under the key of the tenant whose tokens it holds."""

    def __init__(self, codec: SealedCodec, store_uuid: bytes) -> None:
        self._codec = codec
        self._store_uuid = store_uuid

    def prepare(self, records: Iterable[Record]) -> None:
        parts = [record.namespace for record in records if isinstance(record, Insert) and record.namespace is not None]
        self._codec.prepare([Namespace(*each).tenant_salt for each in parts])

    def seal(self, record: Record, payload: bytes, lsn: int) -> bytes:
        try:
            tenant = self._tenant_of(record)
        except NamespaceGoneError:  # it waited, or is rescued from a segment that failed; an LSN needs a record all the same
            tenant, payload = STORE, _OF_NOTHING
        return self._codec.seal(tenant, payload, self._place(type_of(record), lsn))

    def open(self, number: int, sealed: bytes, lsn: int) -> bytes | None:
        if self._codec.was_destroyed(sealed):
            return None
        try:
            return self._codec.open(sealed, self._place(number, lsn))
        except BadRowError as error:
            raise WalDamageError(f"a record's payload can't be opened: {error.reason}") from error

    def _tenant_of(self, record: Record) -> bytes | None:
        if not isinstance(record, Insert):
            return STORE
        if record.namespace is not None:
            self._codec.learn(Namespace(*record.namespace))
        return self._codec.tenant_of(record.root)

    def _place(self, number: int, lsn: int) -> bytes:
        return _RECORD_PLACE.pack(b"wal\0", self._store_uuid, lsn, number)


def _place(database: bytes, key: bytes) -> bytes:
    return database + b"\0" + key


def _recipe_place(generation: int, position: int) -> bytes:
    return _RECIPE_PLACE.pack(b"recipes\0", generation, position)


def _header_place(key: bytes, value: memoryview) -> bytes:
    return _place(schema.DB_BLOCKS, key) + bytes(value[: _BLOCK_PREFIX.size])


def _row_place(key: bytes, value: memoryview) -> bytes:
    """The row belongs to this very header."""
    return b"row\0" + key + bytes(value[_HEADER_END - TAG_BYTES : _HEADER_END])


def _open_row(cipher: Cipher, key: bytes, value: memoryview, memory: memoryview, row_crc: int) -> None:
    nonce = bytes(value[_HEADER_END:_ROW_AT])
    try:
        cipher.open_into(nonce, value[_ROW_AT : _ROW_AT + memory.nbytes + TAG_BYTES], _row_place(key, value), memory)
    except SealBrokenError as error:
        raise BadRowError("checksum") from error
    if crc32c(memory) != row_crc:
        raise BadRowError("checksum")
