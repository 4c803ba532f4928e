"""What a step costs in Python: drain, schedule, update and emit, for streams that decode side by side, collections of garbage included.

    python tests/bench/bench_engine.py [--streams 1 16 64 256] [--cached 1000 100000] [--steps 1000] [--json FILE]

The executor answers at once, and its time is taken off (tests/bench/engine_alone.py). ``step`` figures are processor time of the engine's thread, so that
neighbours do not count. The last lines are the gap that one stream sees between two steps: from the executor's having finished one to its
beginning the next, both threads and the hand-over between them included, by the wall clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

from engine_alone import EchoRunner, EngineAlone, GcPauses, prompt_of, quantile

from kvd.executor.worker import ExecutorThread

WARM_UP_ROUNDS = 200


def measure(num_streams, num_steps, *, num_cached=1000, prompt_tokens=64):
    num_blocks = num_cached + num_streams * ((prompt_tokens + num_steps + WARM_UP_ROUNDS) // 16 + 3)
    engine = EngineAlone(
        num_blocks=num_blocks, now=time.thread_time, max_running=num_streams, max_tokens_per_step=max(512, 2 * num_streams)
    )
    engine.fill_cache(num_cached)
    for number in range(num_streams):
        engine.submit(prompt_of(number, prompt_tokens))
    gc.collect()
    gc.freeze()
    with GcPauses() as pauses:
        engine.run(num_steps + WARM_UP_ROUNDS)
    gc.unfreeze()
    rounds = engine.rounds_s[WARM_UP_ROUNDS:]
    return {
        "streams": num_streams,
        "cached_blocks": num_cached,
        "steps": len(rounds),
        "min_ms": min(rounds) * 1e3,
        "median_ms": statistics.median(rounds) * 1e3,
        "mean_ms": statistics.mean(rounds) * 1e3,
        "p99_ms": quantile(rounds, 0.99) * 1e3,
        "max_ms": max(rounds) * 1e3,
        "us_a_token": statistics.median(rounds) * 1e6 / num_streams,
        "gc_pauses": pauses.num,
        "gc_worst_ms": pauses.worst_s * 1e3,
    }


class _Gaps(EchoRunner):
    """A runner that takes ``step_s`` a step, and notes how long it was idle before each."""

    def __init__(self, step_s):
        super().__init__()
        self._step_s = step_s
        self._ended_s = 0.0
        self.gaps_s = []

    def execute(self, step):
        if self._ended_s:
            self.gaps_s.append(time.perf_counter() - self._ended_s)
        output = super().execute(step)
        time.sleep(self._step_s)
        self._ended_s = time.perf_counter()
        return output


def measure_gap(num_streams, num_steps, max_steps_in_flight, step_s=0.005):
    runner = _Gaps(step_s)
    engine = EngineAlone(
        num_blocks=num_streams * (num_steps // 16 + 100),
        make_executor=lambda _: ExecutorThread(runner),
        max_steps_in_flight=max_steps_in_flight,
        max_running=num_streams,
    )
    for number in range(num_streams):
        engine.submit(prompt_of(number, 64))
    gc.collect()
    gc.freeze()
    engine.run(num_steps)
    gc.unfreeze()
    engine.executor.close(1.0)
    gaps = runner.gaps_s[20:]
    return {
        "streams": num_streams,
        "max_steps_in_flight": max_steps_in_flight,
        "gap_min_ms": min(gaps) * 1e3,
        "gap_median_ms": statistics.median(gaps) * 1e3,
        "gap_p99_ms": quantile(gaps, 0.99) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--cached", type=int, nargs="*", default=[1000, 100_000])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("streams  cached   min ms  median    mean     p99     max   us/token  gc  worst gc ms")
    report = {"load_average": os.getloadavg()[0], "steps": [], "gaps": []}
    for num_streams in arguments.streams:
        for num_cached in arguments.cached:
            figures = measure(num_streams, arguments.steps, num_cached=num_cached)
            report["steps"].append(figures)
            print(
                f"{num_streams:7} {num_cached:7} {figures['min_ms']:8.3f} {figures['median_ms']:7.3f} {figures['mean_ms']:7.3f} "
                f"{figures['p99_ms']:7.3f} {figures['max_ms']:7.3f} {figures['us_a_token']:9.2f} {figures['gc_pauses']:4} {figures['gc_worst_ms']:8.3f}",
                flush=True,
            )
    for num_streams in arguments.streams:
        for max_steps_in_flight in (1, 2):
            figures = measure_gap(num_streams, min(arguments.steps, 400), max_steps_in_flight)
            report["gaps"].append(figures)
            print(
                f"gap between steps, {num_streams} streams, {max_steps_in_flight} in flight: min {figures['gap_min_ms']:.3f} ms, "
                f"median {figures['gap_median_ms']:.3f}, p99 {figures['gap_p99_ms']:.3f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
