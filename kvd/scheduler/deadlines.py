"""Requests that must be over, or must have begun, by a time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvd.scheduler.request import Request
from kvd.types import ErrorCode

_MIN_STALE = 64


class Deadlines:
    """A heap by time with lazy deletion: O(log n) a request that names a time, nothing for the others."""

    __slots__ = ("_heap", "_num_added")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request, ErrorCode]] = []
        self._num_added = 0

    def add(self, request: Request) -> None:
        """The request is accepted."""
        command, now_s = request.command, request.submitted_s
        if command.deadline_s:
            self._push(now_s + command.deadline_s, request, ErrorCode.DEADLINE_EXCEEDED)
        if command.queue_timeout_s:
            self._push(now_s + command.queue_timeout_s, request, ErrorCode.QUEUE_TIMEOUT)

    def due(self, now_s: float) -> Iterator[tuple[Request, ErrorCode, str]]:
        """Whose time is over by now, with the code and the reason of their failure. Fail each before the next is asked for: both of its times may be over."""
        heap = self._heap
        while heap and (heap[0][0] <= now_s or heap[0][2].is_over):
            _, _, request, code = heapq.heappop(heap)
            if not _is_moot(request, code):
                yield request, code, _reason(request, code)

    @property
    def next_s(self) -> float | None:
        """When the next one is due; None: no request names a time."""
        return self._heap[0][0] if self._heap else None

    def _push(self, due_s: float, request: Request, code: ErrorCode) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (due_s, self._num_added, request, code))
        if self._num_added % _MIN_STALE == 0:
            self._heap = [each for each in self._heap if not _is_moot(each[2], each[3])]
            heapq.heapify(self._heap)


def _is_moot(request: Request, code: ErrorCode) -> bool:
    return request.is_over or (code is ErrorCode.QUEUE_TIMEOUT and request.first_run_s is not None)


def _reason(request: Request, code: ErrorCode) -> str:
    if code is ErrorCode.QUEUE_TIMEOUT:
        return "the request has not begun to run within its queue_timeout_s"
    return f"the request {'runs' if request.first_run_s is not None else 'has not begun to run'} at the end of its deadline_s"
