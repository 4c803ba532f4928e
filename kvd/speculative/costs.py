"""What steps take, by how many positions they compute: measured as they run.

A step of few rows reads all of the weights for each of them, so that some further positions cost next to nothing; from some number on each costs its share. Where
that is depends on the model, the kernels and the processor, and jumps with the tiles of the matrix products: so each number of positions has a time of its own, from nine on some neighbours
have one together, lest it take hundreds of steps to know them. Those in between and beyond are guessed, a little in favour of what is not known. Times that are not measured again grow old and
are forgotten, so that what was too slow once is tried again.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum

_SMOOTHING = 0.25
_GUESSED_SHARE = 0.04
"""What a further position is thought to add, as a part of the step, while one number of positions alone is known: little, so that it is tried."""
_GUESSED_SLOPE = 0.5
"""Else what it has cost up to the largest number known, times this."""
_GROUPS = ((8, 1), (32, 4), (128, 16))
"""Up to so many positions, groups of so many have a time together; beyond, of ``_LARGEST_GROUP``."""
_LARGEST_GROUP = 64
_NUM_NEEDED = 3
"""Measurements that make a time known, by the least of them: one or two may have been disturbed, and what seems slow is not measured again for long."""
_AGE_STEPS = 1024
"""Steps after which a time that was not measured again is forgotten."""


class Kind(IntEnum):
    """How a step's rows got their tokens: one each, as quick as they come; proposed by lookup; what a constraint leaves; proposed by a draft model, whose time is in it."""

    PLAIN = 0
    LOOKUP = 1
    FORCED = 2
    MODEL = 3


def _group(num_positions: int) -> int:
    """The largest number of positions of the group that these belong to."""
    size = next((size for most, size in _GROUPS if num_positions <= most), _LARGEST_GROUP)
    return -(-num_positions // size) * size


class _Times:
    """Of one kind, by groups."""

    __slots__ = ("_measured", "_positions")

    def __init__(self) -> None:
        self._measured: dict[int, tuple[float, int, int]] = {}
        """By positions: seconds, measurements, and the number of the step that was measured last."""
        self._positions: list[int] = []
        """Those with enough measurements, ascending."""

    def note(self, num_positions: int, seconds: float, step: int) -> None:
        group = _group(num_positions)
        before, count, _ = self._measured.get(group, (seconds, 0, 0))
        if count < _NUM_NEEDED:
            self._measured[group] = (min(before, seconds), count + 1, step)
            if count + 1 == _NUM_NEEDED:
                self._positions.insert(bisect_left(self._positions, group), group)
        else:
            self._measured[group] = (before + _SMOOTHING * (min(seconds, 2 * before) - before), count, step)

    def forget_before(self, step: int) -> None:
        for num_positions in [each for each, entry in self._measured.items() if entry[2] < step]:
            del self._measured[num_positions]
        self._positions = [each for each in self._positions if each in self._measured]

    def seconds(self, num_positions: int) -> float | None:
        known = self._positions
        if not known:
            return None
        group = _group(num_positions)
        at = bisect_left(known, group)
        if at < len(known) and known[at] == group:
            return self._measured[group][0]
        if at == 0:  # fewer than were ever measured: at best they take their share, so they will be measured
            return self._measured[known[0]][0] * num_positions / known[0]
        low = known[at - 1]
        below = self._measured[low][0]
        if at == len(known):
            return below + self._slope() * (num_positions - low)
        above = self._measured[known[at]][0]
        return below + (above - below) * (num_positions - low) / (known[at] - low)

    def _slope(self) -> float:
        """Seconds that a position beyond those known is thought to add."""
        first, last = self._positions[0], self._positions[-1]
        seconds = self._measured[last][0]
        if first == last:
            return _GUESSED_SHARE * seconds
        return _GUESSED_SLOPE * max(0.0, seconds - self._measured[first][0]) / (last - first)


class StepCosts:
    """Times of the daemon's steps in which every row decodes."""

    def __init__(self) -> None:
        self._times = {kind: _Times() for kind in Kind}
        self._step = 0

    def note(self, kind: Kind, num_positions: int, seconds: float) -> None:
        """A step of this kind took so long."""
        self._step += 1
        self._times[kind].note(num_positions, seconds, self._step)
        if self._step % _AGE_STEPS == 0:
            for times in self._times.values():
                times.forget_before(self._step - _AGE_STEPS)

    def seconds(self, kind: Kind, num_positions: int) -> float:
        """What such a step is thought to take; 1.0, and a little more a position, while nothing was measured."""
        measured = self._times[kind].seconds(num_positions)
        if measured is not None:
            return measured
        for other in (Kind.LOOKUP, Kind.PLAIN, Kind.MODEL):
            measured = self._times[other].seconds(num_positions)
            if measured is not None:
                return measured
        return 1 + _GUESSED_SHARE * num_positions
