"""When a refused client should come again."""

from __future__ import annotations

_SMOOTHING = 0.1
_SHORTEST_S = 0.1
_LONGEST_S = 30.0


class RetryEstimate:
    """An exponential average of the time between two requests' ends."""

    __slots__ = ("_interval_s", "_last_end_s")

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._last_end_s: float | None = None

    def note_end(self, now_s: float) -> None:
        """A request is over."""
        if self._last_end_s is not None:
            self._interval_s += _SMOOTHING * (now_s - self._last_end_s - self._interval_s)
        self._last_end_s = now_s

    def seconds(self, num_waiting: int) -> float:
        """Until a tenth of the queue has gone, within bounds."""
        return min(max(self._interval_s * num_waiting / 10, _SHORTEST_S), _LONGEST_S)
