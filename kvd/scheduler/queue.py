"""The sequences that wait for blocks and a row, in the order of ``order``: push, first and removal in O(log n)."""

from __future__ import annotations

import heapq
from collections import Counter

from kvd.scheduler.account import Tenant
from kvd.scheduler.order import BACKGROUND, level_at
from kvd.scheduler.ports import Clock
from kvd.scheduler.request import Request, Sequence
from kvd.types import MIN_PRIORITY

_MIN_STALE = 64


class _Entry:
    """A sequence that waits. ``level`` is its class by now, None once it waits no more: what heaps hold of it under another level is stale."""

    __slots__ = ("level", "num_slots", "order", "priority", "sequence", "tenant")

    def __init__(self, sequence: Sequence, level: int, number: int) -> None:
        request = sequence.request
        self.sequence = sequence
        self.tenant = request.tenant
        self.priority = request.priority
        self.num_slots = sequence.num_slots
        self.level: int | None = level
        self.order = (request.rank_s, request.arrival, sequence.choice, number)


_Item = tuple[tuple[float, int, int, int], _Entry]
_Head = tuple[float, tuple[float, int, int, int], int, Tenant]


class _Level:
    """Those of one class by now: a heap a tenant, and a heap of their heads by (counter, order).

    Counters grow while their tenants wait: a head is looked at anew when it comes up. Of a tenant's heads the last posted alone counts.
    """

    __slots__ = ("_heads", "_level", "_num_posted", "_posted", "_queues")

    def __init__(self, level: int) -> None:
        self._level = level
        self._num_posted = 0
        self._queues: dict[Tenant, list[_Item]] = {}
        self._posted: dict[Tenant, _Head] = {}
        self._heads: list[_Head] = []

    def push(self, entry: _Entry) -> None:
        tenant = entry.tenant
        heapq.heappush(self._queues.setdefault(tenant, []), (entry.order, entry))
        posted = self._posted.get(tenant)
        if posted is None or (tenant.counter, entry.order) < posted[:2]:
            heapq.heappush(self._heads, self._post(tenant, entry.order))

    def first(self) -> tuple[float, _Entry] | None:
        """The first, and its tenant's counter."""
        heads = self._heads
        while heads:
            head = heads[0]
            tenant = head[3]
            if self._posted.get(tenant) is not head:
                heapq.heappop(heads)
                continue
            queue = self._queues[tenant]
            while queue and queue[0][1].level != self._level:
                heapq.heappop(queue)
            if not queue:
                heapq.heappop(heads)
                del self._posted[tenant], self._queues[tenant]
                continue
            order, entry = queue[0]
            if head[0] == tenant.counter and head[1] == order:
                return head[0], entry
            heapq.heapreplace(heads, self._post(tenant, order))
        return None

    def _post(self, tenant: Tenant, order: tuple[float, int, int, int]) -> _Head:
        self._num_posted += 1
        head = self._posted[tenant] = (tenant.counter, order, self._num_posted, tenant)
        return head


