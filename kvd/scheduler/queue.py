"""The sequences that wait for blocks and a row: first come, first served, background work behind users."""

from __future__ import annotations

import heapq

from kvd.scheduler.request import Sequence

_MIN_STALE = 64


class WaitingQueue:
    """A heap by ``Sequence.order`` with lazy deletion, so that a preempted sequence takes its old place and an abort costs no search."""

    __slots__ = ("_heap", "_num_waiting", "_ticket")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], int, Sequence]] = []
        self._ticket = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        assert sequence.queue_ticket == 0, "a sequence waits once"
        self._ticket += 1
        sequence.queue_ticket = self._ticket
        self._num_waiting += 1
        heapq.heappush(self._heap, (sequence.order, self._ticket, sequence))

    def first(self) -> Sequence | None:
        heap = self._heap
        while heap:
            _, ticket, sequence = heap[0]
            if sequence.queue_ticket == ticket:
                return sequence
            heapq.heappop(heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out; nothing happens to one that does not wait."""
        if sequence.queue_ticket == 0:
            return
        sequence.queue_ticket = 0
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + _MIN_STALE:
            self._heap = [entry for entry in self._heap if entry[2].queue_ticket == entry[1]]
            heapq.heapify(self._heap)

    def sequences(self) -> list[Sequence]:
        """Everyone who waits, in no order, for audits."""
        return [sequence for _, ticket, sequence in self._heap if sequence.queue_ticket == ticket]
