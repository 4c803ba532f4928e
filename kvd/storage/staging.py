"""Staging memory: where block rows lie between the pool and the disk. Allocated once; its size bounds what is under way.

A buffer has one region a KV group, each for the same number of rows, so that a batch of blocks is one copy a group. Buffers go round between the engine
thread (copy-out) and the storage thread (checksum and write); a deque's append and pop are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvd.types import KvGroup


class StagingBuffer:
    """Rows of ``max_blocks`` blocks in every group."""

    __slots__ = ("_regions", "_row_bytes", "max_blocks")

    def __init__(self, groups: Sequence[KvGroup], max_blocks: int, allocate: Callable[[int], memoryview]) -> None:
        self.max_blocks = max_blocks
        self._row_bytes = {group.name: group.row_bytes for group in groups}
        self._regions = {group.name: allocate(max(1, group.row_bytes * max_blocks)) for group in groups}

    def rows(self, group: str, num_blocks: int, first: int = 0) -> memoryview:
        """The memory of ``num_blocks`` rows from row ``first`` on."""
        row_bytes = self._row_bytes[group]
        return self._regions[group][first * row_bytes : (first + num_blocks) * row_bytes]


class StagingPool:
    """``num_buffers`` buffers of at most ``buffer_bytes`` each (one block at least), of the executor's memory (``BlockIO.host_memory``)."""

    def __init__(self, groups: Sequence[KvGroup], *, buffer_bytes: int, num_buffers: int, allocate: Callable[[int], memoryview]) -> None:
        block_bytes = max(1, sum(group.row_bytes for group in groups))
        self.max_blocks = max(1, buffer_bytes // block_bytes)
        self._free = deque(StagingBuffer(groups, self.max_blocks, allocate) for _ in range(num_buffers))

    def take(self) -> StagingBuffer | None:
        """A free buffer, or None while all are under way. It is the one given back last: its pages are there already, and perhaps still in a cache."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, buffer: StagingBuffer) -> None:
        self._free.append(buffer)
