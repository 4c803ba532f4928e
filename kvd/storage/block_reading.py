"""One block's bytes from the store into staging memory, with every check that a load from disk makes."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.storage.schema import BadRowError
from kvd.storage.staging import StagingBuffer
from kvd.storage.store import BlockReader
from kvd.types import BlockHash, KvGroup

MISSING = "missing"


def read_checked(reader: BlockReader, groups: Sequence[KvGroup], block_hash: BlockHash, buffer: StagingBuffer, row: int) -> None:
    """Bring a block's rows into row ``row`` of ``buffer`` and check them there, where they will be used from.

    Raises:
        BadRowError: ``missing``, or as ``Codec.read_block``.
    """
    for group in groups:
        value = reader.get(group.name, block_hash)
        if value is None:
            raise BadRowError(MISSING)
        reader.codec.read_block(value, group, block_hash, buffer.rows(group.name, 1, row))
