"""The governor: what holds a copy to disk back, by name, so that persistence stays free on the hot path and nobody has to guess why a block is not on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from kvd.storage.ports import Clock

IDLE_AFTER_S = 1.0


class HeldBy(StrEnum):
    """What held a copy back."""

    NONE = "none"
    RATE = "rate"
    """``checkpoint_bytes_per_s`` is used up."""
    QUEUE = "queue"
    """More requests wait than ``checkpoint_pause_queue_depth``."""
    STAGING = "staging"
    """No buffer is free: the disk is slower than the copies."""
    IN_FLIGHT = "in_flight"
    """As much as may be is under way: ``checkpoint_bytes_per_step`` a step, and a bound on blocks that are copied and not committed."""
    DISK = "disk"
    """The disk budget has no room for a block of this value, or the store is degraded."""


class Governor:
    """How much may be copied now: bytes a second on average, nothing while the queue is deep. It remembers what it said.

    ``queue_depth``, ``on_step``, ``take``, ``hold`` and ``let_go`` are the engine thread's, ``hold_grants`` the planner's; the rest may be read from any thread.
    """

    def __init__(self, *, bytes_per_s: int, burst_bytes: int, pause_queue_depth: int, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._pause_queue_depth = pause_queue_depth
        self._clock = clock
        self._allowance = float(burst_bytes)
        self._last_s = clock.monotonic()
        self._copies_held_by = HeldBy.NONE
        self._grants_held_by = HeldBy.NONE
        self._num_copies_held: Counter[HeldBy] = Counter()
        self._num_grants_held: Counter[HeldBy] = Counter()
        self._step = -1
        self._rests_since_s = 0.0
        self.queue_depth = 0
        self.is_idle = False
        """No step has run for a second: what is worth writing only then may be."""

    @property
    def state(self) -> HeldBy:
        """What holds copies back at the moment."""
        return self._copies_held_by if self._copies_held_by is not HeldBy.NONE else self._grants_held_by

    @property
    def is_paused(self) -> bool:
        return 0 < self._pause_queue_depth < self.queue_depth

    def num_held(self) -> Mapping[str, int]:
        """How often each held a copy back: rounds of the engine, and of the planner for ``in_flight``; blocks for ``disk``."""
        return {name.value: self._num_copies_held[name] + self._num_grants_held[name] for name in HeldBy if name is not HeldBy.NONE}

    def on_step(self, step: int) -> None:
        """The engine's round in which ``step`` is the last one begun. A second round with the same one means that nothing runs."""
        now = self._clock.monotonic()
        if step != self._step:
            self._step, self.is_idle, self._rests_since_s = step, False, 0.0
        elif not self._rests_since_s:
            self._rests_since_s = now
        elif now - self._rests_since_s >= IDLE_AFTER_S:
            self.is_idle = True

    def delay_s(self, num_bytes: int) -> float:
        """Seconds until ``num_bytes`` may be copied, as it looks now."""
        return max(0.0, (num_bytes - self._allowance) / self._bytes_per_s - (self._clock.monotonic() - self._last_s))

    def take(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` may be copied now; counted if so, and held back by name if not."""
        if self.is_paused:
            self.hold(HeldBy.QUEUE)
            return False
        now = self._clock.monotonic()
        self._allowance = min(float(self._burst_bytes), self._allowance + (now - self._last_s) * self._bytes_per_s)
        self._last_s = now
        if self._allowance < num_bytes:
            self.hold(HeldBy.RATE)
            return False
        self._allowance -= num_bytes
        return True

    def hold(self, by: HeldBy) -> None:
        """A copy that was wanted did not begin."""
        self._copies_held_by = by
        self._num_copies_held[by] += 1

    def let_go(self) -> None:
        """Every copy that was wanted has begun."""
        self._copies_held_by = HeldBy.NONE

    def hold_grants(self, by: HeldBy, times: int = 1) -> None:
        """What keeps the planner from asking for more copies, or ``NONE``; ``times`` it did so in this round."""
        self._grants_held_by = by
        if by is not HeldBy.NONE:
            self._num_grants_held[by] += times
