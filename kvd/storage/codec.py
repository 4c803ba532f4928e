"""How what is stored becomes bytes: the one object through which keys and values of the store are made and read, chosen once at the start.

``PlainCodec`` writes them as docs/storage-format.md spells them (``schema``). The sealed one (``sealing``) puts the same bytes under encryption.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from kvd.cache.hashing import Namespace
from kvd.commands import Recipe
from kvd.storage import schema
from kvd.storage.block_copy import copy_bytes
from kvd.storage.schema import BadRowError, NodeRow, StoreMeta
from kvd.types import BlockHash, KvGroup
from kvd.wal.record import PayloadSeal

BlockPlace = tuple[str, BlockHash]
"""The group and the hash of a stored block."""


class Codec(Protocol):
    """Used by every thread of storage. What a stored row or block fails is a ``BadRowError``; whoever asked for it has a miss."""

    @property
    def is_sealed(self) -> bool: ...

    def format_of(self, plain_version: int) -> int:
        """The version that a file of the format ``plain_version`` bears when this codec writes it."""

    def wal_seal(self, store_uuid: bytes) -> PayloadSeal | None:
        """What the log's payloads go through; None: they stand as they are."""

    # keys

    def namespace_key(self, root: bytes) -> bytes: ...

    def node_key(self, block_hash: bytes) -> bytes: ...

    def pin_key(self, name: str) -> bytes: ...

    def block_key(self, group: str, block_hash: bytes) -> bytes: ...

    def find_blocks(
        self, keys: Iterable[bytes], groups: Sequence[str], block_hashes: Collection[BlockHash]
    ) -> Iterator[tuple[bytes, BlockPlace | None]]:
        """Each of the keys of blocks with what it stands for, None if that is none of these blocks."""

    # rows

    def pack_meta(self, meta: StoreMeta) -> bytes: ...

    def unpack_meta(self, data: bytes) -> StoreMeta:
        """As ``schema.unpack_meta``."""

    def pack_namespace(self, namespace: Namespace) -> bytes: ...

    def unpack_namespace(self, key: bytes, value: bytes) -> Namespace: ...

    def prepare(self, tenant_salts: Collection[bytes]) -> None:
        """Something of these tenants will be written next: what is needed for that is made durable for all of them at once.

        Raises:
            StoreBlockedError: it can't be.
        """

    def retain(self, roots: Collection[bytes]) -> None:
        """The namespaces that there are: of others nothing needs to be known any more."""

    def pack_node(self, row: NodeRow) -> bytes:
        """Raises:
        NamespaceGoneError: its namespace is none that was retained.
        """

    def unpack_node(self, key: bytes, value: bytes) -> NodeRow: ...

    def pack_pin(self, name: str, leaf: BlockHash) -> bytes: ...

    def unpack_pin(self, key: bytes, value: bytes) -> tuple[str, BlockHash]: ...

    # blocks

    def value_bytes(self, row_bytes: int) -> int:
        """Size of the value of a block with ``row_bytes``; with LMDB's page header it fills whole pages."""

    def write_block(self, value: memoryview, group: KvGroup, block_hash: bytes, root: bytes, row: memoryview) -> None:
        """Make the value of a block under the namespace ``root`` of its row in staging memory, from which the checksum is taken, once.

        ``value`` is ``value_bytes`` long and was zero or a value of the same group before.

        Raises:
            NamespaceGoneError: as ``pack_node``.
        """

    def read_block(self, value: memoryview, group: KvGroup, block_hash: bytes, memory: memoryview) -> None:
        """Bring the row of a value into ``memory``, where it will be used from, and check it there against what is asked for.

        Raises:
            BadRowError: ``header`` (damaged), ``version``, ``identity`` (another block's), ``fingerprint``, ``length`` or ``checksum``; what is in
                ``memory`` must not be used.
        """

    def verify_block(self, key: bytes, value: memoryview) -> tuple[str, BlockHash, int]:
        """Check a value by itself (for tools): its group, its hash and the row's bytes."""

    def plain_block(self, key: bytes, value: memoryview, block_hash: bytes) -> bytes:
        """The header and the row of a value as a plain store keeps them, without the zeros behind (for a pin set).

        Raises:
            BadRowError: as ``verify_block``.
        """

    def block_value(self, group: str, block_hash: bytes, root: bytes, plain: bytes) -> bytes:
        """The value that stands for what ``plain_block`` gave.

        Raises:
            BadRowError: as ``verify_block``.
        """

    def renewed(self, database: bytes, key: bytes, value: memoryview | bytes) -> memoryview | bytes:
        """A row's value as it would be written today: under its tenant's present key.

        Raises:
            BadRowError: it is damaged, or its key is gone; there is nothing to keep.
        """

    # other files

    def pack_private(self, what: bytes, data: bytes) -> bytes:
        """``data`` of a small file of the kind ``what``."""

    def unpack_private(self, what: bytes, data: bytes) -> bytes:
        """What ``pack_private`` was given.

        Raises:
            BadRowError: it can't be opened.
        """

    # recipes

    def hold_tenants(self, tenant_salts: Collection[bytes]) -> None:
        """The tenants that have pins: what belongs to them must stay readable."""

    def pack_recipes(self, generation: int, recipes: Sequence[Recipe]) -> bytes: ...

    def unpack_recipes(self, generation: int, payload: bytes) -> list[Recipe]:
        """The recipes of a payload; those whose key was destroyed are not among them.

        Raises:
            BadRowError, msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, RecursionError: it does not decode.
        """


