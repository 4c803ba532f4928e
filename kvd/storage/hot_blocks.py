"""Which blocks are to be copied to disk: those that wait for their turn, pinned ones first, and those that are under way. The planner's own; one thread."""

from __future__ import annotations

from kvd.storage.node_index import IndexNode
from kvd.types import BlockHash

HOT_USES = 2


class HotBlocks:
    """A node is in at most one place, and then its ``queued`` is set. ``everything``: blocks used once count as hot too (the last checkpoint)."""

    def __init__(self, max_under_way: int) -> None:
        self._max_under_way = max_under_way
        self._waiting: dict[BlockHash, IndexNode] = {}
        self._waiting_pinned: dict[BlockHash, IndexNode] = {}
        self._under_way: set[BlockHash] = set()
        self.everything = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._waiting_pinned)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def consider(self, node: IndexNode) -> None:
        """Queue the node if it is hot, in memory and not on disk."""
        if node.stored_bytes or not node.is_resident:
            return
        key = node.block_hash
        if node.num_pins:
            if not node.queued or self._waiting.pop(key, None) is not None:
                node.queued = True
                self._waiting_pinned[key] = node
        elif not node.queued and (node.uses >= HOT_USES or self.everything):
            node.queued = True
            self._waiting[key] = node

    def discard(self, node: IndexNode) -> bool:
        """Take a node that still waits out again; whether it did."""
        waited = self._waiting.pop(node.block_hash, None) or self._waiting_pinned.pop(node.block_hash, None)
        if waited is None:
            return False
        node.queued = False
        return True

    def take(self) -> IndexNode | None:
        """The next node, under way from now on; None if nothing waits or enough is under way."""
        queue = self._waiting_pinned or self._waiting
        if not queue or len(self._under_way) >= self._max_under_way:
            return None
        node = queue.pop(next(iter(queue)))
        self._under_way.add(node.block_hash)
        return node

    def release(self, block_hash: BlockHash, node: IndexNode | None) -> None:
        """A block is no longer under way."""
        self._under_way.discard(block_hash)
        if node is not None and block_hash not in self._waiting and block_hash not in self._waiting_pinned:
            node.queued = False

    def clear_waiting(self) -> None:
        for queue in (self._waiting, self._waiting_pinned):
            for node in queue.values():
                node.queued = False
            queue.clear()

    def pending(self) -> set[BlockHash]:
        """Every block that waits or is under way."""
        return {*self._waiting, *self._waiting_pinned, *self._under_way}
