"""The statistics of paired runs: quantiles, and the ratio of two sides with its interval."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The 97.5 % quantile of Student's t by degrees of freedom, 1 to 30.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio over pairs: its centre, and its 95 % interval or, of few pairs, their range."""

    mean: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """The geometric mean of at least one ratio, with Student's t over the logarithms; the interval of a single one is unbounded."""
    logs = [math.log(each) for each in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf, len(logs))
    quantile = _T_975[min(len(logs) - 1, len(_T_975)) - 1]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def median_ratio(ratios: Sequence[float]) -> Ratio:
    """The median of at least one ratio, with the percentile bootstrap's interval (Efron 1979; resampled by a fixed seed, so that a table can be made again).

    One noisy pair moves a median little. The bootstrap can't reach beyond what it saw: of fewer than six pairs the interval is simply their range.
    """
    centre = statistics.median(ratios)
    if len(ratios) < 2:
        return Ratio(centre, 0.0, math.inf, len(ratios))
    if len(ratios) < 6:
        return Ratio(centre, min(ratios), max(ratios), len(ratios))
    draw = random.Random(len(ratios))  # noqa: S311  resampling, not secrets
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return Ratio(centre, percentile(medians, 2.5), percentile(medians, 97.5), len(ratios))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of at least one value lie, between two neighbours by linear interpolation."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    if place == below or ordered[below] == ordered[above]:  # infinite ones have no difference
        return ordered[below]
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
