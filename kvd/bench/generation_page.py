"""The Markdown page about generation features: what speculation brings, how long streams wait beside arriving prompts, what beams save by sharing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from kvd.bench.comparing import compare
from kvd.bench.results import Result
from kvd.bench.tables import FOLDERS, all_figures, cell, interval, notes, period, started, starts

_ABOUT_SPECULATION = (
    "Output tokens a second of streams that ask one answer after another, four each, while all of them are busy, of prompts that the cache has already; `off` is the baseline. All modes are asked of one daemon, in turns, and each has a cache salt of its own. *repetitive*:",
    "greedy answers to requests that repeat a text of their prompt (a copy, a copy with a word replaced, a list as JSON, a log that goes on). *random*: stories, drawn at temperature 1. Before what counts, the same prompts are asked for 32 tokens.",
    "Acceptance: accepted over drafted tokens; from drafts: accepted over all tokens of the answers. [How it works](speculation.md).",
)
_ABOUT_GAPS = (
    "Gaps between the pieces of running streams, of those that touch the time from a long prompt's arrival to its first token; three prompts one after another in each measurement. *unchunked*: a step takes the whole prompt;",
    "there is one long gap for each stream then, beside the quick ones before and after it, so that its median says little. *chunked*: pieces of 512 tokens; *bound-N*: `max_inter_token_ms` is N. *otherwise*: the 99th percentile of the other gaps of the same streams. Beside: tokens a second of all streams together while a prompt is computed. [How it works](scheduling.md#prompts-beside-running-streams).",
)
_ABOUT_BEAMS = (
    "The part of the places in block tables that needed no block of their own, looked at every 20 ms: the saving of the PagedAttention paper's figure about sharing. No request finds what another one computed. [How it works](beam-search.md).",
)
_QUIET_CORES = 0.2
_DRAFT_FIGURES = ("acceptance", "from_drafts", "answer_s", "answer_max_s")
_GAP_FIGURES = ("gap_p50_s", "gap_p99_s", "gap_max_s", "quiet_gap_p99_s", "beside_tokens_per_s", "long_ttft_s")


def generation_page(result: Result) -> str:
    """A table for each feature that was measured, and all figures below."""
    facts = result.facts
    rounds = 1 + max((each["round"] for each in result.samples), default=0)
    lines = [
        "# Benchmarks: generation features",
        "",
        "Written by `kvd bench generation` from its own JSON; nothing here is typed by hand. Figures of one machine: compare ratios, not absolute figures.",
        "",
        f"* measured: {period(result)}; load before the run: {facts['load_before']}; at most {rounds} interleaved rounds, one server alive at a time, started anew each round",
        f"* machine: {facts['machine']}",
        *_busy(result),
        f"* kvd: commit {facts['commit'] or 'unknown'} (`+`: changed since), build {facts['build']}; the same for every figure",
        "* figures: medians, with their range; times better: the median of one pair a round (above 1: better, for rates and for times), with the bootstrap's 95 % interval, of fewer than six rounds their range",
        "",
        "To measure it again, on a quiet machine: `make bench-generation`, or `kvd bench generation --out generation.json --page benchmarks-generation.md`;",
        "`kvd bench report generation.json --page FILE` writes the page anew from the file.",
        "",
        *_section("Speculation", _ABOUT_SPECULATION, _speculation(result)),
        *_section("Streams beside arriving prompts", _ABOUT_GAPS, _gaps(result)),
        *_section("Blocks that beams and samples save", _ABOUT_BEAMS, _beams(result)),
        "## What was measured",
        "",
        "| target | what it is | started by |",
        "|---|---|---|",
        *(f"| {name} | {target['version']} | {started(target)} |" for name, target in result.targets.items()),
        "",
    ]
    if said := notes(result):
        lines += ["## Notes", "", *(f"* {FOLDERS.sub('', note)[:400]}" for note in said), ""]
    lines += ["## All figures", "", *starts(result), *all_figures(result)]
    return "\n".join(lines).rstrip() + "\n"


def _busy(result: Result) -> list[str]:
    """Said where other processes took more than a little of the machine."""
    others = [each["other_cores"] for each in result.samples if each["other_cores"] is not None]
    if not others or (cores := statistics.median(others)) <= _QUIET_CORES:
        return []
    return [
        f"* **measured on a busy machine**: other processes had {cores:.1f} cores, in the median over all measurements; rates and times say little then"
    ]


def _section(heading: str, about: Sequence[str], rows: Iterator[str]) -> list[str]:
    """Nothing where nothing was measured."""
    text = "\n".join(rows).rstrip()
    return [f"## {heading}", "", *about, "", text, ""] if text else []


def _points(result: Result, *scenarios: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Keys of points of these scenarios, and their settings."""
    settings = {each["key"]: each["point"] for each in result.samples}
    yield from ((key, settings[key]) for key in result.point_keys() if settings[key]["scenario"] in scenarios)


