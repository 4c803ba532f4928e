"""What persistence costs a serving daemon: the same work with it and without, in interleaved pairs.

    python tests/bench/bench_persistence.py [--pairs 15] [--seconds 15] [--policies selective,through] [--hits 0,90] [--out FILE.md] [--json FILE]

Two daemons live at once, one with ``--no-persist`` and one with the policy that is measured. In each pair both do the same work, prompts of token ids drawn
afresh, one after the other; which is first alternates. The one that rests is stopped (SIGSTOP), so that it costs nothing, and so that nothing it has left to
write is done outside of its own time. With ``--hits 90`` nine tenths of each prompt are a prefix that all prompts share.

Throughput is prompt and output tokens over the time from the first request to the last answer. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd_client import Client
from paired import commit, write_section

from kvd.bench.machine import machine, today
from kvd.bench.ratios import Ratio, ratio_of
from kvd.cli.demo_run import Daemon
from kvd.settings import model_store

SECTION = "cost of persistence"
OFF = "off"
HITS_PERCENT = 90
FIRST_ID, LAST_ID = 1000, 40_000
SETTLE_S = 60.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTERS = (
    *(
        "computed_blocks",
        "checkpoint_blocks",
        "checkpoint_bytes",
        "checkpoint_evicted_blocks",
        "checkpoint_refused_blocks",
        "expired_bytes",
    ),
    *("wal_records", "wal_written_bytes", "wal_syncs", "checkpoints"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement's prompts, the same for both sides."""

    prompts: list[list[int]]
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts)) + self.output_tokens * len(self.prompts)