class PlainCodec:
    """Keys and values in clear."""

    is_sealed = False

    def format_of(self, plain_version: int) -> int:
        return plain_version

    def wal_seal(self, store_uuid: bytes) -> PayloadSeal | None:  # noqa: ARG002 (the port's)
        return None

    def namespace_key(self, root: bytes) -> bytes:
        return root

    def node_key(self, block_hash: bytes) -> bytes:
        return block_hash

    def pin_key(self, name: str) -> bytes:
        return name.encode()[: schema.MAX_PIN_NAME_BYTES]

    def block_key(self, group: str, block_hash: bytes) -> bytes:
        return schema.block_key(group, block_hash)

    def find_blocks(
        self, keys: Iterable[bytes], groups: Sequence[str], block_hashes: Collection[BlockHash]
    ) -> Iterator[tuple[bytes, BlockPlace | None]]:
        for key in keys:
            try:
                group, block_hash = schema.split_block_key(key)
            except BadRowError:
                yield key, None
                continue
            yield key, (group, block_hash) if group in groups and block_hash in block_hashes else None

    def pack_meta(self, meta: StoreMeta) -> bytes:
        return schema.pack_meta(meta)

    def unpack_meta(self, data: bytes) -> StoreMeta:
        return schema.unpack_meta(data)

    def pack_namespace(self, namespace: Namespace) -> bytes:
        return schema.pack_namespace(namespace)

    def unpack_namespace(self, key: bytes, value: bytes) -> Namespace:
        return schema.unpack_namespace(key, value)

    def prepare(self, tenant_salts: Collection[bytes]) -> None:
        pass

    def retain(self, roots: Collection[bytes]) -> None:
        pass

    def pack_node(self, row: NodeRow) -> bytes:
        return schema.pack_node(row)

    def unpack_node(self, key: bytes, value: bytes) -> NodeRow:
        return schema.unpack_node(key, value)

    def pack_pin(self, name: str, leaf: BlockHash) -> bytes:  # noqa: ARG002 (the port's)
        return leaf

    def unpack_pin(self, key: bytes, value: bytes) -> tuple[str, BlockHash]:
        return key.decode("utf-8", "replace"), BlockHash(value)

    def value_bytes(self, row_bytes: int) -> int:
        return schema.value_bytes(row_bytes)

    def write_block(self, value: memoryview, group: KvGroup, block_hash: bytes, root: bytes, row: memoryview) -> None:  # noqa: ARG002 (the port's)
        schema.write_block_header(value, block_hash, group.fingerprint, row)
        copy_bytes(value[schema.BLOCK_HEADER_BYTES : schema.BLOCK_HEADER_BYTES + row.nbytes], row)

    def read_block(self, value: memoryview, group: KvGroup, block_hash: bytes, memory: memoryview) -> None:
        if len(value) != schema.value_bytes(group.row_bytes):
            raise BadRowError("length")
        copy_bytes(memory, value[schema.BLOCK_HEADER_BYTES : schema.BLOCK_HEADER_BYTES + group.row_bytes])
        schema.check_block(value, block_hash, group.fingerprint, group.row_bytes, memory)

    def verify_block(self, key: bytes, value: memoryview) -> tuple[str, BlockHash, int]:
        group, block_hash = schema.split_block_key(key)
        return group, block_hash, schema.verify_block(value, block_hash)

    def plain_block(self, key: bytes, value: memoryview, block_hash: bytes) -> bytes:  # noqa: ARG002 (the port's)
        return bytes(value[: schema.BLOCK_HEADER_BYTES + schema.verify_block(value, block_hash)])

    def block_value(self, group: str, block_hash: bytes, root: bytes, plain: bytes) -> bytes:  # noqa: ARG002 (the port's)
        value = plain + bytes(schema.value_bytes(len(plain) - schema.BLOCK_HEADER_BYTES) - len(plain))
        schema.verify_block(memoryview(value), block_hash)
        return value

    def renewed(self, database: bytes, key: bytes, value: memoryview | bytes) -> memoryview | bytes:  # noqa: ARG002 (the port's)
        return value

    def pack_private(self, what: bytes, data: bytes) -> bytes:  # noqa: ARG002 (the port's)
        return data

    def unpack_private(self, what: bytes, data: bytes) -> bytes:  # noqa: ARG002 (the port's)
        return data

    def hold_tenants(self, tenant_salts: Collection[bytes]) -> None:
        pass

    def pack_recipes(self, generation: int, recipes: Sequence[Recipe]) -> bytes:  # noqa: ARG002 (the port's)
        return msgspec.msgpack.encode(recipes)

    def unpack_recipes(self, generation: int, payload: bytes) -> list[Recipe]:  # noqa: ARG002 (the port's)
        return msgspec.msgpack.decode(payload, type=list[Recipe])


PLAIN = PlainCodec()
