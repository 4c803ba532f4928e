"""Pairs: the same measurement in the same round on two targets, and the ratios of their figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.bench.plan import METRICS
from kvd.bench.ratios import Ratio, median_ratio
from kvd.bench.results import Result


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times better ``ours`` is than ``theirs`` in one figure: above 1 is better, for rates and for times."""

    key: str
    metric: str
    ours: str
    theirs: str
    our_median: float
    their_median: float
    ratio: Ratio


def compare(result: Result, key: str, metric: str, ours: str, theirs: str, *, their_metric: str | None = None) -> Comparison | None:
    """The median of the paired ratios; None where the two have no pair. ``their_metric`` is for a figure that is held against another one."""
    mine, other = result.values(key, ours, metric), result.values(key, theirs, their_metric or metric)
    pairs = [(mine[place], other[place]) for place in sorted(mine.keys() & other.keys()) if mine[place] > 0 and other[place] > 0]
    if not pairs:
        return None
    ratio = median_ratio([METRICS[metric].ratio(*pair) for pair in pairs])
    return Comparison(key, metric, ours, theirs, statistics.median(mine.values()), statistics.median(other.values()), ratio)


def best(result: Result, key: str, metric: str, targets: Sequence[str]) -> str | None:
    """The target with the best median of a figure; None where none has it."""
    medians = {name: statistics.median(found.values()) for name in targets if (found := result.values(key, name, metric))}
    if not medians:
        return None
    return (max if METRICS[metric].is_rate else min)(medians, key=medians.__getitem__)


def all_comparisons(result: Result) -> Iterator[Comparison]:
    """Each other target against the first, in every figure of every point."""
    if not result.targets:
        return
    first, *others = result.targets
    for key in result.point_keys():
        metrics = result.metrics_of(key)
        for other in others:
            for metric in metrics:
                if metric in METRICS and (found := compare(result, key, metric, other, first)):
                    yield found


def uneven_prompts(result: Result) -> list[str]:
    """Points whose targets counted other tokens for the same prompts: their figures are not of the same work."""
    lines = []
    for key in result.point_keys():
        counts = {
            each["target"]: tuple(request["prompt_tokens"] for request in each["requests"])
            for each in result.samples
            if each["key"] == key
            and each["round"] == 0
            and each["repeat"] == 0
            and each["point"]["scenario"] != "multi-turn"
            and "n" not in each["point"]
        }
        if len(set(counts.values())) > 1:
            sums = ", ".join(f"{name} {sum(tokens)}" for name, tokens in counts.items())
            lines.append(f"{key}: the targets count different prompt tokens ({sums})")
    return lines
