"""Tables of a result: as text for a terminal, and as the Markdown page that compares kvd with its peers and says where it is behind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.bench.comparing import all_comparisons, best, compare
from kvd.bench.plan import HEADLINE, METRICS
from kvd.bench.ratios import Ratio
from kvd.bench.results import Result
from kvd.bench.tables import FOLDERS, aligned, all_figures, bounds, cell, cost_rows, figure, interval, notes, period, started, starts

_HOW_TO = (
    "`make bench` measures kvd alone and writes this page; `make bench PEERS=\"--peer NAME=URL --server-command NAME='COMMAND' …\"` with peers in the same run. On a quiet machine:",
    "one busy neighbour halves everything on two cores, and `other processes' cores` below tells of one. `kvd bench run` measures single scenarios against any server;",
    "[operations.md](operations.md#benchmarks) describes it, its figures and its file.",
)
PEAK_MEMORY = "peak_memory_gib"
"""A claim's metric that is no figure of a point: the most RssAnon + RssShmem that a target was seen with, while it started and under load."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of the page's comparison: our figure at a point against the best of ``peers`` (targets that have no such figure don't count).

    Attributes:
        text: what is measured.
        least: the ratio that is wanted (how many times better); None: only measured.
        against: another figure of our own that ours is held against, in place of peers.
        bound: an absolute bound on our median, for figures in seconds or GiB.
    """

    text: str
    key: str
    metric: str
    ours: str
    peers: tuple[str, ...] = ()
    least: float | None = None
    against: str | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim with what was measured; ``holds`` is None where nothing was asked of it or something is missing."""

    claim: Claim
    peer: str | None
    our_median: float | None
    their_median: float | None
    ratio: Ratio | None
    holds: bool | None


def judge(result: Result, claim: Claim) -> Judged:
    """Look a claim up in a result."""
    mine = result.values(claim.key, claim.ours, claim.metric)
    our_median = statistics.median(mine.values()) if mine else None
    if claim.metric == PEAK_MEMORY and (peak := result.peak_unshared_bytes(claim.ours)) is not None:
        our_median = peak / 2**30
    if claim.bound is not None:
        return Judged(claim, None, our_median, None, None, None if our_median is None else our_median <= claim.bound)
    peer = claim.ours if claim.against else best(result, claim.key, claim.metric, claim.peers)
    found = compare(result, claim.key, claim.metric, claim.ours, peer, their_metric=claim.against) if peer else None
    if found is None:
        return Judged(claim, peer, our_median, None, None, None)
    holds = None if claim.least is None else found.ratio.mean >= claim.least
    return Judged(claim, peer, found.our_median, found.their_median, found.ratio, holds)


def text_tables(result: Result) -> str:
    """A table a point: medians of each target, with their range, and ratios against the first target."""
    lines = [f"{name}: {target['version']}" for name, target in result.targets.items()]
    for key in result.point_keys():
        targets = result.targets_of(key)
        metrics = result.metrics_of(key)
        rows = [("", *targets), *((metric, *(cell(result, key, name, metric) for name in targets)) for metric in metrics)]
        rows += cost_rows(result, key, targets)
        lines += ["", key, *aligned(rows)]
    comparisons = list(all_comparisons(result))
    if comparisons:
        baselines = list(dict.fromkeys(each.theirs for each in comparisons))
        rows = [("point", "figure", "target", "against", "ratio", "from", "to", "pairs")]
        rows += [
            (
                each.key,
                each.metric,
                each.ours,
                each.theirs,
                f"{each.ratio.mean:.3f}",
                *bounds(each.ratio),
                str(each.ratio.num_pairs),
            )
            for each in comparisons
            if each.metric == HEADLINE[each.key.split(" ")[0]] or each.metric in {"ttft_s", "ready_s", "long_ttft_s"}
        ]
        lines += [
            "",
            f"Times better than {' or '.join(baselines)} (above 1: better, for rates and for times), median of one pair a round with its 95 % interval (of fewer than six: their range):",
            *aligned(rows),
        ]
    said = notes(result)
    return "\n".join([*lines, *(["", *(f"note: {note}" for note in said)] if said else [])]).lstrip("\n")


def comparison_dicts(result: Result) -> list[dict[str, Any]]:
    """The ratios as plain data; None for what is infinite."""
    return [
        {
            "key": each.key,
            "metric": each.metric,
            "target": each.ours,
            "baseline": each.theirs,
            "median": each.our_median,
            "baseline_median": each.their_median,
            "ratio": _finite(each.ratio.mean),
            "low": _finite(each.ratio.low),
            "high": _finite(each.ratio.high),
            "pairs": each.ratio.num_pairs,
        }
        for each in all_comparisons(result)
    ]


def page(result: Result, sections: Mapping[str, Sequence[Claim]], *, command: str) -> str:
    """The Markdown of a comparison: a table of claims for each section, where kvd is behind, and every target's figures."""
    facts = result.facts
    rounds = 1 + max((each["round"] for each in result.samples), default=0)
    judged = {heading: [judge(result, claim) for claim in claims] for heading, claims in sections.items()}
    lines = [
        "# Benchmarks",
        "",
        f"Written by `{command}` from its own JSON; nothing here is typed by hand. Figures of one machine: compare ratios, not absolute figures.",
        "",
        f"* measured: {period(result)}; load before the run: {facts['load_before']}; {rounds} interleaved rounds, one server alive at a time",
        f"* machine: {facts['machine']}",
        f"* kvd: commit {facts['commit'] or 'unknown'} (`+`: changed since), build {facts['build']}; the same for every figure",
        "* times better: the median of one pair a round (the median of its repeats; above 1: kvd is better, for rates and for times), with the bootstrap's 95 % interval;",
        "  of fewer than six rounds their range",
        "",
        "| target | what it is | started by |",
        "|---|---|---|",
        *(f"| {name} | {target['version']} | {started(target)} |" for name, target in result.targets.items()),
        "",
    ]
    for heading, rows in judged.items():
        lines += [f"## {heading}", "", "| measure | kvd | better peer | times better | wanted | |", "|---|---|---|---|---|---|"]
        lines += [*(_claim_row(each) for each in rows), ""]
    lines += ["## Where kvd is behind", ""]
    for heading, rows in judged.items():
        lines += [f"{heading}:", "", *_behind(rows), ""]
    lines += ["## How to measure", "", *_HOW_TO, "", "## All figures", "", *starts(result), *all_figures(result)]
    if said := notes(result):
        lines += ["## Notes", "", *(f"* {FOLDERS.sub('', note)[:400]}" for note in said)]
    return "\n".join(lines).rstrip() + "\n"


def _claim_row(judged: Judged) -> str:
    claim, unit = judged.claim, METRICS[judged.claim.metric].unit
    ours = "not measured" if judged.our_median is None else f"{figure(judged.our_median)} {unit}"
    if claim.bound is not None:
        return f"| {claim.text} | {ours} | | | at most {claim.bound:g} {unit} | {_mark(judged.holds)} |"
    where = f"own {claim.against}" if claim.against else (judged.peer or "none measured")
    theirs = where if judged.their_median is None else f"{figure(judged.their_median)} ({where})"
    ratio = "" if judged.ratio is None else f"{judged.ratio.mean:.2f} ({interval(judged.ratio)})"
    wanted = "measured only" if claim.least is None else f"at least {claim.least:.2f}"
    return f"| {claim.text} | {ours} | {theirs} | {ratio} | {wanted} | {_mark(judged.holds)} |"


def _behind(judged: Sequence[Judged]) -> list[str]:
    """Every row in which a peer is better or less is reached than was wanted, and what was not measured."""
    lines = []
    for each in judged:
        if each.ratio is not None and each.ratio.mean < 1 and each.claim.against is None:
            lines.append(f"* {each.claim.text}: {each.peer} is better, {1 / each.ratio.mean:.2f} times.")
        elif each.holds is False:
            lines.append(f"* {each.claim.text} misses what was wanted: {_reached(each)}.")
    missing = [each.claim.text for each in judged if each.our_median is None]
    if missing:
        lines.append(f"* Not measured: {'; '.join(missing)}.")
    return lines or ["Nowhere in these rows."]


def _reached(judged: Judged) -> str:
    claim = judged.claim
    if judged.ratio is not None:
        return f"{judged.ratio.mean:.2f} of the wanted {claim.least:.2f}"
    return f"{figure(judged.our_median or 0.0)} {METRICS[claim.metric].unit} where at most {claim.bound:g} were wanted"


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _mark(holds: bool | None) -> str:
    return {True: "holds", False: "**misses**", None: ""}[holds]