def _speculation(result: Result) -> Iterator[str]:
    points = sorted(_points(result, "repetitive", "random"), key=lambda each: each[1]["scenario"], reverse=True)
    for number, (key, point) in enumerate(points):
        if not number:
            yield f"Answers of {point['output_tokens']} tokens:"
            yield ""
            yield "| prompts | streams | mode | tokens/s | times better than the first | acceptance | from drafts | an answer, s | the slowest, s |"
            yield "|---|---:|---|---|---|---|---|---|---|"
        for target in result.targets_of(key):
            begin = f"| {point['scenario']} | {point.get('concurrency', 1)} | {target} | {cell(result, key, target, 'output_tokens_per_s')}"
            ratio = _against(result, key, "output_tokens_per_s", target, result.targets_of(key)[0])
            rest = " | ".join(cell(result, key, target, metric) for metric in _DRAFT_FIGURES)
            yield f"{begin} | {ratio} | {rest} |"


def _gaps(result: Result) -> Iterator[str]:
    for key, point in _points(result, "arriving"):
        names = result.targets_of(key)
        yield f"{point.get('concurrency', 1)} streams, prompts of {point['prompt_tokens']:,} tokens:"
        yield ""
        yield f"| | p50, s | p99, s | longest, s | otherwise p99, s | beside, tokens/s | the prompt's TTFT, s |{''.join(f' p99 against {name} |' for name in names[:2])}"
        yield f"|---|---|---|---|---|---|---|{'---|' * len(names[:2])}"
        for target in names:
            figures = " | ".join(cell(result, key, target, metric) for metric in _GAP_FIGURES)
            ratios = "".join(f" {_against(result, key, 'gap_p99_s', target, other)} |" for other in names[:2])
            yield f"| {target} | {figures} |{ratios}"
        yield ""


def _beams(result: Result) -> Iterator[str]:
    for key in result.point_keys():
        if "blocks_saved" not in result.metrics_of(key):
            continue
        [point] = {each["key"]: each["point"] for each in result.samples if each["key"] == key}.values()
        yield f"Prompts of {point['prompt_tokens']:,} tokens, answers of {point['output_tokens']}, two requests at once:"
        yield ""
        yield "| | blocks saved | a request's time, s |"
        yield "|---|---|---|"
        for target in result.targets_of(key):
            saved = [100 * value for value in result.values(key, target, "blocks_saved").values()]
            shown = f"{min(saved):.0f} %" if max(saved) - min(saved) < 0.5 else f"{min(saved):.0f} to {max(saved):.0f} %"
            way, width = target.rsplit("-", 1)
            yield f"| {width} {way} | {shown} | {cell(result, key, target, 'ttft_s')} |"
        yield ""


def _against(result: Result, key: str, metric: str, ours: str, theirs: str) -> str:
    found = None if ours == theirs else compare(result, key, metric, ours, theirs)
    return "" if found is None else f"{found.ratio.mean:.2f} ({interval(found.ratio)})"
