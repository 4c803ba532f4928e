"""What happened in the cache, pulled once a step by the engine loop and handed to observers.

``BlockStored`` leaves only after the step that computed the block has completed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvd.cache.hashing import Namespace
from kvd.types import BlockHash, BlockId, PackedTokens


class BlockOrigin(StrEnum):
    """Where a block's bytes came from."""

    COMPUTED = "computed"
    RESTORED = "restored"
    """Read from disk at this start, or since."""
    RECOMPUTED = "recomputed"
    """Computed before READY, from a recipe or a logged prefix whose bytes were not to be had."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block entered the tree ready for use, a child of ``parent_hash`` (the namespace's root for the first block)."""

    namespace: Namespace
    block_hash: BlockHash
    parent_hash: BlockHash
    token_ids: PackedTokens
    block_id: BlockId
    depth: int
    """0 for the first block of a prompt: the block begins at position ``depth * block_size_tokens``."""
    origin: BlockOrigin


@dataclass(frozen=True, slots=True)
class BlocksUsed:
    """A further request was given these blocks, root first."""

    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block left memory: evicted, or taken out of the tree because its step failed."""

    block_hash: BlockHash
    block_id: BlockId


@dataclass(frozen=True, slots=True)
class BlocksPinned:
    """These blocks, root first, are the pin ``name``'s and all ready."""

    name: str
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksUnpinned:
    name: str
    block_hashes: tuple[BlockHash, ...]


CacheEvent = BlockStored | BlocksUsed | BlockRemoved | BlocksPinned | BlocksUnpinned
