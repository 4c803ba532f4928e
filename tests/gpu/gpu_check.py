"""One script for a machine with an NVIDIA GPU: are kvd's kernels right there, and how fast.

    make gpu-wheels                                   # here: what such a machine may lack, into .gpu-wheels
    python3 tests/gpu/gpu_check.py [--tiny] [--json FILE]    # there, in the checkout; under five minutes

It needs torch with CUDA, Triton and numpy; of kvd's other needs only msgspec. First the kernels and the runner against their references, over random rows; then copies on side streams
under running steps, and whether the warm-up compiled every kernel; then figures of a random model of Llama 3.2 1B's shape next to torch's scaled-dot-product attention.
With TRITON_INTERPRET=1 and --tiny all but CUDA's own parts runs on a CPU: the test of this script. Exit status 1: something was not equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
from gpu_world import BLOCK, LLAMA_1B, TINY, Driver, Report, begin_rows, prompt_tokens, random_decoder, start, synchronise

from kvd.executor.attention.backend import AttentionRows
from kvd.executor.attention.tiles import TileShape, plan_tiles
from kvd.executor.gpu.decode_graphs import CudaGraphs, Rerun
from kvd.executor.gpu.device_runner import DeviceRunner
from kvd.executor.gpu.triton_model import TritonModel
from kvd.executor.kernels.triton import activation, norm, rotary
from kvd.executor.kernels.triton import attention as attention_kernels
from kvd.executor.kernels.triton.activation import silu_mul, silu_mul_reference
from kvd.executor.kernels.triton.attention import PagedAttention, attention_reference
from kvd.executor.kernels.triton.norm import add_and_norm, add_and_norm_reference
from kvd.executor.kv_pool import KvPool
from kvd.executor.models.decoder import Decoder
from kvd.executor.models.spec import ModelSpec
from kvd.executor.runner import TorchRunner
from kvd.executor.worker import ExecutorThread
from kvd.types import KvGroup

# ------------------------------------------------------------------------------------------------ equality


def small_kernels(report: Report, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(1)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        residual = torch.randn(5, 2048, generator=generator, device=device)
        update = torch.randn(5, 2048, generator=generator, device=device).to(dtype)
        weight = torch.randn(2048, generator=generator, device=device).to(dtype)
        expected = add_and_norm_reference(residual.clone(), update, weight, 1e-5)
        difference = (add_and_norm(residual, update, weight, 1e-5).float() - expected.float()).abs().max().item()
        report.check(f"norm {dtype}", difference <= tolerance * max(1.0, expected.float().abs().max().item()), difference=difference)
        gate_up = (torch.randn(5, 2 * 1536, generator=generator, device=device) * 3).to(dtype)
        expected = silu_mul_reference(gate_up)
        difference = (silu_mul(gate_up).float() - expected.float()).abs().max().item()
        report.check(f"activation {dtype}", difference <= tolerance * max(1.0, expected.float().abs().max().item()), difference=difference)


def attention(report: Report, device: torch.device, num_worlds: int) -> None:
    """Random rows: against the reference, and shared runs against private ones bit for bit."""
    rng = np.random.default_rng(9)
    for nth in range(num_worlds):
        dtype, tolerance = ((torch.float32, 1e-4), (torch.bfloat16, 4e-2), (torch.float16, 6e-3))[nth % 3]
        num_kv_heads, group, head_dim = int(rng.choice([1, 2, 8])), int(rng.choice([1, 3, 4, 8])), int(rng.choice([32, 64, 80, 128]))
        if device.type == "cpu":
            num_kv_heads, group, head_dim = 2, 2, 16
        window = int(rng.choice([0, 0, 200]))
        num_rows = int(rng.integers(2, 7))
        shared = int(rng.integers(8, 20)) * BLOCK
        computed = shared + rng.integers(0, 300, num_rows)
        num_tokens = np.sort(np.where(rng.random(num_rows) < 0.7, 1, rng.integers(2, 60, num_rows)))
        blocks = -(-(computed + num_tokens) // BLOCK)
        ids = rng.permutation(int(blocks.sum()) + shared)
        tables = np.zeros((num_rows, int(blocks.max())), dtype=np.int32)
        for row, count in enumerate(blocks):
            tables[row, :count], ids = ids[:count], ids[count:]
        tables[:, : shared // BLOCK] = ids[: shared // BLOCK]
        starts = np.concatenate([[0], np.cumsum(num_tokens)])
        token_rows = np.repeat(np.arange(num_rows), num_tokens)
        positions = np.arange(starts[-1]) - (starts[:-1] - computed)[token_rows]
        columns = (num_tokens, computed, starts, positions, token_rows, tables)
        private = AttentionRows(*columns)
        common = AttentionRows(
            *columns, run_start=np.zeros(1, dtype=np.int64), run_end=np.array([shared]), run_offsets=np.array([0, num_rows]),
            run_rows=np.arange(num_rows),
        )  # fmt: skip
        generator = torch.Generator(device).manual_seed(nth)
        num_blocks = int(blocks.sum()) + shared
        pool = torch.randn(num_blocks, 1, 2, BLOCK, num_kv_heads, head_dim, generator=generator, device=device).to(dtype)
        q = torch.randn(int(starts[-1]), num_kv_heads * group, head_dim, generator=generator, device=device).to(dtype)
        paged = PagedAttention(
            pool.view(-1, num_kv_heads * head_dim), num_layers=1, num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads, head_dim=head_dim,
            block_size_tokens=BLOCK, scale=head_dim**-0.5, num_programs=64,
        )  # fmt: skip
        shape = TileShape(paged.tile_tokens, paged.tile_queries, paged.chunk_queries, group)
        results = []
        for rows in (private, common):
            plan = plan_tiles(rows, shape, window)

            def put(array):
                return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)

            out = torch.full_like(q, float("nan"))
            if len(plan.slots):
                paged.attend_pieces(
                    0, window, q, put(tables.T), put([len(plan.pieces)]), put(plan.pieces), put(plan.piece_tokens), put(positions), put(plan.slots),
                    paged.new_partials(plan.num_slots), out,
                )  # fmt: skip
            if len(plan.chunks):
                paged.attend_chunks(0, window, q, put(tables.T), put(plan.chunks), out)
            results.append(out)
        difference = 0.0
        for row in range(num_rows):
            end = int(computed[row] + num_tokens[row])
            table = torch.from_numpy(tables[row, : -(-end // BLOCK)]).long().to(device)
            keys, values = (pool[table, 0, kv].reshape(-1, num_kv_heads, head_dim)[:end] for kv in (0, 1))
            part = slice(int(starts[row]), int(starts[row + 1]))
            at = torch.from_numpy(positions[part]).to(device)
            expected = attention_reference(q[part], keys, values, at, scale=head_dim**-0.5, window=window)
            difference = max(difference, (results[0][part].float() - expected.float()).abs().max().item())
        name = f"attention {num_kv_heads}x{group} heads of {head_dim}, window {window}, {str(dtype)[6:]}"
        report.check(name, difference <= tolerance, difference=difference)
        report.check("  the shared run's bits", torch.equal(*results))


def runners(report: Report, device: torch.device) -> None:
    """Greedy tokens of a small float32 model: torch's runner, ours with graphs; chunks, decodes, several rows."""
    decoder = random_decoder(TINY, torch.float32, device)
    said = []
    for make in ("torch", "kvd"):
        pool = KvPool(TINY, 200, BLOCK, torch.float32, device)
        limits = {"max_rows": 4, "max_model_len": 400}
        if make == "torch":
            runner = TorchRunner(decoder, TINY, pool, **limits)
        else:
            model = TritonModel(TINY, decoder.weights, pool, graphs=CudaGraphs(device) if device.type == "cuda" else Rerun(), **limits)
            model.capture()
            runner = DeviceRunner(model, pool, TINY.vocab_size, **limits)
        driver = Driver(runner, TINY, 200)
        lengths = (70, 33, 5)
        driver.submit(
            [start(row, prompt_tokens(TINY, length, row), driver.take(-(-length // BLOCK))) for row, length in enumerate(lengths)]
        )
        driver._lengths = dict(enumerate(lengths))
        for _ in range(20 if device.type == "cuda" else 3):
            driver.submit(going=[(row, 1) for row in range(3)])
        driver.drain()
        said.append(driver.said)
    report.check("greedy tokens of the two runners", said[0] == said[1])


def side_streams(report: Report, device: torch.device) -> None:
    """Copies while the compute stream is busy: out comes what the steps before it wrote; what a step writes after a copy in stays."""
    from kvd.executor.gpu.block_copies import SideStreamCopies, pinned_memory

    pool = KvPool(LLAMA_1B, 64, BLOCK, torch.bfloat16, device)
    pool.rows.random_(0, 255)
    expected = pool.rows[:16].cpu().numpy().tobytes()
    copies = SideStreamCopies(pool)
    memory = pinned_memory(16 * pool.row_bytes)
    busy = torch.randn(4096, 4096, device=device)

    def keep_busy() -> None:
        nonlocal busy
        for _ in range(20):
            busy = busy @ busy * 1e-3

    keep_busy()
    pool.rows[16:32] = pool.rows[:16]
    copies.read_blocks(list(range(16, 32)), memory).result()
    report.check("copy out after the steps before it", bytes(memory) == expected)
    keep_busy()
    pool.rows[40:56].fill_(1)
    copied = copies.write_blocks(list(range(40, 56)), memory)
    pool.rows[40:48].fill_(2)  # the blocks were given up, and the next step's rows have them
    keep_busy()
    copied.result()
    synchronise(device)
    report.check("copy in after the steps before it", pool.rows[48:56].cpu().numpy().tobytes() == expected[8 * pool.row_bytes :])
    report.check("steps after a copy in", bool((pool.rows[40:48] == 2).all()))


def copies_under_steps(report: Report, device: torch.device) -> None:
    """Greedy tokens of a model with and without blocks going in and out beside its steps, and the bytes of these."""
    decoder = random_decoder(TINY, torch.float32, device)
    num_own, num_other, num_steps = 40, 8, 40 if device.type == "cuda" else 2
    said = []
    is_whole = True
    for has_copies in (False, True):
        pool = KvPool(TINY, num_own + num_other, BLOCK, torch.float32, device)
        limits = {"max_rows": 2, "max_model_len": 200}
        runner = DeviceRunner(TritonModel(TINY, decoder.weights, pool, **limits), pool, TINY.vocab_size, **limits)
        copies, allocate = copies_of(pool)
        sent, got = allocate(num_other * pool.row_bytes), allocate(num_other * pool.row_bytes)
        ids = list(range(num_own, num_own + num_other))
        driver = Driver(runner, TINY, num_own)
        driver.submit([start(row, prompt_tokens(TINY, 33, row), driver.take(3)) for row in range(2)])
        driver._lengths = {0: 33, 1: 33}
        for step in range(num_steps):
            driver.submit(going=[(row, 1) for row in range(2)])
            if has_copies:
                sent[:] = bytes([step + 1]) * len(sent)
                pending = [copies.write_blocks(ids, sent), copies.read_blocks(ids, got)]
                driver.submit(going=[(row, 1) for row in range(2)])
                for each in pending:
                    if each is not None:
                        each.result()
                is_whole = is_whole and bytes(got) == bytes(sent)
            else:
                driver.submit(going=[(row, 1) for row in range(2)])
        driver.drain()
        said.append(driver.said)
    report.check("tokens with and without copies beside the steps", said[0] == said[1])
    report.check("blocks in and out beside the steps", is_whole)


def compiled_once(report: Report, device: torch.device) -> None:
    """No mixed step after the warm-up compiles a kernel, whatever number of blocks its longest row has."""
    lengths, max_model_len = ((15, 16, 17), 400) if device.type == "cuda" else ((1, 2), 40)
    limits = {"max_rows": 4, "max_model_len": max_model_len}
    pool = KvPool(TINY, 200, BLOCK, torch.float32, device)
    weights = random_decoder(TINY, torch.float32, device).weights
    model = TritonModel(TINY, weights, pool, graphs=CudaGraphs(device) if device.type == "cuda" else Rerun(), **limits)
    runner = DeviceRunner(model, pool, TINY.vocab_size, **limits)
    runner.warm_up()
    num_compiled = count_compiled()
    driver = Driver(runner, TINY, 200)
    driver.submit([start(0, prompt_tokens(TINY, 5), driver.take(1))])
    driver._lengths[0] = 5
    for row, num_blocks in enumerate(lengths, 1):
        driver.submit([start(row, prompt_tokens(TINY, num_blocks * BLOCK - 1, row), driver.take(num_blocks))], going=[(0, 1)])
        driver._lengths[row] = num_blocks * BLOCK - 1
    driver.drain()
    report.check(
        "kernels after the warm-up", count_compiled() == num_compiled, compiled=num_compiled, later=count_compiled() - num_compiled
    )


def count_compiled() -> int:
    """Kernels that Triton has compiled in this process, variants counted singly; under the interpreter none."""
    kernels = (
        attention_kernels._attend_pieces, attention_kernels._merge_pieces, attention_kernels._attend_chunks, rotary._rotate_and_write,
        norm._add_and_norm, activation._silu_mul,
    )  # fmt: skip
    return sum(len(caches[0]) for kernel in kernels for caches in getattr(kernel, "device_caches", {}).values())


def copies_of(pool: KvPool):
    """What copies the pool's blocks as the daemon would, and what makes the memory for it."""
    if pool.device.type != "cuda":
        from kvd.executor.host_memory import map_memory

        return pool, map_memory
    from kvd.executor.gpu.block_copies import SideStreamCopies, pinned_memory

    return SideStreamCopies(pool), pinned_memory


# ------------------------------------------------------------------------------------------------ figures


class Bench:
    """One model of either kind over a pool of noise."""

    def __init__(self, spec: ModelSpec, decoder: Decoder, device: torch.device, kind: str, *, num_blocks: int, max_rows: int) -> None:
        self.spec, self.device, self.num_blocks, self.kind = spec, device, num_blocks, kind
        self.pool = KvPool(spec, num_blocks, BLOCK, decoder.dtype, device)
        self.pool.positions.normal_()
        limits = {"max_rows": max_rows, "max_model_len": min(spec.max_positions, 8192)}
        if kind == "torch":
            self.runner = TorchRunner(decoder, spec, self.pool, **limits)
        else:
            model = TritonModel(spec, decoder.weights, self.pool, graphs=CudaGraphs(device) if device.type == "cuda" else Rerun(), **limits)
            self.runner = DeviceRunner(model, self.pool, spec.vocab_size, **limits)
            model.capture()

    def driver(self) -> Driver:
        return Driver(self.runner, self.spec, self.num_blocks, 2 if self.kind == "kvd" else 1)

    def prefill_s(self, length: int, chunk: int, num_cached: int = 0) -> float:
        """Seconds from the first submit to the first token of a prompt, ``num_cached`` of whose positions are there."""
        driver = self.driver()
        tokens = prompt_tokens(self.spec, length)
        began = time.perf_counter()
        first = min(chunk, length - num_cached)
        driver.submit([start(0, tokens, driver.take(-(-length // BLOCK)), num_computed=num_cached, num_tokens=first)])
        done = num_cached + first
        driver._lengths[0] = length
        while done < length:
            count = min(chunk, length - done)
            driver.submit(going=[(0, count)])
            driver._lengths[0] = length
            done += count
        driver.drain()
        return time.perf_counter() - began

    def decode(
        self, num_rows: int, context: int, num_steps: int, *, prefix: int = 0, share: bool = True
    ) -> tuple[float, dict[int, list[int]]]:
        """Tokens a second, and what was said."""
        driver = self.driver()
        runs = begin_rows(driver, num_rows, context, prefix=prefix)
        runs = runs if share else None
        going = [(row, 1) for row in range(num_rows)]
        for _ in range(2):
            driver.submit(going=going, runs=runs)
        driver.drain()
        began = time.perf_counter()
        for _ in range(num_steps):
            driver.submit(going=going, runs=runs)
        driver.drain()
        return num_rows * num_steps / (time.perf_counter() - began), driver.said


class CopyRunner:
    """The copies of a pool alone, behind the executor's thread."""

    def __init__(self, pool, copies) -> None:
        self._pool, self._copies = pool, copies

    def groups(self):
        return (KvGroup("target", self._pool.row_bytes, b"\0" * 32),)

    def execute(self, step):
        raise AssertionError("no steps here")

    def read_blocks(self, _group, block_ids, memory):
        return self._copies.read_blocks(block_ids, memory)

    def write_blocks(self, _group, block_ids, memory):
        return self._copies.write_blocks(block_ids, memory)


def figures(report: Report, device: torch.device, spec: ModelSpec, *, is_tiny: bool) -> None:
    decoder = random_decoder(spec, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    lengths, chunk, rows, context, steps = ((40,), 24, (1, 2), 40, 2) if is_tiny else ((1550, 4075), 2048, (1, 8, 16, 64), 1000, 100)
    num_blocks = 40 if is_tiny else 64 * 80
    for kind in ("torch", "kvd"):
        bench = Bench(spec, decoder, device, kind, num_blocks=num_blocks, max_rows=2 if is_tiny else 64)
        for length in lengths:
            seconds = min(bench.prefill_s(length, chunk) for _ in range(1 if is_tiny else 4))
            report.say(f"{kind}: cold prompt of {length}", ttft_ms=seconds * 1e3, tokens_per_s=length / seconds)
        length = lengths[0]
        hit = (length - 20) // BLOCK * BLOCK
        hit_s = min(bench.prefill_s(length, chunk, hit) for _ in range(1 if is_tiny else 6))
        report.say(f"{kind}: prefix hit of {hit} of {length}", ttft_ms=hit_s * 1e3)
        for num_rows in rows:
            if kind == "torch" and num_rows > 16:
                continue
            speed, _ = bench.decode(num_rows, context, steps)
            report.say(f"{kind}: decode {num_rows} rows at {context}", tokens_per_s=speed)
        num_rows, prefix = rows[-1] if is_tiny else 16, context // BLOCK * BLOCK
        speed, said = bench.decode(num_rows, context, steps, prefix=prefix)
        report.say(f"{kind}: decode {num_rows} rows, prefix of {prefix} in common", tokens_per_s=speed)
        if kind == "kvd":
            _, said_alone = bench.decode(num_rows, context, steps, prefix=prefix, share=False)
            report.check("tokens with and without shared runs", said == said_alone)
            restored(report, bench, length, hit, hit_s)
        del bench


def restored(report: Report, bench: Bench, length: int, hit: int, hit_s: float) -> None:
    """From the host's memory to the pool, as a rehydration's last leg (the disk before it is not in this)."""
    copies, allocate = copies_of(bench.pool)
    executor = ExecutorThread(CopyRunner(bench.pool, copies), allocate)
    row_bytes = bench.pool.row_bytes
    at_once = max(1, min((8 << 20) // row_bytes, hit // BLOCK))
    buffers = [executor.host_memory(at_once * row_bytes) for _ in range(4)]
    count = hit // BLOCK
    best = {"in": 1e9, "out": 1e9, "prompt": 1e9}
    for _ in range(5):
        for way, num_blocks in (
            ("in", bench.num_blocks // at_once * at_once),
            ("out", bench.num_blocks // at_once * at_once),
            ("prompt", count),
        ):
            began = time.perf_counter()
            tickets: deque = deque()
            for nth, first in enumerate(range(0, num_blocks, at_once)):
                if len(tickets) == len(buffers):
                    tickets.popleft().result()
                ids = list(range(first, min(first + at_once, num_blocks)))
                memory = buffers[nth % len(buffers)][: len(ids) * row_bytes]
                tickets.append((executor.copy_out if way == "out" else executor.copy_in)("target", ids, memory))
            for ticket in tickets:
                ticket.result()
            best[way] = min(best[way], time.perf_counter() - began)
    assert executor.close(10)
    moved = bench.num_blocks // at_once * at_once * row_bytes
    report.say("rehydration, host memory to pool", gb_per_s=moved / best["in"] / 1e9)
    report.say("checkpoint, pool to host memory", gb_per_s=moved / best["out"] / 1e9)
    report.say(f"kvd: prompt of {length}, {hit} restored from memory", ttft_ms=(best["prompt"] + hit_s) * 1e3)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few rows")
    parser.add_argument("--json", type=Path, help="write what was found to this file, too")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report()
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: Triton's interpreter on the CPU"
    report.say("machine", device=name, torch=torch.__version__, triton=triton.__version__)
    with torch.inference_mode():
        report.part(small_kernels, device)
        report.part(attention, device, 3 if options.tiny else 24)
        report.part(runners, device)
        report.part(copies_under_steps, device)
        report.part(compiled_once, device)
        if device.type == "cuda":
            report.part(side_streams, device)
        report.part(lambda *args: figures(*args, is_tiny=options.tiny), device, TINY if options.tiny else LLAMA_1B)
    report.say("end", failed=report.num_failed)
    if options.json:
        options.json.write_text(json.dumps(report.entries, indent=1))
    return 1 if report.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
