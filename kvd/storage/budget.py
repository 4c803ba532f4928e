"""How ``store_max_bytes`` is shared out: everything under the state directory that can grow has its part, and a defined answer at the bound.

A part counts what ``du`` would: the files that a change makes beside those that it replaces are in it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.config import StorageConfig
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.hot_blocks import WritePolicy
from kvd.types import KvGroup

_PAGE = 4096
_MIB = 1 << 20
_FIXED_BYTES = 512 << 10
"""Folders, the lock, the marker, CURRENT, lmdb's lock files, the digests of weight files, and what a file system takes to map a large file."""
_RECIPES_MAX_BYTES = 256 * _MIB
_RECIPE_FILES = 6
"""Of the recipes while they are written anew: two that hold the state before, two that hold the new one, an unsynced one and its temporary."""
_KEYS_MAX_BYTES = 5 * _MIB
"""The key ring's files at its largest number of tenants."""
_WAL_SEGMENTS = 8
NODE_DISK_BYTES = 400
"""A node's row, with the free space in its page."""
_MAX_NODES = 131_072
"""About half a kilobyte each in memory."""
_FRAGMENTATION = 1.25
"""LMDB's file over what is live in it, in the steady state of random eviction; values of one size that fill pages were measured at 1.15 to 1.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    map_bytes: int
    """The most that the data file may grow to."""
    max_block_bytes: int
    """Values of blocks in it; the least valuable expire beyond."""
    block_bytes: int
    """What one block takes, over all groups."""
    commit_bytes: int
    """Block bytes that make a transaction."""
    max_nodes: int
    wal_max_bytes: int
    """Of the log's segments; one more may be there while a failed one is written anew."""
    wal_segment_bytes: int
    quarantine_max_bytes: int
    aside_max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerLimits:
    """The bounds and intervals that the planner keeps."""

    checkpoint_interval_s: float
    wal_soft_bytes: int
    """Log size above which a checkpoint comes at once."""
    max_block_bytes: int
    max_nodes: int
    max_wanted: int
    block_bytes: int
    """What one block takes on disk, over all groups."""
    write_policy: WritePolicy
    write_dwell_s: float


def recipes_max_bytes(store_max_bytes: int) -> int:
    """The largest file of recipes that a pin may make."""
    return min(store_max_bytes // 16, _RECIPES_MAX_BYTES) // _RECIPE_FILES


def quarantine_max_bytes(store_max_bytes: int) -> int:
    """What lies in the quarantine folder."""
    return store_max_bytes // 32


def plan_budget(config: StorageConfig, groups: Sequence[KvGroup], codec: Codec = PLAIN, *, recipes_bytes: int = 0) -> Budget:
    """``recipes_bytes``: what a file of the present pins takes; they are kept whatever the budget, and the store makes room for them."""
    total = config.store_max_bytes
    wal_part_bytes = min(config.wal_max_bytes, total // 8)
    wal_segment_bytes = min(config.wal_segment_bytes, max(65536, wal_part_bytes // _WAL_SEGMENTS // _PAGE * _PAGE))
    aside_max_bytes = total // 8
    recipes_part_bytes = _RECIPE_FILES * max(recipes_bytes, recipes_max_bytes(total))
    keys_bytes = min(total // 16, _KEYS_MAX_BYTES) if config.store_encryption_key_file else 0
    others_bytes = wal_part_bytes + quarantine_max_bytes(total) + aside_max_bytes + recipes_part_bytes + keys_bytes + _FIXED_BYTES
    map_bytes = max(_MIB, (total - others_bytes) // _PAGE * _PAGE)
    max_nodes = min(_MAX_NODES, max(256, map_bytes // (16 * NODE_DISK_BYTES)))
    return Budget(
        map_bytes=map_bytes,
        max_block_bytes=int((map_bytes - max_nodes * NODE_DISK_BYTES) / _FRAGMENTATION),
        block_bytes=sum(codec.value_bytes(group.row_bytes) + 16 for group in groups),
        commit_bytes=min(16 * _MIB, map_bytes // 16),
        max_nodes=max_nodes,
        wal_max_bytes=wal_part_bytes - wal_segment_bytes,
        wal_segment_bytes=wal_segment_bytes,
        quarantine_max_bytes=quarantine_max_bytes(total),
        aside_max_bytes=aside_max_bytes,
    )
