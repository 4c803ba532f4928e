"""What a daemon may cost besides its model's computing, each measured on a real daemon and held against its budget.

    python tests/bench/bench_budgets.py [--serve "--kv-memory 512MiB"] [--rounds 6] [--json FILE] [--out PAGE]

* memory: RssAnon + RssShmem at their most, from exec until ready and under load (a long prompt, then 16 streams), looked at a hundred times a second;
* an idle daemon's processor time, after that load;
* decoding beside one busy neighbour, in turns with decoding without: how much throughput falls, against the processor time that the neighbour took;
* the gap between two steps of one stream: from the end of one's computing to the beginning of the next one's (tests/bench/timed_serve.py notes them).

Exit code 1 if a budget is exceeded. Run it on a quiet machine; what else was busy is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from neighbour import busy_neighbour, processor_s
from peak_memory import PeakMemory
from timed_serve import read_gaps

from kvd.bench.asking import Setting
from kvd.bench.build import commit
from kvd.bench.kvd_server import KvdServer
from kvd.bench.launching import Launched
from kvd.bench.machine import machine
from kvd.bench.plan import Point
from kvd.bench.prompts import Sizing
from kvd.bench.ratios import median_ratio, percentile
from kvd.bench.scenarios import decode, measure_sizing, prefill, warm_up

STREAMS = (1, 8)
GAP_STREAMS = (1, 16)
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """A line of the table: what was measured, its figure with the spread, and the most that it may be (None: only measured)."""

    what: str
    value: float
    unit: str
    spread: str = ""
    most: float | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.most is None else self.value <= self.most


def main() -> int:
    options = parsed()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvd-budgets-") as folder:
        version, found = asyncio.run(measure(options, Path(folder)))
    text = page(found, version, options.serve, load)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        facts = {"machine": machine(), "commit": commit(), "version": version, "serve": options.serve, "load_before": load}
        options.json.write_text(json.dumps({**facts, "found": [{**asdict(each), "holds": each.holds} for each in found]}, indent=1))
    return int(any(each.holds is False for each in found))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", default="--kv-memory 512MiB", metavar="ARGUMENTS", help="of kvd serve; else the defaults")
    parser.add_argument("--rounds", type=int, default=6, help="pairs beside and without the neighbour")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of the long prompt")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds that the daemon is left alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help="a page, in Markdown")
    return parser.parse_args()


async def measure(options: argparse.Namespace, root: Path) -> tuple[str, list[Found]]:
    """The daemon's version, and all figures."""
    plain, timed = Daemon(root / "a", options.serve), Daemon(root / "b", options.serve, notes=root / "steps")
    try:
        found = await memory_and_idle(plain, options)
        version = await plain.server.version()
        found += await beside_neighbour(plain, options)
        plain.launched.kill()
        found += await gaps(timed, options)
    finally:
        for daemon in (plain, timed):
            daemon.launched.kill()
            await daemon.server.aclose()
    return version, found


class Daemon:
    """``kvd serve``, with steps noted if a file for them is named."""

    def __init__(self, root: Path, arguments: str, *, notes: Path | None = None) -> None:
        root.mkdir()
        endpoint = f"ipc://{root}/s.sock"
        program = ("-m", "kvd") if notes is None else (str(Path(__file__).with_name("timed_serve.py")), str(notes))
        command = shlex.join([sys.executable, *program, "serve", "--listen", endpoint, "--state-dir", str(root / "state")])
        self.notes = notes
        self.server = KvdServer(endpoint)
        self.launched = Launched("kvd", f"exec {command} {arguments}", root / "log", ready_timeout_s=120.0)
        self._calls = 0
        self._sizing = Sizing(0.0, 1.0)

    async def warm_up(self) -> None:
        """So that nothing is done for the first time while it is measured."""
        await warm_up(self.server, 2)
        self._sizing = await measure_sizing(self.server)

    async def decode(self, streams: int, tokens: int) -> float:
        """Tokens a second over all streams; each call asks something new."""
        self._calls += 1
        point = Point("decode", 0, tokens, streams, streams)
        measured = await decode(self.server, Setting(point, f"budgets/{self._calls}", self._sizing))
        return measured.metrics["decode_tokens_per_s"]

    async def prefill(self, tokens: int) -> None:
        await prefill(self.server, Setting(Point("prefill", tokens, 1, 1, 1), "budgets", self._sizing))


