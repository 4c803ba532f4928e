"""The parts that tables of a result are made of: figures with their spread, costs, notes, and what each target is."""

from __future__ import annotations

import datetime as dt
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvd.bench.comparing import differing_answers, uneven_prompts, untold_hits
from kvd.bench.plan import METRICS
from kvd.bench.ratios import Ratio
from kvd.bench.results import Result

# A page is for every reader: of commands and errors the folders of the machine that measured are left out.
FOLDERS = re.compile(r"(?<![\w:])/(?:[\w.@+-]+/)+")


def started(target: Mapping[str, Any]) -> str:
    """By which command, without its folders."""
    command = FOLDERS.sub("", target["command"]).replace("|", "\\|")
    return f"`{command}`" if command else "others"


def period(result: Result) -> str:
    """From the first to the last measurement, UTC."""
    times = [each["at_unix_s"] for each in result.samples]
    if not times:
        return str(result.facts["date"])
    first, last = (dt.datetime.fromtimestamp(at_s, dt.UTC) for at_s in (min(times), max(times)))
    return (
        f"{first:%Y-%m-%d %H:%M} to {last:%H:%M} UTC"
        if first.date() == last.date()
        else f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"
    )


def starts(result: Result) -> list[str]:
    """Exec to ready of the servers that the benchmark started, on an empty state, and their memory until then."""
    found = result.facts.get("starts", [])
    names = [name for name in result.targets if any(each["target"] == name for each in found)]
    if not names:
        return []
    lines = ["### start on an empty state", "", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for label, key, scale in (("exec to ready, s", "ready_s", 1.0), ("peak RssAnon + RssShmem, MiB", "peak_unshared_bytes", 2.0**-20)):
        medians = [figure(scale * statistics.median(each[key] for each in found if each["target"] == name)) for name in names]
        lines.append(f"| {label} | {' | '.join(medians)} |")
    return [*lines, ""]


def all_figures(result: Result) -> Iterator[str]:
    """A table for each point: every figure of every target."""
    for key in result.point_keys():
        targets = result.targets_of(key)
        metrics = result.metrics_of(key)
        yield f"### {key}"
        yield ""
        yield f"| | {' | '.join(targets)} |"
        yield f"|---|{'---|' * len(targets)}"
        for metric in metrics:
            unit = METRICS[metric].unit if metric in METRICS else ""
            yield f"| {metric.replace('_', ' ')}, {unit} | {' | '.join(cell(result, key, name, metric) for name in targets)} |"
        for row in cost_rows(result, key, targets):
            yield f"| {' | '.join(row)} |"
        yield ""


def notes(result: Result) -> list[str]:
    """What a reader must know besides the figures."""
    found = [*result.warnings(), *untold_hits(result), *uneven_prompts(result), *differing_answers(result)]
    found += [
        f"{each['target']}, {each['key']}, round {each['round'] + 1}, repeat {each['repeat'] + 1}: failed: {each['error']}"
        for each in result.failures
    ]
    if result.recovered:
        names = ", ".join(sorted({each["target"] for each in result.recovered}))
        found.append(f"{len(result.recovered)} measurements failed and succeeded when the run was gone on with ({names})")
    return found


def cost_rows(result: Result, key: str, targets: Sequence[str]) -> list[tuple[str, ...]]:
    """What the machine spent: the driver's processor time per second, what else ran, and the server's memory."""
    names = ("driver's cores", "other processes' cores", "resident, MiB (unshared)")
    return [(name, *(cost(result, key, target, name) for target in targets)) for name in names]


def cost(result: Result, key: str, target: str, name: str) -> str:
    """One cell of ``cost_rows``."""
    samples = [each for each in result.samples if each["key"] == key and each["target"] == target]
    if name == "driver's cores":
        values = [each["driver_cpu_s"] / each["wall_s"] for each in samples if each["wall_s"]]
    elif name == "other processes' cores":
        values = [each["other_cores"] for each in samples if each["other_cores"] is not None]
    else:
        values = [each["resident_bytes"]["unshared"] / 2**20 for each in samples if each["resident_bytes"]]
        return f"{max(values):.0f}" if values else "-"
    return f"{statistics.median(values):.2f}" if values else "-"


def cell(result: Result, key: str, target: str, metric: str) -> str:
    """The median of a figure with its range."""
    values = list(result.values(key, target, metric).values())
    if not values:
        return "-"
    median = figure(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({figure(min(values))} to {figure(max(values))})"


def figure(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def interval(ratio: Ratio) -> str:
    """Its ends; of a single pair that it is one."""
    return "one pair" if ratio.num_pairs < 2 else " to ".join(bounds(ratio))


def bounds(ratio: Ratio) -> tuple[str, ...]:
    """The ends of its interval; one pair alone has none."""
    if ratio.num_pairs < 2:
        return "-", "-"
    return tuple(f"{value:.2f}" if math.isfinite(value) else "?" for value in (ratio.low, ratio.high))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of at least one cell as lines of text, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
