"""Which block leaves first: retention priority before all, a policy within a priority, a heap with lazy deletion to keep the order."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.cache.prefix_tree import Node
from kvd.types import BlockHash

MAX_PRIORITY = 100
_MIN_STALE = 64
_TOKENS_PER_COST = 4096
_REUSE_EXPONENT = 0.75
_COST_EXPONENT = 0.125
_MAX_COUNTED_USES = 8
_WINDOW_POOLS = 4


class Evictable(Protocol):
    """What a policy may look at, and the two numbers that it may set: ``uses`` when the block enters, ``floor`` when it is used."""

    namespace: Namespace
    block_hash: BlockHash
    origin: BlockOrigin
    depth: int
    uses: int
    last_used: int
    priority: int
    floor: float


class EvictionPolicy(Protocol):
    """Ranks the leaves that may be evicted, within their retention priority."""

    def priority(self, node: Evictable) -> float:
        """The lowest leaves first. Asked when the block becomes evictable; the answer stands until the block is used again."""

    def on_insert(self, node: Evictable) -> None:
        """The block entered the tree; its uses are counted as its maker knows them."""

    def on_reuse(self, node: Evictable) -> None:
        """A further request is given the block; its uses are not yet counted."""

    def on_touch(self, node: Evictable) -> None:
        """A use of the block begins or ends, or its retention priority changes."""

    def on_evicted(self, node: Evictable) -> None:
        """The block leaves to make room."""

    def forget(self, has_salt: Callable[[bytes], bool]) -> None:
        """Nothing that is known of blocks which left stays known where ``has_salt`` says so of their namespace's salt."""


class LruPolicy:
    """Least recently used first. ``last_used`` is a logical counter, so that the order does not depend on a clock."""

    def priority(self, node: Evictable) -> float:
        return node.last_used

    def on_insert(self, node: Evictable) -> None:
        pass

    def on_reuse(self, node: Evictable) -> None:
        pass

    def on_touch(self, node: Evictable) -> None:
        pass

    def on_evicted(self, node: Evictable) -> None:
        pass

    def forget(self, has_salt: Callable[[bytes], bool]) -> None:
        pass


class _Lives:
    """What became of the blocks of one retention priority: by their uses, how many were used again and how many left unused.

    ``floor`` is GreedyDual's L: the value of the last one that left.
    """

    __slots__ = ("evicted", "floor", "reused")

    def __init__(self) -> None:
        self.floor = 0.0
        self.reused = [1.0] * (_MAX_COUNTED_USES + 1)
        self.evicted = [1.0] * (_MAX_COUNTED_USES + 1)