class Workload:
    """Makes prompts of ``prompt_tokens`` ids; no two begin alike but for the shared prefix of ``hits_percent`` of them."""

    def __init__(self, *, prompt_tokens: int, output_tokens: int, hits_percent: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._output_tokens = output_tokens
        shared = prompt_tokens * hits_percent // 100
        self.prefix = self._draw(shared)
        self._fresh_tokens = prompt_tokens - shared

    def _draw(self, count: int) -> list[int]:
        return [self._random.randint(FIRST_ID, LAST_ID) for _ in range(count)]

    def work(self, num_requests: int) -> Work:
        return Work([self.prefix + self._draw(self._fresh_tokens) for _ in range(num_requests)], self._output_tokens)


@dataclass(slots=True)
class Measured:
    """One side's part of a pair, or the sum of its parts."""

    seconds: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    cpu_s: float = 0.0


class Side:
    """A daemon that is stopped but while it is measured."""

    def __init__(self, name: str, root: Path, arguments: Sequence[str]) -> None:
        self.name = name
        root.mkdir(parents=True)
        self._daemon = Daemon(root / "state", root / "log", arguments, None)
        self.state_dir = root / "state"
        self.total = Measured()
        self.rates: list[float] = []
        self.cpu_per_token: list[float] = []
        with Client(self._daemon.endpoint, timeout_s=600) as client:
            self._daemon.wait_ready(client)
        self._stop()

    @contextmanager
    def awake(self) -> Iterator[Client]:
        os.kill(self._daemon.pid, signal.SIGCONT)
        try:
            with Client(self._daemon.endpoint, timeout_s=600) as client:
                client.ping()
                yield client
        finally:
            self._stop()

    def _stop(self) -> None:
        os.kill(self._daemon.pid, signal.SIGSTOP)

    def run(self, work: Work, streams: int) -> Measured:
        """Do ``work``, ``streams`` requests at a time."""
        with self.awake() as client:
            cpu_s, began_s = self._cpu_s(), time.perf_counter()
            with ThreadPoolExecutor(streams) as pool:
                answers = list(
                    pool.map(
                        lambda prompt: client.generate(prompt, max_tokens=work.output_tokens, temperature=0.0, ignore_eos=True),
                        work.prompts,
                    )
                )
            seconds = time.perf_counter() - began_s
            cpu_s = self._cpu_s() - cpu_s
        assert all(answer.usage.completion_tokens == work.output_tokens for answer in answers)
        return Measured(seconds, work.num_tokens, sum(answer.usage.cached_tokens for answer in answers), cpu_s)

    def measure(self, work: Work, streams: int) -> float:
        """Tokens a second, kept with the side."""
        part = self.run(work, streams)
        self.total.seconds += part.seconds
        self.total.tokens += part.tokens
        self.total.cached_tokens += part.cached_tokens
        self.total.cpu_s += part.cpu_s
        self.rates.append(part.tokens / part.seconds)
        self.cpu_per_token.append(part.cpu_s / part.tokens)
        return self.rates[-1]

    def counters(self) -> dict[str, Any]:
        with self.awake() as client:
            stats = client.stats()["store"]
            return {**{name: stats[name] for name in _COUNTERS}, "held_back": dict(stats["held_back"])}

    def settle(self) -> bool:
        """Let it write what it has begun; whether nothing waits any more."""
        with self.awake() as client:
            end_s = time.monotonic() + SETTLE_S
            while time.monotonic() < end_s:
                stats = client.stats()["store"]
                if not stats["hot_blocks_waiting"] and not stats["blocks_under_way"]:
                    return True
                time.sleep(0.2)
        return False

    def governor(self) -> str:
        with self.awake() as client:
            return str(client.stats()["store"]["governor"])

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    def rss_bytes(self) -> int:
        line = next(line for line in Path(f"/proc/{self._daemon.pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        os.kill(self._daemon.pid, signal.SIGCONT)
        self._daemon.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=15.0, help="about so long is one measurement")
    parser.add_argument("--policies", default="selective,through")
    parser.add_argument("--hits", default=f"0,{HITS_PERCENT}", help="percent of the prompt tokens that are a shared prefix")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=640)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--store-max-bytes", default="4GiB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path, help="where the state directories are made; default: the system's temporary directory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=options.root))
    result: dict[str, Any] = {
        "date": today(),
        "machine": machine(),
        "commit": commit(),
        "load_before": round(os.getloadavg()[0], 2),
        "command": "python tests/bench/bench_persistence.py " + " ".join(sys.argv[1:]),
        "options": {name: str(value) for name, value in vars(options).items()},
        "cells": [],
    }
    try:
        for policy in options.policies.split(","):
            for hits in map(int, options.hits.split(",")):
                result["cells"].append(cell(policy, hits, root / f"{policy}-{hits}", options))
                if options.json:
                    options.json.write_text(json.dumps(result, indent=2) + "\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = table(result)
    print(text)
    if options.out:
        write_section(options.out, SECTION, text)


def cell(policy: str, hits_percent: int, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All pairs of one policy at one share of hits."""
    model = model_store.resolve_model(options.model)
    common = [
        "--model",
        str(model),
        "--dtype",
        options.dtype,
        "--kv-memory",
        options.kv_memory,
        "--store-max-bytes",
        options.store_max_bytes,
    ]
    seed = options.seed + hits_percent
    workload = Workload(prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens, hits_percent=hits_percent, seed=seed)
    sides = {
        OFF: Side(OFF, root / OFF, [*common, "--no-persist"]),
        policy: Side(policy, root / policy, [*common, "--write-policy", policy]),
    }
    try:
        num_requests = _calibrate(sides, workload, options)
        sides[policy].settle()  # what warming up computed is not this measurement's
        before = sides[policy].counters()
        for pair in range(options.pairs):
            work = workload.work(num_requests)
            order = (OFF, policy) if pair % 2 == 0 else (policy, OFF)
            rates = {name: sides[name].measure(work, options.streams) for name in order}
            print(
                f"{policy} at {hits_percent} %: pair {pair + 1} of {options.pairs}, off {rates[OFF]:.0f} tokens/s, on {rates[policy]:.0f}, "
                f"ratio {rates[policy] / rates[OFF]:.3f}",
                file=sys.stderr,
                flush=True,
            )
        governor = sides[policy].governor()
        in_window = _difference(sides[policy].counters(), before)
        settled = sides[policy].settle()
        counters = _difference(sides[policy].counters(), before)
        return _figures(policy, hits_percent, sides, num_requests=num_requests) | {
            "governor_at_end": governor,
            "settled": settled,
            "written_in_window": {name: in_window[name] for name in ("checkpoint_blocks", "computed_blocks")},
            **counters,
        }
    finally:
        for side in sides.values():
            side.close()


def _calibrate(sides: dict[str, Side], workload: Workload, options: argparse.Namespace) -> int:
    """Warm both sides up, in turn and alike; the number of requests that take about ``seconds``."""
    seconds = 0.0
    for _ in range(2):
        work = workload.work(2 * options.streams)
        seconds = sum(side.run(work, options.streams).seconds for side in sides.values()) / len(sides)
    rounds = max(1, round(options.seconds / (seconds / 2)))
    return rounds * options.streams


def _difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: each - before[name][key] for key, each in value.items()} if isinstance(value, dict) else value - before[name]
        for name, value in now.items()
    }


def _figures(policy: str, hits_percent: int, sides: dict[str, Side], *, num_requests: int) -> dict[str, Any]:
    on, off = sides[policy], sides[OFF]
    throughput = ratio_of([each / other for each, other in zip(on.rates, off.rates, strict=True)])
    cpu = ratio_of([each / other for each, other in zip(on.cpu_per_token, off.cpu_per_token, strict=True)])
    return {
        "policy": policy,
        "hits_percent": hits_percent,
        "num_requests": num_requests,
        "rates_off": off.rates,
        "rates_on": on.rates,
        "throughput": [throughput.mean, throughput.low, throughput.high],
        "cpu": [cpu.mean, cpu.low, cpu.high],
        "seconds_on": on.total.seconds,
        "tokens_on": on.total.tokens,
        "cached_tokens_on": on.total.cached_tokens,
        "rss_bytes": {side.name: side.rss_bytes() for side in sides.values()},
    }


def table(result: dict[str, Any]) -> str:
    """The section of docs/benchmarks-persistence.md."""
    options = result["options"]
    lines = [
        "## What persistence costs",
        "",
        f"* date: {result['date']}; commit {result['commit']}; load before the run: {result['load_before']}",
        f"* machine: {result['machine']}",
        f"* model: {options['model'] or 'smollm2'}; prompts of {options['prompt_tokens']} tokens, {options['output_tokens']} tokens of output, {options['streams']} requests at a time, a pool of {options['kv_memory']}",
        f"* command: `{result['command']}`",
        f"* {options['pairs']} interleaved pairs a line, {options['seconds']} s a measurement; ratios are geometric means with their 95 % interval (Student's t over log ratios)",
        "",
        "Throughput is prompt and output tokens a second, CPU time the daemon's own per token; both as persistence on over `--no-persist`.",
        "",
        "| policy | prompt tokens hit | throughput, on / off | CPU time, on / off | tokens/s off | tokens/s on |",
        "|---|---|---|---|---|---|",
        *(_speed_row(cell) for cell in result["cells"]),
        "",
        "| policy | hits | blocks computed | persisted | WAL MB | store MB | evicted before they were copied | held back by (rounds) | at the end |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_bytes_row(cell) for cell in result["cells"]),
    ]
    return "\n".join(lines)


def _speed_row(cell: dict[str, Any]) -> str:
    share = cell["cached_tokens_on"] / (cell["tokens_on"] or 1)
    off, on = (sum(cell[name]) / len(cell[name]) for name in ("rates_off", "rates_on"))
    pairs = len(cell["rates_on"])
    return (
        f"| {cell['policy']} | {cell['hits_percent']} % of each prompt ({100 * share:.0f} % of all tokens) | {Ratio(*cell['throughput'], pairs)} "
        f"| {Ratio(*cell['cpu'], pairs)} | {off:.0f} | {on:.0f} |"
    )


def _bytes_row(cell: dict[str, Any]) -> str:
    computed, persisted = cell["computed_blocks"], cell["checkpoint_blocks"]
    held = ", ".join(f"{name} {count}" for name, count in cell["held_back"].items() if count) or "nothing"
    end = cell["governor_at_end"] + ("" if cell["settled"] else ", not settled")
    return (
        f"| {cell['policy']} | {cell['hits_percent']} % | {computed} | {persisted} ({100 * persisted / max(1, computed):.1f} %) "
        f"| {cell['wal_written_bytes'] / 1e6:.1f} | {cell['checkpoint_bytes'] / 1e6:.1f} | {cell['checkpoint_evicted_blocks']} | {held} | {end} |"
    )


if __name__ == "__main__":
    main()
