"""When a refused client should come again."""

from __future__ import annotations

_SMOOTHING = 0.1
_SHORTEST_S = 0.1
_LONGEST_S = 30.0


class RetryEstimate:
    """An exponential average of the time between the ends of two requests that ran, while there are any: what ends in the queue says nothing of how fast it moves."""

    __slots__ = ("_interval_s", "_last_end_s")

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._last_end_s: float | None = None

    def note_busy(self, now_s: float) -> None:
        """A request comes, and there was none."""
        self._last_end_s = now_s

    def note_end(self, now_s: float) -> None:
        """A request that ran is over."""
        assert self._last_end_s is not None, "it came before"
        interval_s = now_s - self._last_end_s
        self._interval_s = interval_s if not self._interval_s else self._interval_s + _SMOOTHING * (interval_s - self._interval_s)
        self._last_end_s = now_s

    def seconds(self, num_before: int) -> float:
        """Until a tenth of those before it in the queue have gone, within bounds."""
        return min(max(self._interval_s * num_before / 10, _SHORTEST_S), _LONGEST_S)
