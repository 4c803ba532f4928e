"""Which blocks are to be copied to disk, by the write policy: those that wait for their turn, pinned ones first, those that are under way, and those that
have to stay in memory a while first. The planner's own; one thread. Every event costs O(1)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import StrEnum

from kvd.storage.node_index import IndexNode
from kvd.types import BlockHash

HOT_USES = 2
MAX_DWELLING = 65536
"""Blocks that dwell at once; one used once is not written before the end beyond."""


class WritePolicy(StrEnum):
    """Which blocks are written while the daemon runs. At the clean end every block in memory is, whatever the policy."""

    SELECTIVE = "selective"
    """Pinned, used twice, or used once but in memory for ``dwell_s``."""
    THROUGH = "through"
    """Every one."""
    SHUTDOWN = "shutdown"
    """Pinned."""


class HotBlocks:
    """A node is in at most one place, and its ``queued`` is set while it waits or is under way. ``everything``: all blocks count as hot (the last checkpoint)."""

    def __init__(self, policy: WritePolicy, max_under_way: int, *, dwell_s: float) -> None:
        self._policy = policy
        self._max_under_way = max_under_way
        self._dwell_s = dwell_s
        self._waiting: dict[BlockHash, IndexNode] = {}
        self._waiting_pinned: dict[BlockHash, IndexNode] = {}
        self._dwelling: OrderedDict[BlockHash, tuple[IndexNode, float]] = OrderedDict()
        """With the time from which on each may be written; the oldest first, for all dwell equally long."""
        self._under_way: dict[BlockHash, BlockHash | None] = {}
        """With the block above each."""
        self.above_under_way: Counter[BlockHash] = Counter()
        """How many are under way below each: without its bytes theirs would be of no use."""
        self._refused: set[BlockHash] = set()
        """Those that found no room on disk; each gets another try with its next use."""
        self.everything = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._waiting_pinned)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def num_refused(self) -> int:
        return len(self._refused)

    @property
    def num_dwelling(self) -> int:
        return len(self._dwelling)

    @property
    def is_full(self) -> bool:
        """Whether as many are under way as may be."""
        return len(self._under_way) >= self._max_under_way

    def consider(self, node: IndexNode, now_s: float) -> None:
        """Queue the node if it is hot, in memory and not on disk; if it is not hot yet, its dwell time begins. ``now_s``: monotonic."""
        if node.stored_bytes or not node.is_resident:
            return
        key = node.block_hash
        if node.num_pins:
            if not node.queued or self._waiting.pop(key, None) is not None:
                self._dwelling.pop(key, None)
                node.queued = True
                self._refused.discard(key)
                self._waiting_pinned[key] = node
        elif node.queued:
            return
        elif self._is_hot(node):
            self._dwelling.pop(key, None)
            node.queued = True
            self._refused.discard(key)
            self._waiting[key] = node
        elif self._policy is WritePolicy.SELECTIVE and len(self._dwelling) < MAX_DWELLING:
            self._dwelling.setdefault(key, (node, now_s + self._dwell_s))

    def consider_chain(self, node: IndexNode, now_s: float) -> None:
        """As ``consider``, and before it those above it: without them it would be of no use on disk."""
        chain: list[IndexNode] = []
        above: IndexNode | None = node
        while above is not None and above.is_resident and not above.queued and not above.stored_bytes:
            chain.append(above)
            above = above.parent
        for each in reversed(chain):
            self.consider(each, now_s)

    def _is_hot(self, node: IndexNode) -> bool:
        if self.everything or self._policy is WritePolicy.THROUGH:
            return True
        return self._policy is WritePolicy.SELECTIVE and node.uses >= HOT_USES

    def discard(self, node: IndexNode) -> bool:
        """The node has left memory; whether it waited to be written."""
        self._dwelling.pop(node.block_hash, None)
        self._refused.discard(node.block_hash)
        waited = self._waiting.pop(node.block_hash, None) or self._waiting_pinned.pop(node.block_hash, None)
        if waited is None:
            return False
        node.queued = False
        return True

    def is_under_way(self, node: IndexNode) -> bool:
        return node.block_hash in self._under_way

    def take(self) -> IndexNode | None:
        """The next node, under way from now on; None if nothing waits or enough is under way."""
        queue = self._waiting_pinned or self._waiting
        if not queue or self.is_full:
            return None
        key, node = next(iter(queue.items()))
        self._begin(node)  # first: a thread that counts beside this one finds it in one place at least
        return queue.pop(key)

    def take_dwelt(self, now_s: float) -> IndexNode | None:
        """The node that has been longest in memory, if that is long enough, under way from now on. Only while nothing hot waits, and at most half of what may
        be under way: the other half is for what becomes hot meanwhile."""
        if not self._dwelling or self.num_waiting or len(self._under_way) >= max(1, self._max_under_way // 2):
            return None
        key, (node, from_s) = next(iter(self._dwelling.items()))
        if now_s < from_s:
            return None
        self._begin(node)
        del self._dwelling[key]
        node.queued = True
        return node

    def _begin(self, node: IndexNode) -> None:
        if node.block_hash in self._under_way:  # a copy of before it was forgotten
            return
        above = None if node.parent is None else node.parent.block_hash
        self._under_way[node.block_hash] = above
        if above is not None:
            self.above_under_way[above] += 1

    def release(self, block_hash: BlockHash, node: IndexNode | None) -> None:
        """A block is no longer under way."""
        above = self._under_way.pop(block_hash, None)
        if above is not None:
            self.above_under_way[above] -= 1
            if not self.above_under_way[above]:
                del self.above_under_way[above]
        if node is not None and block_hash not in self._waiting and block_hash not in self._waiting_pinned:
            node.queued = False

    def refuse(self, node: IndexNode) -> None:
        """There is no room on disk for a block that was under way."""
        self.release(node.block_hash, node)
        if node.is_resident:
            self._refused.add(node.block_hash)

    def clear_waiting(self) -> None:
        for queue in (self._waiting, self._waiting_pinned):
            for node in queue.values():
                node.queued = False
            queue.clear()
        self._dwelling.clear()
        self._refused.clear()

    def pending(self) -> set[BlockHash]:
        """Every block that waits or is under way."""
        return {*self._waiting, *self._waiting_pinned, *self._under_way}
