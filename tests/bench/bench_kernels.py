"""Products of the native kernels beside torch's linear, shape by shape, and both beside a busy neighbour.

    python tests/bench/bench_kernels.py [--model 135m] [--dtype bf16|f32] [--rounds 20] [--skip-neighbour]

Weights are cold, as in a step: copies of a matrix are used in turn until they exceed the caches. Sides alternate in every round, so that what disturbs the
machine disturbs both; times are the least of all rounds, ratios are medians over the rounds. The neighbour is another process that never sleeps:
it is stopped and continued in turn, the processor time that it took is measured, and throughput should fall by no more than that, plus 20 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from neighbour import busy_neighbour

from kvd.bench.ratios import median_ratio
from kvd.executor.host_cores import compute_threads
from kvd.executor.kernels.cpu import native

SHAPES = {
    "135m": {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)},
    "1b": {"qkv": (3072, 2048), "output": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
}
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
COLD_BYTES = 100 << 20
NEIGHBOUR_WINDOW_S = 0.5


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of one matrix, packed and as torch has them."""

    packed: list
    plain: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return self.packed[0].bytes


def weights_of(fmt: str, shape: tuple[int, int]) -> Weights:
    cpu, pool = native.module(), native.pool()
    value = torch.randn(shape).to(DTYPES[fmt])
    packed = []
    while not packed or packed[0].bytes * len(packed) < COLD_BYTES:
        packed.append(cpu.Matrix(fmt, *shape))
        packed[-1].pack_rows(pool, 0, value)
    return Weights(packed, [value.clone() for _ in packed])


def sides(weights: Weights, x: torch.Tensor) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """One product with copy number ``i``: ours, torch's."""
    multiply, pool = native.module().multiply, native.pool()
    out = torch.empty(len(x), weights.packed[0].n)
    packed, plain = weights.packed, weights.plain
    return lambda i: multiply(pool, packed[i], x, out), lambda i: torch.nn.functional.linear(x, plain[i])


def seconds(call: Callable[[int], object], copies: range) -> float:
    """Of one call, on average over these copies."""
    start = time.perf_counter()
    for copy in copies:
        call(copy)
    return (time.perf_counter() - start) / len(copies)


def read_gb_per_s() -> float:
    """A plain read of memory by all threads: what the memory gives."""
    parts = [np.ones(COLD_BYTES // 8, np.int64) for _ in range(compute_threads(0))]
    best = float("inf")
    with ThreadPoolExecutor(len(parts)) as threads:
        for _ in range(10):
            start = time.perf_counter()
            list(threads.map(np.bitwise_or.reduce, parts))
            best = min(best, time.perf_counter() - start)
    return COLD_BYTES * len(parts) / best / 1e9


def compare_shapes(model: str, fmt: str, rounds: int) -> None:
    print(f"plain read of memory: {read_gb_per_s():.1f} GB/s\n")
    print("| product | rows | µs | GB/s | GFLOP/s | torch µs | torch time / ours |\n|---|---|---|---|---|---|---|")
    for name, shape in SHAPES[model].items():
        weights = weights_of(fmt, shape)
        copies = len(weights.packed)
        for rows in ROWS:
            if name == "head" and rows > 32:
                continue  # logits of the last rows alone
            ours, torchs = sides(weights, torch.randn(rows, shape[1]).to(DTYPES[fmt]))
            group = max(1, min(copies, int(0.02 / max(seconds(torchs, range(1)), 1e-6))))
            times: list[tuple[float, float]] = []
            for turn in range(rounds):
                some = range(turn * group % copies, min(copies, turn * group % copies + group))
                times.append((seconds(ours, some), seconds(torchs, some)))
            best, theirs = (min(side) for side in zip(*times, strict=True))
            ratio = median_ratio([torch_s / our_s for our_s, torch_s in times])
            flops = 2 * rows * shape[0] * shape[1]
            figures = f"{best * 1e6:.0f} | {weights.num_bytes / best / 1e9:.1f} | {flops / best / 1e9:.0f} | {theirs * 1e6:.0f} | {ratio}"
            print(f"| {name} {shape[0]}x{shape[1]} | {rows} | {figures} |", flush=True)


def per_second(call: Callable[[int], object], copies: int) -> float:
    """Calls a second over one window."""
    start = time.perf_counter()
    done = 0
    while time.perf_counter() - start < NEIGHBOUR_WINDOW_S:
        call(done % copies)
        done += 1
    return done / (time.perf_counter() - start)


def compare_beside_neighbour(fmt: str, rounds: int) -> None:
    print("\n| rows | side | processor time taken by the neighbour | throughput beside it / without | of what the lost time explains |")
    print("|---|---|---|---|---|")
    weights = weights_of(fmt, (3072, 576))
    with busy_neighbour() as neighbour:
        for rows in (1, 16, 512):
            x = torch.randn(rows, 576).to(DTYPES[fmt])
            for name, call in zip(("native", "torch"), sides(weights, x), strict=True):
                ratios, explained, lost = [], [], []
                for _ in range(rounds):
                    alone = per_second(call, len(weights.packed))
                    with neighbour.running() as taken:
                        beside = per_second(call, len(weights.packed))
                    lost.append(taken.share)
                    ratios.append(beside / alone)
                    explained.append(beside / alone / (1 - taken.share))
                mean_lost = sum(lost) / len(lost)
                print(f"| {rows} | {name} | {mean_lost:.0%} | {median_ratio(ratios)} | {median_ratio(explained)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="135m")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--skip-neighbour", action="store_true")
    options = parser.parse_args()
    status = native.status()
    print(f"kernels: {status.isa}; threads: {native.pool().num_threads} ours, {torch.get_num_threads()} torch's; {options.dtype}")
    with torch.inference_mode():
        compare_shapes(options.model, options.dtype, options.rounds)
        if not options.skip_neighbour:
            compare_beside_neighbour(options.dtype, max(6, options.rounds // 2))


if __name__ == "__main__":
    main()
