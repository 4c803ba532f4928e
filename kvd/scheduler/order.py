"""Who comes first. One order for those who wait for a place, those whose prompts share a step, and, reversed, those whose blocks are taken.

1. Users before background work, which runs in the order of its arrival.
2. The *class* that a request asked for, lower first, with *ageing*: a request comes with the most urgent class present once it has waited ``ageing_s`` for each class
   between them. It never comes before that class, so that a long backlog of one tenant, however old, doesn't pass another's fresh requests.
3. Within these, the tenant that was served least: the virtual token counter of ``tenants``.
4. Within a tenant, the earliest deadline. One that is missing, or later, counts as ``ageing_s`` after the arrival: no flood of dated requests keeps an undated one waiting for ever.
5. The arrival.

So every wait is bounded: (class - most urgent class) * ``ageing_s`` until nobody's class matters any more, then what the counters let other tenants have, then those of the
same tenant that came within ``ageing_s`` of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.scheduler.request import Request
from kvd.types import MIN_PRIORITY

BACKGROUND = 1 << 10
"""The class of work that runs behind everybody, however long it waits."""


def level_at(priority: int, submitted_s: float, now_s: float, ageing_s: float) -> int:
    """The class of a request by now: one more urgent for each ``ageing_s`` since it was submitted, down to ``MIN_PRIORITY``."""
    if priority >= BACKGROUND:
        return priority
    return max(MIN_PRIORITY, priority - int((now_s - submitted_s) / ageing_s))


class Order:
    """The order among requests at one moment; the tenants' counters must be up to date."""

    __slots__ = ("_ageing_s", "_most_urgent", "_now_s")

    def __init__(self, requests: Iterable[Request], now_s: float, ageing_s: float) -> None:
        self._now_s = now_s
        self._ageing_s = ageing_s
        self._most_urgent = min((request.priority for request in requests), default=0)

    def key(self, request: Request) -> tuple[int, float, float, int]:
        """Lower comes first."""
        level = max(self._most_urgent, level_at(request.priority, request.submitted_s, self._now_s, self._ageing_s))
        return (level, request.tenant.counter, request.rank_s, request.arrival)
