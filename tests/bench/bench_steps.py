"""Steps of the native decoder, timed part by part: decodes at several batch sizes and contexts, prompts at several lengths.

    python tests/bench/bench_steps.py MODEL [--dtype bfloat16] [--kv bfloat16] [--case ROWS:CONTEXT:TOKENS[:shared]]...

A case runs ROWS rows of TOKENS new positions after CONTEXT computed ones (`shared`: all rows have the same blocks there). What is printed is the quickest of
many repeats: milliseconds of a step, tokens a second, and the milliseconds of each part.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from kvd.executor.attention.backend import AttentionRows
from kvd.executor.host_cores import compute_threads
from kvd.executor.input_batch import StepRows
from kvd.executor.kernels.cpu import native
from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import fit_length
from kvd.executor.models.weights.native import keeps_quantised
from kvd.executor.native_kv_pool import NativeKvPool
from kvd.executor.native_model import NativeModel, load_native_decoder

CASES = ("1:64:1", "8:64:1", "16:64:1", "1:1024:1", "16:1024:1", "16:1024:1:shared", "1:0:512", "1:512:512", "1:1024:512", "1:3584:512")
MAX_MODEL_LEN = 8192
SIZE = 16
REPEAT_S = 1.5


def step_of(rows: int, context: int, tokens: int, *, shared: bool, vocab_size: int, num_blocks: int) -> StepRows:
    rng = np.random.default_rng(0)
    per_row = -(-(context + tokens) // SIZE)
    if rows * per_row > num_blocks:
        raise SystemExit(f"{rows} rows of {per_row} blocks need more than the {num_blocks} blocks of the pool")
    tables = rng.permutation(num_blocks)[: rows * per_row].reshape(rows, per_row).astype(np.int32)
    runs: list[int] = []
    if shared:
        runs = [context // 64 * 64]
        tables[:, : runs[0] // SIZE] = tables[0, : runs[0] // SIZE]
    attention = AttentionRows(
        num_tokens=np.full(rows, tokens, dtype=np.int64),
        num_computed=np.full(rows, context, dtype=np.int64),
        starts=np.arange(rows + 1, dtype=np.int64) * tokens,
        positions=np.tile(np.arange(context, context + tokens), rows),
        token_rows=np.repeat(np.arange(rows), tokens),
        block_tables=tables,
        run_start=np.zeros(len(runs), dtype=np.int64),
        run_end=np.array(runs, dtype=np.int64),
        run_offsets=np.arange(len(runs) + 1, dtype=np.int64) * rows,
        run_rows=np.arange(rows * len(runs), dtype=np.int64),
    )
    token_ids = rng.integers(0, vocab_size, rows * tokens)
    return StepRows(np.arange(rows), attention, token_ids, np.ones(rows, dtype=bool), np.zeros(0, dtype=np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kv", default="", help="type of K and V; the dtype if not given")
    parser.add_argument("--threads", type=int, default=compute_threads(0))
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--case", action="append", help="ROWS:CONTEXT:TOKENS[:shared]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec, _ = fit_length(inspect_model(options.model), 0)
    decoder = load_native_decoder(
        options.model,
        spec,
        dtype=getattr(torch, options.dtype),
        quantised=keeps_quantised(spec, "auto"),
        threads=options.threads,
        max_model_len=min(MAX_MODEL_LEN, spec.max_positions),
        max_step_tokens=512,
        progress=lambda done, total: None,
    )
    model = NativeModel(decoder, NativeKvPool(spec, options.blocks, options.kv or options.dtype))
    print(f"{spec.name}, {options.dtype}, {native.status().isa}, {options.threads} threads")
    for case in options.case or CASES:
        rows, context, tokens, *rest = case.split(":")
        step = step_of(int(rows), int(context), int(tokens), shared=bool(rest), vocab_size=spec.vocab_size, num_blocks=options.blocks)
        seconds, parts = quickest(model, decoder, step)
        shown = "  ".join(f"{name} {part * 1e3:.2f}" for name, part in parts.items() if part > seconds / 1000)
        print(f"{case:18s} {seconds * 1e3:8.2f} ms {len(step.token_ids) / seconds:8.1f} tokens/s   {shown}")


def quickest(model, decoder, step):
    """Seconds of the quickest repeat, and of its parts."""
    last = step.attention.starts[1:] - 1
    best, parts = float("inf"), {}
    decoder.measure(True)
    until = time.perf_counter() + REPEAT_S
    repeats = 0
    while repeats < 3 or time.perf_counter() < until:
        decoder.take_times()
        began = time.perf_counter()
        model.forward(step).greedy(last)
        seconds = time.perf_counter() - began
        if seconds < best:
            best, parts = seconds, decoder.take_times()
        repeats += 1
    return best, parts


if __name__ == "__main__":
    main()