async def memory_and_idle(daemon: Daemon, options: argparse.Namespace) -> list[Found]:
    with PeakMemory(lambda: daemon.launched.pid) as memory:
        await daemon.launched.start(daemon.server)
        start_gib = memory.peak_bytes / 2**30
        await daemon.warm_up()
        await daemon.prefill(options.prompt_tokens)
        await daemon.decode(16, options.tokens)
    await asyncio.sleep(SETTLE_S)
    pid = daemon.launched.pid
    before_s, began_s = processor_s(pid), time.perf_counter()
    await asyncio.sleep(options.idle)
    idle = (processor_s(pid) - before_s) / (time.perf_counter() - began_s)
    return [
        Found("peak RssAnon + RssShmem until ready", start_gib, "GiB", most=1.2),
        Found("peak RssAnon + RssShmem, a long prompt and 16 streams included", memory.peak_bytes / 2**30, "GiB", most=1.2),
        Found(f"an idle daemon's processor time, over {options.idle:g} s after that load", 100 * idle, "% of a core", most=1.0),
    ]


async def beside_neighbour(daemon: Daemon, options: argparse.Namespace) -> list[Found]:
    """Pairs in turns of order. What throughput may fall by is the share of all cores that the neighbour took, plus a fifth of it."""
    found = []
    with busy_neighbour() as neighbour:
        for streams in STREAMS:
            ratios, shares = [], []
            while len(shares) < options.rounds:
                alone = await daemon.decode(streams, options.tokens) if len(shares) % 2 else None
                with neighbour.running() as taken:
                    beside = await daemon.decode(streams, options.tokens)
                if not taken.share:
                    continue  # others took its turns, for a tick of the processor's clock at least: again
                ratios.append(beside / (alone or await daemon.decode(streams, options.tokens)))
                shares.append(taken.share)
            ratio, share = median_ratio(ratios), statistics.median(shares)
            what = f"decode of {streams}, beside a busy process that took {share:.0%} of all cores"
            found += [
                Found(f"{what}: throughput, of that without", 100 * ratio.mean, "%", f"{ratio.low:.0%} to {ratio.high:.0%}"),
                Found(f"{what}: its fall, of the share taken", (1 - ratio.mean) / share, "times", most=1.2),
            ]
    return found


async def gaps(daemon: Daemon, options: argparse.Namespace) -> list[Found]:
    assert daemon.notes is not None
    await daemon.launched.start(daemon.server)
    await daemon.warm_up()
    found = []
    for streams in GAP_STREAMS:
        noted = len(read_gaps(daemon.notes))
        rate = await daemon.decode(streams, options.tokens)
        gaps_ms = [1000 * gap_s for gap_s in read_gaps(daemon.notes)[noted:]]
        spread = f"{min(gaps_ms):.3f} to {percentile(gaps_ms, 99):.3f} (99 %), {len(gaps_ms)} gaps at {rate:.0f} tokens/s"
        most = 0.3 if streams == 1 else None
        found.append(Found(f"gap between two steps, {streams} streams: median", statistics.median(gaps_ms), "ms", spread, most))
    return found


def page(found: Sequence[Found], version: str, serve: str, load: float) -> str:
    lines = [
        "# What a daemon costs beside its model",
        "",
        "Written by `python tests/bench/bench_budgets.py --out docs/benchmarks-budgets.md`, which says how each is measured; nothing here is typed by hand.",
        "",
        f"* machine: {machine()}; load before the run: {load:.2f}",
        f"* {version}; commit {commit() or 'unknown'}; `kvd serve {serve}`",
        "",
        "| measure | found | | at most | |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        mark = {True: "holds", False: "**misses**", None: ""}[each.holds]
        most = "" if each.most is None else f"{each.most:g} {each.unit}"
        lines.append(f"| {each.what} | {each.value:.3g} {each.unit} | {each.spread} | {most} | {mark} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
