"""What paired measurements have in common: the ratio of two sides with its interval, and the line that says on what machine it was measured."""

from __future__ import annotations

import datetime as dt
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The 97.5 % quantile of Student's t by degrees of freedom, 1 to 30.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean of a ratio over pairs and its 95 % interval (Student's t over the logarithms)."""

    mean: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """Of at least one ratio; the interval of a single one is unbounded."""
    logs = [math.log(each) for each in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf, len(logs))
    quantile = _T_975[min(len(logs) - 1, len(_T_975)) - 1]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def machine() -> str:
    """Processor, cores, memory and system, for the head of a table."""
    name = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {gib} GiB, Linux {platform.release()}; Python {platform.python_version()}"


def today() -> str:
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def commit() -> str:
    """The checkout's commit, for whoever wants to measure the same again."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or "unknown"


def write_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of section ``name`` of a Markdown file that several benchmarks write, making both if need be."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    whole = path.read_text() if path.exists() else f"{_HEAD}\n{begin}\n{end}\n"
    if begin not in whole:
        whole = f"{whole.rstrip()}\n\n{begin}\n{end}\n"
    before, _, rest = whole.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


_HEAD = """# Benchmarks of persistence

Written by `make bench-persistence` and `make bench-rehydrate`; nothing here is typed by hand. Figures of one machine that others share: compare ratios, not
absolute times.
"""
