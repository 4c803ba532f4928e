"""When something is due for a call: a heap in which what belongs to finished calls is skipped, and swept out before it piles up."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from kvd_client.calls import Call


class Due(Enum):
    """What a timer is for."""

    DEADLINE = auto()
    RESEND = auto()
    UNREACHABLE = auto()


@dataclass(frozen=True, slots=True)
class Timer:
    """``opening`` is the number of conversations there had been when it was set."""

    at: float
    due: Due
    call: Call
    opening: int


class Timers:
    """All timers of a session; ``is_live`` says whether a call is still open."""

    def __init__(self, is_live: Callable[[Call], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, timer: Timer) -> None:
        """Add a timer; O(log n), the sweeps amortised."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[2].call)]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, (timer.at, next(self._numbers), timer))

    def take_due(self, now: float) -> Iterator[Timer]:
        """Remove and yield what is due, oldest first; timers may be set and calls may end meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if self._is_live(timer.call):
                yield timer

    def next_at(self) -> float | None:
        """When the next one is due at the earliest."""
        return self._heap[0][0] if self._heap else None

    def clear(self) -> None:
        self._heap.clear()
