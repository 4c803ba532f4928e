"""Pairs: the same measurement in the same round on two targets, and the ratios of their figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.bench.plan import METRICS
from kvd.bench.ratios import Ratio, median_ratio
from kvd.bench.results import Result

MAX_APART_S = 3600.0
"""Samples of one round that lie further apart are no pair: a target that was added to a result later met another machine, in all that changes by the hour."""
_UNEVEN = frozenset({"multi-turn", "arriving"})
"""What is asked depends on the answers there, or on how many of them came."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times better ``ours`` is than ``theirs`` in one figure: above 1 is better, for rates and for times. The medians are of the pairs alone."""

    key: str
    metric: str
    ours: str
    theirs: str
    our_median: float
    their_median: float
    ratio: Ratio


def compare(result: Result, key: str, metric: str, ours: str, theirs: str, *, their_metric: str | None = None) -> Comparison | None:
    """The median of the paired ratios, one a round; None where the two have no pair. ``their_metric`` is for a figure that is held against another one.

    Repeats within a round share the server's process and the minute: they are one median, not several pairs.
    """
    mine, other = result.by_round(key, ours, metric), result.by_round(key, theirs, their_metric or metric)
    both = [(mine[round_], other[round_]) for round_ in sorted(mine.keys() & other.keys())]
    pairs = [(one.value, two.value) for one, two in both if abs(one.at_unix_s - two.at_unix_s) <= MAX_APART_S]
    if not pairs:
        return None
    ratio = median_ratio([METRICS[metric].ratio(*pair) for pair in pairs])
    our_median, their_median = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Comparison(key, metric, ours, theirs, our_median, their_median, ratio)


def best(result: Result, key: str, metric: str, targets: Sequence[str]) -> str | None:
    """The target with the best median of a figure; None where none has it."""
    medians = {name: statistics.median(found.values()) for name in targets if (found := result.values(key, name, metric))}
    if not medians:
        return None
    return (max if METRICS[metric].is_rate else min)(medians, key=medians.__getitem__)


def all_comparisons(result: Result) -> Iterator[Comparison]:
    """Each other target of a point against the point's baseline, in every figure."""
    for key in result.point_keys():
        first, *others = result.targets_of(key)
        metrics = result.metrics_of(key)
        for other in others:
            for metric in metrics:
                if metric in METRICS and (found := compare(result, key, metric, other, first)):
                    yield found


def differing_answers(result: Result) -> list[str]:
    """Points of speculation whose targets answered differently: that is not the same work, token for token."""
    lines = []
    for key in result.point_keys():
        texts: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
        for each in result.samples:
            if each["key"] == key and each["point"]["scenario"] in {"repetitive", "random"}:
                found = tuple(request["text_crc32"] for request in each["requests"])
                texts.setdefault((each["round"], each["repeat"]), {})[each["target"]] = found
        differ = [place for place, by_target in texts.items() if len(set(by_target.values())) > 1]
        if differ:
            lines.append(f"{key}: the targets answered differently in {len(differ)} of {len(texts)} measurements")
    return lines


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
            and each["point"]["scenario"] not in _UNEVEN
            and "n" not in each["point"]
        }
        if len(set(counts.values())) > 1:
            sums = ", ".join(f"{name} {sum(tokens)}" for name, tokens in counts.items())
            lines.append(f"{key}: the targets count different prompt tokens ({sums})")
    return lines


def untold_hits(result: Result) -> list[str]:
    """Targets that never told how many tokens of a prompt they had cached: of their new prompts nobody knows whether they were new to them."""
    tells: dict[str, bool] = {}
    for sample in result.samples:
        told = any(request.get("cached_tokens") is not None for request in sample["requests"])
        tells[sample["target"]] = tells.get(sample["target"], False) or told
    return [
        f"{name} tells no cached tokens: what should be new to it may not have been" for name, has_told in tells.items() if not has_told
    ]
