"""Which block leaves first: a policy gives priorities, a heap with lazy deletion keeps the order."""

from __future__ import annotations

import heapq
from typing import Protocol

from kvd.cache.prefix_tree import Node

_MIN_STALE = 64


class Evictable(Protocol):
    """What a policy may look at."""

    depth: int
    uses: int
    last_used: int


class EvictionPolicy(Protocol):
    """Ranks the leaves that may be evicted."""

    def priority(self, node: Evictable) -> float:
        """The lowest leaves first. Asked once, when the block becomes evictable; it does not change until the block is used again."""


class LruPolicy:
    """Least recently used first. ``last_used`` is a logical counter, so that the order does not depend on a clock."""

    def priority(self, node: Evictable) -> float:
        return node.last_used


class EvictionQueue:
    """The evictable leaves in the policy's order; push, discard and pop are O(log n) amortised.

    A node's ``queue_ticket`` names its one valid heap entry (0: none). Entries of nodes that were discarded stay in the heap
    until they surface or outnumber the valid ones, when the heap is rebuilt.
    """

    __slots__ = ("_heap", "_num_valid", "_policy", "_ticket")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, Node]] = []
        self._ticket = 0
        self._num_valid = 0

    def __len__(self) -> int:
        return self._num_valid

    def push(self, node: Node) -> None:
        assert node.queue_ticket == 0, "a node is queued once"
        self._ticket += 1
        node.queue_ticket = self._ticket
        self._num_valid += 1
        heapq.heappush(self._heap, (self._policy.priority(node), self._ticket, node))

    def discard(self, node: Node) -> None:
        """Take a queued node out of the order."""
        assert node.queue_ticket != 0, "only a queued node can be discarded"
        node.queue_ticket = 0
        self._num_valid -= 1
        if len(self._heap) > 2 * self._num_valid + _MIN_STALE:
            self._heap = [entry for entry in self._heap if entry[2].queue_ticket == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """The first node of the order, no longer queued; None if there is none."""
        heap = self._heap
        while heap:
            _, ticket, node = heapq.heappop(heap)
            if node.queue_ticket == ticket:
                node.queue_ticket = 0
                self._num_valid -= 1
                return node
        return None

    def queued(self) -> list[Node]:
        """Every queued node, in no order, for audits."""
        return [node for _, ticket, node in self._heap if node.queue_ticket == ticket]
