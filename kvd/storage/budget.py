"""How ``store_max_bytes`` is shared out: everything under the state directory that can grow has its part, and a defined answer at the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.config import StorageConfig
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.hot_blocks import WritePolicy
from kvd.types import KvGroup

_PAGE = 4096
_MIB = 1 << 20
_NODE_DISK_BYTES = 400
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


def plan_budget(config: StorageConfig, groups: Sequence[KvGroup], codec: Codec = PLAIN) -> Budget:
    total = config.store_max_bytes
    wal_max_bytes = min(config.wal_max_bytes, total // 8)
    quarantine_max_bytes = total // 32
    aside_max_bytes = total // 8
    map_bytes = max(_MIB, (total - wal_max_bytes - quarantine_max_bytes - aside_max_bytes) // _PAGE * _PAGE)
    max_nodes = min(_MAX_NODES, max(256, map_bytes // (16 * _NODE_DISK_BYTES)))
    return Budget(
        map_bytes=map_bytes,
        max_block_bytes=int((map_bytes - max_nodes * _NODE_DISK_BYTES) / _FRAGMENTATION),
        block_bytes=sum(codec.value_bytes(group.row_bytes) + 16 for group in groups),
        commit_bytes=min(16 * _MIB, map_bytes // 16),
        max_nodes=max_nodes,
        wal_max_bytes=wal_max_bytes,
        wal_segment_bytes=min(config.wal_segment_bytes, max(65536, wal_max_bytes // 4)),
        quarantine_max_bytes=quarantine_max_bytes,
        aside_max_bytes=aside_max_bytes,
    )