class CostPolicy:
    """GreedyDual: least value first, where value = L + retention, and L is the value of the last block that left (Young, "The k-server dual and
    loose competitiveness for paging", 1994; with frequency as GDSF: Cherkasova, "Improving WWW proxies performance with GreedyDual-Size-Frequency caching", 1998).

    The retention of a block is (probability of reuse) ** 3/4 x (recompute cost) ** 1/8. GDSF takes the number of uses itself for the first factor; here it is
    measured: of the blocks with so many uses that came to an end, one way or the other, the share that was used again. The cost of computing a block
    again grows with its position p as 1 + p / 4096. Both enter as roots: reuse grows rarer with idle time, so that twice the chance is not worth twice the
    wait (docs/benchmarks-trace.md has the measurements). The value is fixed when a use begins or ends, not when a block becomes a leaf: else a path that nobody
    wants would be young again at each of its blocks.

    The uses of the last ``num_remembered`` blocks that left are remembered by their hash, so that one that comes back does not begin anew. ``on_evicted`` and the
    rest are O(1). Counts are halved when they reach four pools' worth of blocks, so that old habits fade.
    """

    def __init__(self, num_remembered: int, block_size_tokens: int) -> None:
        self._num_remembered = num_remembered
        self._window = float(_WINDOW_POOLS * num_remembered)
        self._cost_per_block = block_size_tokens / _TOKENS_PER_COST
        self._remembered: OrderedDict[BlockHash, tuple[int, bytes]] = OrderedDict()  # uses, and the namespace's salt
        self._lives = [_Lives() for _ in range(MAX_PRIORITY + 1)]

    def priority(self, node: Evictable) -> float:
        lives, uses = self._lives[node.priority], min(node.uses, _MAX_COUNTED_USES)
        reused = lives.reused[uses]
        chance = reused / (reused + lives.evicted[uses])
        cost = 1.0 + node.depth * self._cost_per_block
        return float(node.floor + chance**_REUSE_EXPONENT * cost**_COST_EXPONENT)

    def on_insert(self, node: Evictable) -> None:
        remembered, _ = self._remembered.pop(node.block_hash, (0, b""))
        if node.origin is BlockOrigin.RESTORED:
            node.uses = max(node.uses, remembered)  # the disk has counted the same uses
        else:
            node.uses += remembered
        self.on_touch(node)

    def on_reuse(self, node: Evictable) -> None:
        lives, uses = self._lives[node.priority], min(node.uses, _MAX_COUNTED_USES)
        lives.reused[uses] += 1
        self._fade(lives, uses)

    def on_touch(self, node: Evictable) -> None:
        node.floor = self._lives[node.priority].floor

    def on_evicted(self, node: Evictable) -> None:
        lives, uses = self._lives[node.priority], min(node.uses, _MAX_COUNTED_USES)
        lives.floor = max(lives.floor, self.priority(node))
        lives.evicted[uses] += 1
        self._fade(lives, uses)
        self._remembered[node.block_hash] = (node.uses, node.namespace.tenant_salt)
        if len(self._remembered) > self._num_remembered:
            self._remembered.popitem(last=False)

    def forget(self, has_salt: Callable[[bytes], bool]) -> None:
        self._remembered = OrderedDict((key, each) for key, each in self._remembered.items() if not has_salt(each[1]))

    def _fade(self, lives: _Lives, uses: int) -> None:
        if lives.reused[uses] + lives.evicted[uses] > self._window:
            lives.reused[uses] /= 2
            lives.evicted[uses] /= 2


def eviction_policy(name: str, num_blocks: int, block_size_tokens: int) -> EvictionPolicy:
    """The policy of that name, ``lru`` or ``cost``, for a pool of ``num_blocks``."""
    return CostPolicy(num_blocks, block_size_tokens) if name == "cost" else LruPolicy()


class EvictionQueue:
    """The evictable leaves, lowest retention priority first and in the policy's order within it; push, discard and pop are O(log n) amortised.

    A node's ``queue_ticket`` names its one valid heap entry (0: none). Entries of nodes that were discarded stay in the heap
    until they surface or outnumber the valid ones, when the heap is rebuilt.
    """

    __slots__ = ("_heap", "_num_valid", "_policy", "_ticket")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[int, float, int, Node]] = []
        self._ticket = 0
        self._num_valid = 0

    def __len__(self) -> int:
        return self._num_valid

    def push(self, node: Node) -> None:
        assert node.queue_ticket == 0, "a node is queued once"
        self._ticket += 1
        node.queue_ticket = self._ticket
        self._num_valid += 1
        heapq.heappush(self._heap, (node.priority, self._policy.priority(node), self._ticket, node))

    def discard(self, node: Node) -> None:
        """Take a queued node out of the order."""
        assert node.queue_ticket != 0, "only a queued node can be discarded"
        node.queue_ticket = 0
        self._num_valid -= 1
        if len(self._heap) > 2 * self._num_valid + _MIN_STALE:
            self._heap = [entry for entry in self._heap if entry[3].queue_ticket == entry[2]]
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """The first node of the order, no longer queued; None if there is none."""
        heap = self._heap
        while heap:
            _, _, ticket, node = heapq.heappop(heap)
            if node.queue_ticket == ticket:
                node.queue_ticket = 0
                self._num_valid -= 1
                return node
        return None

    def queued(self) -> list[tuple[int, Node]]:
        """Every queued node and the retention priority that it was queued with, in no order, for audits."""
        return [(priority, node) for priority, _, ticket, node in self._heap if node.queue_ticket == ticket]
