"""How long a use wants its blocks kept: priorities, and the instants at which they end.

The cache has no clock: an instant is a number that whoever asks for a retention made, compared with those that ``expire`` is called with.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from kvd.cache.prefix_tree import Node

DEFAULT_PRIORITY = 50
_MIN_STALE = 64


@dataclass(frozen=True, slots=True)
class Retention:
    """``priority`` 0 to 100: the lowest leave first. At ``expires_s`` it counts no more, and without another use the blocks are at priority 0."""

    priority: int = DEFAULT_PRIORITY
    expires_s: float = math.inf


DEFAULT_RETENTION = Retention()


class RetentionBook:
    """Each node's retentions that still count, and when the next of each ends.

    A node has one lasting priority and, as ``timed``, those above it that end: (instant, priority), the soonest first, with falling priorities, so that the
    first one counts. Whatever a longer and no lower one covers is dropped; so a node never has more than there are priorities. Nodes are found by their
    next instant; a heap holds each of these instants, and some that nothing ends at any more.
    """

    __slots__ = ("_due", "_instants", "_on_change")

    def __init__(self, on_change: Callable[[Node], None]) -> None:
        self._on_change = on_change
        self._due: dict[float, dict[Node, None]] = {}
        self._instants: list[float] = []

    def keep(self, node: Node, retention: Retention) -> None:
        """A use of the node, which somebody still holds, wants it kept. O(log n) where there is something new."""
        priority, expires_s = retention.priority, retention.expires_s
        if priority <= node.lasting_priority:
            return
        if expires_s == math.inf:
            node.lasting_priority = priority
            self._set_timed(node, tuple(each for each in node.timed if each[1] > priority))
        elif not any(each[0] >= expires_s and each[1] >= priority for each in node.timed):
            kept = [each for each in node.timed if each[0] > expires_s or each[1] > priority]
            self._set_timed(node, tuple(sorted([*kept, (expires_s, priority)])))

    def forget(self, node: Node) -> None:
        """The node leaves the tree."""
        if node.timed:
            self._set_timed(node, ())

    def expire(self, now_s: float, max_blocks: int) -> int:
        """End what ends by ``now_s``, for at most ``max_blocks`` nodes; how many. O(log n) each, O(1) if there is nothing."""
        num_expired = 0
        while self._instants and self._instants[0] <= now_s and num_expired < max_blocks:
            nodes = self._due.get(self._instants[0])
            if nodes is None:
                heapq.heappop(self._instants)
                continue
            node, _ = nodes.popitem()
            self._set_timed(node, tuple(each for each in node.timed if each[0] > now_s))
            self._on_change(node)
            num_expired += 1
        return num_expired

    def due(self) -> dict[float, dict[Node, None]]:
        """The nodes by their next instant, for audits."""
        return self._due

    def _set_timed(self, node: Node, timed: tuple[tuple[float, int], ...]) -> None:
        before = node.timed[0][0] if node.timed else None
        after = timed[0][0] if timed else None
        node.timed = timed
        node.priority = timed[0][1] if timed else node.lasting_priority
        if before == after:
            return
        if before is not None:
            nodes = self._due[before]
            nodes.pop(node, None)
            if not nodes:
                del self._due[before]
        if after is not None:
            if after not in self._due:
                self._due[after] = {}
                heapq.heappush(self._instants, after)
            self._due[after][node] = None
        if len(self._instants) > 2 * len(self._due) + _MIN_STALE:
            self._instants = list(self._due)
            heapq.heapify(self._instants)
