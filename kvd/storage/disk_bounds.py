"""How many nodes the index may have and how many bytes of blocks the disk, and what goes where that is too many. The planner's own; one thread."""

from __future__ import annotations

import math

from kvd.storage.budget import NODE_DISK_BYTES, PlannerLimits
from kvd.storage.counters import Counters
from kvd.storage.hot_blocks import HotBlocks
from kvd.storage.node_index import IndexNode, NodeIndex

_EXPIRE_FRACTION = 0.02
_FULL_EXPIRE_FRACTION = 0.1
_TRIM_STEP = 0.05


class DiskBounds:
    """``now_s`` is the monotonic time of the planner's round."""

    def __init__(self, index: NodeIndex, hot: HotBlocks, limits: PlannerLimits, counters: Counters) -> None:
        self._index = index
        self._hot = hot
        self._limits = limits
        self._counters = counters
        self._no_room_until_s = 0.0
        self._trim_above = limits.max_nodes

    @property
    def _max_block_bytes(self) -> int:
        """What is in memory stays in the index: rows beyond their bound take their room from the blocks."""
        num_beyond = max(0, len(self._index.nodes) - self._limits.max_nodes)
        return max(0, self._limits.max_block_bytes - num_beyond * NODE_DISK_BYTES)

    def keep(self) -> bool:
        """Bring the index and the stored bytes back within their bounds; whether the index was trimmed, and namespaces may be gone."""
        index, limits = self._index, self._limits
        is_trimmed = len(index.nodes) > self._trim_above
        if is_trimmed:
            self._counters.num_trimmed_nodes += index.trim(int(limits.max_nodes * 0.9))
            # It looks at every node. Where few could go, the next try waits for more of them.
            self._trim_above = max(limits.max_nodes, len(index.nodes) + int(limits.max_nodes * _TRIM_STEP))
        excess = index.stored_bytes - self._max_block_bytes
        if excess > 0:
            self._counters.num_expired_bytes += index.expire_bytes(excess, keep=self._hot.above_under_way)
        return is_trimmed

    def free_pages(self) -> None:
        """Let a part of the stored bytes expire, so that a file that can't grow goes on."""
        self._counters.num_expired_bytes += self._index.expire_bytes(
            int(self._index.stored_bytes * _FULL_EXPIRE_FRACTION), keep=self._hot.above_under_way
        )

    def has_free_room(self) -> bool:
        """Whether one more block fits on disk without anything expiring."""
        limits = self._limits
        return self._index.stored_bytes + (self._hot.num_under_way + 1) * limits.block_bytes <= self._max_block_bytes

    def had_no_room(self, now_s: float) -> bool:
        """Whether a block found none a short while ago."""
        return now_s < self._no_room_until_s

    def make_room(self, node: IndexNode, now_s: float) -> bool:
        """Have less valuable bytes expire so that those of ``node`` fit beside all under way; whether they do.

        They do not where those of the block above it are neither there nor on their way: nothing could be read of them.
        """
        limits, index = self._limits, self._index
        if node.parent is not None and not node.parent.stored_bytes and not self._hot.is_under_way(node.parent):
            return False
        needed = index.stored_bytes + self._hot.num_under_way * limits.block_bytes - self._max_block_bytes
        if needed <= 0:
            return True
        if self.had_no_room(now_s) and not node.num_pins:
            return False
        below = (True, -math.inf) if node.num_pins else index.rank(node)  # one pin's bytes never make room for another's
        freed = index.expire_bytes(max(needed, int(limits.max_block_bytes * _EXPIRE_FRACTION)), below=below, keep=self._hot.above_under_way)
        self._counters.num_expired_bytes += freed
        if freed < needed:
            self._no_room_until_s = now_s + limits.checkpoint_interval_s
            return False
        return True