class WaitingQueue:
    """Entries are deleted lazily, so that an abort costs no search; a preempted sequence takes its old place, by its request's arrival."""

    def __init__(self, clock: Clock, ageing_s: float) -> None:
        self._clock = clock
        self._ageing_s = ageing_s
        self._entries: dict[Sequence, _Entry] = {}
        self._levels: dict[int, _Level] = {}
        self._background: list[_Item] = []
        self._num_of_class: Counter[int] = Counter()
        self._ageing: list[tuple[float, int, _Entry]] = []
        """When entries rise by a class."""
        self._num_items = 0
        """Items pushed since the stale ones were last thrown out."""
        self._number = 0
        self.num_slots = 0
        """Running places that those who wait want, as they were when they began to wait."""
        self.num_tenants = 0
        """Tenants of those who wait, background work aside."""
        self._last_tenant: Tenant | None = None
        """Whose sequence left the queue last."""

    def __len__(self) -> int:
        return len(self._entries)

    def num_until(self, priority: int) -> int:
        """How many wait in this class and those before it."""
        return sum(count for each, count in self._num_of_class.items() if each <= priority)

    def lift(self, tenant: Tenant) -> None:
        """The tenant has a new request: it starts no lower than those who wait. The counters must be up to date."""
        if tenant.num_waiting:
            return
        lowest = min((first[0] for level in self._levels.values() if (first := level.first()) is not None), default=None)
        if lowest is None:
            lowest = self._last_tenant.counter if self._last_tenant is not None else 0.0
        tenant.counter = max(tenant.counter, lowest)

    def displaced(self, priority: int, num_waiting: int) -> Request | None:
        """Who gives up its place in a full queue for a new request of this class, of a tenant of which so many wait; None: the new one is the last itself.

        Last is the least urgent class by now, in it the tenant of which most wait, of these the last in the order: else one tenant could keep all others out. Never one
        that has begun, nor the daemon's own work. O(n), where it is not plain that there is none.
        """
        if max(self._num_of_class, default=priority) <= priority and self.num_tenants == (num_waiting > 0):
            return None
        last: tuple[int, int] = (priority, num_waiting + 1)
        found: _Entry | None = None
        for entry in self._entries.values():
            request = entry.sequence.request
            if entry.level is None or request.is_internal or request.has_been_seated:
                continue
            key = (entry.level, entry.tenant.num_waiting)
            if key > last or (found is not None and key == last and entry.order > found.order):
                last, found = key, entry
        return None if found is None else found.sequence.request

    def push(self, sequence: Sequence) -> None:
        """The sequence waits."""
        assert sequence not in self._entries, "a sequence waits once"
        request = sequence.request
        self._number += 1
        level = level_at(request.priority, request.submitted_s, self._clock.monotonic(), self._ageing_s)
        entry = self._entries[sequence] = _Entry(sequence, level, self._number)
        self._num_of_class[entry.priority] += 1
        self.num_slots += entry.num_slots
        if level >= BACKGROUND:
            heapq.heappush(self._background, (entry.order, entry))
            self._num_items += 1
            return
        self.num_tenants += not entry.tenant.num_waiting
        entry.tenant.num_waiting += 1
        self._enter(entry, level)

    def first(self) -> Sequence | None:
        """Who is next, if anybody waits."""
        if not self._entries:
            return None
        self._age()
        most_urgent = min(self._num_of_class)
        best = None
        for number, level in self._levels.items():
            if number <= most_urgent and (first := level.first()) is not None:
                counter, entry = first
                if best is None or (counter, entry.order) < (best[0], best[1].order):
                    best = (counter, entry)
        if best is not None:
            return best[1].sequence
        while self._background[0][1].level is None:
            heapq.heappop(self._background)
        return self._background[0][1].sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out; nothing happens to one that does not wait."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return
        entry.level = None
        self.num_slots -= entry.num_slots
        self._num_of_class[entry.priority] -= 1
        if not self._num_of_class[entry.priority]:
            del self._num_of_class[entry.priority]
        if entry.priority < BACKGROUND:
            entry.tenant.num_waiting -= 1
            self.num_tenants -= not entry.tenant.num_waiting
            self._last_tenant = entry.tenant
        if self._num_items > 4 * len(self._entries) + _MIN_STALE:
            self._rebuild()

    def sequences(self) -> list[Sequence]:
        """Everyone who waits, in no order, for audits."""
        return list(self._entries)

    def check_invariants(self) -> None:
        """Everybody is counted once."""
        entries = list(self._entries.values())
        assert all(entry.level is not None for entry in entries), "somebody waits who doesn't"
        assert dict(self._num_of_class) == dict(Counter(entry.priority for entry in entries)), "classes are miscounted"
        assert self.num_slots == sum(entry.num_slots for entry in entries), "the places they want are miscounted"
        waiting = Counter(entry.tenant for entry in entries if entry.priority < BACKGROUND)
        assert all(tenant.num_waiting == count for tenant, count in waiting.items()), "a tenant's waiting are miscounted"
        assert self.num_tenants == len(waiting), "waiting tenants are miscounted"

    def _enter(self, entry: _Entry, level: int) -> None:
        entry.level = level
        if level not in self._levels:
            self._levels[level] = _Level(level)
        self._levels[level].push(entry)
        self._num_items += 1
        if level > MIN_PRIORITY:
            rises_s = entry.sequence.request.submitted_s + (entry.priority - level + 1) * self._ageing_s
            heapq.heappush(self._ageing, (rises_s, entry.order[3], entry))
            self._num_items += 1

    def _age(self) -> None:
        """Those who have waited long enough rise."""
        now_s, ageing = self._clock.monotonic(), self._ageing
        while ageing and ageing[0][0] <= now_s:
            entry = heapq.heappop(ageing)[2]
            if entry.level is not None:
                submitted_s = entry.sequence.request.submitted_s
                self._enter(entry, min(entry.level - 1, level_at(entry.priority, submitted_s, now_s, self._ageing_s)))

    def _rebuild(self) -> None:
        """Throw out what is stale."""
        entries = list(self._entries.values())
        self._levels, self._ageing, self._background, self._num_items = {}, [], [], 0
        for entry in entries:
            assert entry.level is not None, "it waits"
            if entry.priority >= BACKGROUND:
                self._background.append((entry.order, entry))
                self._num_items += 1
            else:
                self._enter(entry, entry.level)
        heapq.heapify(self._background)
