"""Native paged attention beside torch's SDPA over gathered pages: one step's attention over all layers, SmolLM2's shape unless said otherwise.

    python tests/bench/bench_attention.py [--layers 30] [--heads 9] [--kv-heads 3] [--head-dim 64] [--threads N] [--kv-dtype T]... [--no-torch]

Quickest of many repeats. GF/s counts the products of visible positions, GB/s the bytes of K and V that the rows would read one by one: shared runs and the
processor's caches make it higher than the memory's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvd.executor.attention.backend import AttentionRows
from kvd.executor.attention.reference import ReferenceAttention
from kvd.executor.host_cores import compute_threads
from kvd.executor.kernels.cpu import native
from kvd.executor.kernels.cpu.native import BLOCK_SIZE_TOKENS
from kvd.executor.kv_pool import KvPool
from kvd.executor.native_kv_pool import NativeKvPool

TILE = 64
REPEAT_S = 0.7


@dataclass(frozen=True)
class Spec:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def windows(self) -> tuple[int, ...]:
        return (0,) * self.num_layers

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Case:
    """``rows`` rows of ``tokens`` queries behind ``context`` positions; ``shared``: of them, the same blocks in all rows."""

    name: str
    rows: int
    context: int
    tokens: int = 1
    shared: int = 0
    runs: bool = True

    def step(self) -> tuple[AttentionRows, int]:
        """The rows, and the number of blocks that they need."""
        per_row = -(-(self.context + self.tokens) // BLOCK_SIZE_TOKENS)
        shared_blocks = self.shared // BLOCK_SIZE_TOKENS
        num_blocks = shared_blocks + self.rows * (per_row - shared_blocks)
        ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        own = ids[shared_blocks:].reshape(self.rows, -1)
        tables = np.concatenate([np.tile(ids[:shared_blocks], (self.rows, 1)), own], axis=1)
        runs = [self.shared // TILE * TILE] if self.shared and self.runs else []
        return (
            AttentionRows(
                num_tokens=np.full(self.rows, self.tokens),
                num_computed=np.full(self.rows, self.context),
                starts=np.arange(self.rows + 1) * self.tokens,
                positions=np.tile(np.arange(self.context, self.context + self.tokens), self.rows),
                token_rows=np.repeat(np.arange(self.rows), self.tokens),
                block_tables=np.ascontiguousarray(tables),
                run_start=np.zeros(len(runs), dtype=np.int64),
                run_end=np.array(runs, dtype=np.int64),
                run_offsets=np.arange(len(runs) + 1) * self.rows,
                run_rows=np.arange(self.rows * len(runs)),
            ),
            num_blocks,
        )

    def positions_seen(self) -> int:
        return self.rows * sum(range(self.context + 1, self.context + self.tokens + 1))


CASES = (
    Case("1 row at 100", 1, 100),
    Case("1 row at 1,000", 1, 1000),
    Case("1 row at 4,000", 1, 4000),
    Case("16 rows at 1,000", 16, 1000),
    Case("16 rows, 992 shared, run off", 16, 1020, shared=992, runs=False),
    Case("16 rows, 992 shared", 16, 1020, shared=992),
    Case("16 rows, 4,000 shared, run off", 16, 4030, shared=4000, runs=False),
    Case("16 rows, 4,000 shared", 16, 4030, shared=4000),
    Case("16 rows at 4,000, 64 shared, run off", 16, 4000, shared=64, runs=False),
    Case("16 rows at 4,000, 64 shared", 16, 4000, shared=64),
    Case("16 rows x 32, 992 shared, run off", 16, 1020, tokens=32, shared=992, runs=False),
    Case("16 rows x 32, 992 shared", 16, 1020, tokens=32, shared=992),
    Case("64 rows at 150", 64, 150),
    Case("chunk of 512 at 0", 1, 0, tokens=512),
    Case("chunk of 512 at 3,500", 1, 3500, tokens=512),
)


def quickest(work: Callable[[], object]) -> float:
    work()
    best, end = float("inf"), time.perf_counter() + REPEAT_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def native_times(spec: Spec, case: Case, kv_type: str, threads: int) -> tuple[float, float, float]:
    """Seconds: the plan, attention of all layers, writing of all layers."""
    module, pool = native.module(), native.pool(threads)
    rows, num_blocks = case.step()
    kv = NativeKvPool(spec, num_blocks, kv_type)
    random = np.random.default_rng(1)
    blocks = np.zeros(1, dtype=np.int64)
    history = module.PagedAttention(
        kv_type,
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_dim,
        kv.address,
        np.array([0, num_blocks * BLOCK_SIZE_TOKENS]),
        blocks,
        np.arange(num_blocks, dtype=np.int32)[None],
        blocks[:0],
        blocks[:0],
        blocks,
        blocks[:0],
    )
    values = random.standard_normal((num_blocks * BLOCK_SIZE_TOKENS, spec.num_kv_heads, spec.head_dim)).astype(np.float32)
    for layer in range(spec.num_layers):
        history.write(pool, layer, values, values)
    paged = module.PagedAttention(
        kv_type,
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_dim,
        kv.address,
        rows.starts,
        rows.num_computed,
        rows.block_tables,
        rows.run_start,
        rows.run_end,
        rows.run_offsets,
        rows.run_rows,
    )
    num_tokens = len(rows.positions)
    q = random.standard_normal((num_tokens, spec.num_heads, spec.head_dim)).astype(np.float32)
    compute = "float32" if kv_type == "float32" else "bfloat16"
    out = np.empty(q.shape, dtype=np.float32 if compute == "float32" else np.uint16)
    plan = paged.plan(spec.num_heads, 0, threads)

    def attend() -> None:
        for layer in range(spec.num_layers):
            paged.attend(pool, plan, layer, spec.attention_scale, q, compute, out)

    def write() -> None:
        for layer in range(spec.num_layers):
            paged.write(pool, layer, values[:num_tokens], values[:num_tokens])

    return quickest(lambda: paged.plan(spec.num_heads, 0, threads)), quickest(attend), quickest(write)


@torch.inference_mode()
def torch_time(spec: Spec, case: Case, dtype: torch.dtype) -> float:
    """Seconds of the reference backend, writing included."""
    rows, num_blocks = case.step()
    pool = KvPool(spec, num_blocks, BLOCK_SIZE_TOKENS, dtype, "cpu")
    pool.planes.normal_()
    attend = ReferenceAttention(spec, pool).plan(rows)
    q = torch.randn(len(rows.positions), spec.num_heads, spec.head_dim).to(dtype)
    k = torch.randn(len(rows.positions), spec.num_kv_heads, spec.head_dim).to(dtype)

    def work() -> None:
        for layer in range(spec.num_layers):
            attend(layer, q, k, k)

    return quickest(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=compute_threads(0))
    parser.add_argument("--kv-dtype", action="append", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = Spec(options.layers, options.heads, options.kv_heads, options.head_dim)
    print(f"{native.status().isa}, {options.threads} threads, {spec}; milliseconds for all layers")
    print(f"{'':36} {'KV':8} {'plan us':>8} {'attend':>9} {'write':>7} {'GF/s':>6} {'GB/s':>6} {'SDPA':>9} {'times':>6}")
    for case in CASES:
        for kv_type in options.kv_dtype or ("bfloat16",):
            plan, attend, write = native_times(spec, case, kv_type, options.threads)
            flops = case.positions_seen() * spec.num_heads * spec.head_dim * 4 * spec.num_layers
            width = {"float32": 4, "bfloat16": 2, "int8": 1}[kv_type]
            read = case.rows * (case.context + case.tokens) * spec.num_kv_heads * spec.head_dim * 2 * width * spec.num_layers
            line = f"{case.name:36} {kv_type:8} {plan * 1e6:8.1f} {attend * 1e3:9.3f} {write * 1e3:7.3f} {flops / attend / 1e9:6.0f} {read / attend / 1e9:6.1f}"
            if not options.no_torch and kv_type != "int8":
                sdpa = torch_time(spec, case, getattr(torch, kv_type))
                line += f" {sdpa * 1e3:9.3f} {sdpa / (attend + write):6.1f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
