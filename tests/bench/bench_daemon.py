"""Measure one daemon on the default model, and write the table of docs/benchmarks.md.

    python tests/bench/bench_daemon.py [--dtype D] [--out docs/benchmarks.md] [--repeats 3]

Every figure is measured from outside, through the client: prefill as prompt tokens over the time to the first token of a prompt never seen;
decode as tokens over the time in which all streams are past their first and before their last token; TTFT cold, hit and restored as in `kvd demo`.
Run it on a quiet machine: the load before the run is written down with the result.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from kvd_client import Client

from kvd.cli import model_store
from kvd.cli.demo_run import Daemon, Demo, system_prompt

CONCURRENCY = (1, 4, 8, 16)
PREFILL_TOKENS = (512, 1550, 4075)
DECODE_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    model = model_store.resolve_model("")
    arguments = ["--model", str(model), "--dtype", options.dtype, "--kv-memory", "1GiB"]
    root = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    try:
        result = {
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "machine": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib()} GiB, Linux {platform.release()}",
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
            "load_before": round(load, 2),
            "model": Path(model).name,
            "dtype": options.dtype,
            **steady(root / "steady", arguments, options.repeats),
            "demo": Demo(_made(root / "demo"), arguments, say=lambda _: None, on_line=None).run().as_dict(),
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    text = table(result)
    print(text)
    if options.out:
        options.out.write_text(text)


def steady(root: Path, arguments: list[str], repeats: int) -> dict[str, object]:
    """Prefill and decode rates of one daemon, medians over ``repeats``."""
    daemon = Daemon(_made(root) / "state", root / "log", arguments, None)
    try:
        with Client(daemon.endpoint, timeout_s=600) as client:
            daemon.wait_ready(client)
            facts = client.stats()["executor"]
            client.generate("warm", max_tokens=8, temperature=0.0, ignore_eos=True)
            prefill = {
                size: statistics.median(prefill_rate(client, size, 1000 + size + turn) for turn in range(repeats))
                for size in PREFILL_TOKENS
            }
            decode = {width: statistics.median(decode_rate(client, width, turn) for turn in range(repeats)) for width in CONCURRENCY}
            batch = {
                width: statistics.median(prefill_batch_rate(client, width, 7 * turn + width) for turn in range(repeats))
                for width in CONCURRENCY
            }
            peak = _peak_gib(daemon.pid)
    finally:
        daemon.kill()
    return {"executor": facts, "prefill": prefill, "decode": decode, "prefill_concurrent": batch, "peak_rss_gib": peak}


def _ids(client: Client, size: int, seed: int) -> list[int]:
    """``size`` token ids of a text that no earlier prompt begins with."""
    return list(client.tokenize(f"{seed} {time.time_ns()} " + system_prompt(seed, size // 10 + 8)))[:size]


def prefill_rate(client: Client, size: int, seed: int) -> float:
    prompt = _ids(client, size, seed)
    started_s = time.perf_counter()
    answer = client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
    assert answer.usage.cached_tokens == 0
    return len(prompt) / (time.perf_counter() - started_s)


def prefill_batch_rate(client: Client, width: int, seed: int) -> float:
    prompts = [_ids(client, 512, 100 * seed + number) for number in range(width)]
    started_s = time.perf_counter()
    with ThreadPoolExecutor(width) as pool:
        list(pool.map(lambda prompt: client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True), prompts))
    return sum(map(len, prompts)) / (time.perf_counter() - started_s)


def decode_rate(client: Client, width: int, turn: int) -> float:
    """Tokens a second while all ``width`` streams run."""

    def stream(number: int) -> list[float]:
        times = []
        for chunk in client.generate(
            f"{turn} {number} Tell me a story.", stream=True, max_tokens=DECODE_TOKENS, temperature=0.0, ignore_eos=True
        ):
            times += [time.perf_counter()] * len(chunk.token_ids)
        return times

    with ThreadPoolExecutor(width) as pool:
        streams = list(pool.map(stream, range(width)))
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    return sum(1 for times in streams for at in times if begin < at <= end) / (end - begin)


def table(result: dict[str, object]) -> str:
    """docs/benchmarks.md."""
    demo, executor = result["demo"], result["executor"]
    rows = {row["name"]: row for row in demo["rows"]}
    ready = demo["ready_s"]
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`; nothing here is typed by hand. Figures of one machine that others share: compare ratios, not absolute times.",
        "",
        f"* date: {result['date']}; load before the run: {result['load_before']}",
        f"* machine: {result['machine']}; {result['versions']}",
        f"* model: {result['model']}; dtype {executor['dtype']} on {executor['device']}, {executor['threads']} threads",
        "* command: `make bench` (`python tests/bench/bench_daemon.py`); medians of 3, of 5 for TTFT",
        "",
        "| concurrent requests | prefill of 512-token prompts, tokens/s | decode, tokens/s over all streams |",
        "|---|---|---|",
        *(f"| {width} | {result['prefill_concurrent'][width]:.0f} | {result['decode'][width]:.0f} |" for width in CONCURRENCY),
        "",
        "| prompt length | prefill of one prompt, tokens/s |",
        "|---|---|",
        *(f"| {size} | {rate:.0f} |" for size, rate in result["prefill"].items()),
        "",
        f"A {demo['prefix_tokens']}-token system prompt and a new question, as the client sees it:",
        "",
        "| | TTFT, ms | of its prompt tokens: cached | restored |",
        "|---|---|---|---|",
        *(
            f"| {label} | {rows[name]['ttft_ms_median']:.0f} | {rows[name]['cached_tokens']} of {rows[name]['prompt_tokens']} | {rows[name]['restored_tokens']} |"
            for label, name in (("cold", "cold"), ("hit in memory", "hit"), ("first question after SIGKILL and restart", "restored"))
        ),
        "",
        "| exec to READY, s | |",
        "|---|---|",
        f"| empty state | {statistics.median(ready['first start']):.1f} |",
        f"| after SIGKILL, rehydrating {demo['restored_bytes'] / 1e6:.0f} MB | {statistics.median(ready['restart']):.1f} |",
        "",
        f"Peak resident memory of the daemon, 1 GiB KV pool included: {result['peak_rss_gib']:.2f} GiB.",
        "",
        "Where kvd is behind: the attention here is the portable reference (gathered pages, torch's SDPA); fused kernels are the next work. No comparison with",
        "other engines is made in this table, because none was run beside it.",
        "",
    ]
    return "\n".join(lines)


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _cpu_name() -> str:
    return next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        "unknown",
    )


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _peak_gib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


if __name__ == "__main__":
    main()
