"""What the check on a GPU drives: a report, random models, and rows whose steps are launched as the engine would."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from dataclasses import fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "clients/python")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvd.executor.models.decoder import Decoder, allocate_weights  # noqa: E402
from kvd.executor.models.spec import Architecture, ModelSpec, RopeSpec  # noqa: E402
from kvd.step import ContinuedRows, SchedulerOutput, SharedRuns, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0)
TINY = ModelSpec(
    architecture=Architecture.LLAMA, name="tiny", num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=97, max_positions=512, rms_norm_eps=1e-5, rope=RopeSpec(theta=5e5), windows=(0, 0), qkv_bias=False, qk_norm=False, tied_head=True,
    eos_token_ids=(0,), weights_format="safetensors", weights_dtype="bfloat16",
)  # fmt: skip
LLAMA_1B = replace(
    TINY, name="random 1B", num_layers=16, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8, head_dim=64, vocab_size=128_256,
    max_positions=8192, windows=(0,) * 16,
)  # fmt: skip


class Report:
    """Lines as they come, and all of them as JSON."""

    def __init__(self) -> None:
        self.entries: list[dict[str, object]] = []
        self.num_failed = 0
        self._began_s = time.monotonic()

    def say(self, name: str, **values: object) -> None:
        self.entries.append({"name": name, **values})
        shown = "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items())
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {name:44} {shown}", flush=True)

    def check(self, name: str, is_good: bool, **values: object) -> None:
        self.num_failed += not is_good
        self.say(name, verdict="equal" if is_good else "NOT EQUAL", **values)

    def part(self, work, *args) -> None:
        """One part's failure keeps nothing of the others back."""
        try:
            work(self, *args)
        except Exception:
            self.num_failed += 1
            self.say(work.__name__, verdict="RAISED")
            traceback.print_exc()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_decoder(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    weights = allocate_weights(spec, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(3)
    weights.embedding.normal_(0, 1, generator=generator)
    weights.final_norm.fill_(1)
    for layer in weights.layers:
        for each in fields(layer):
            tensor = getattr(layer, each.name)
            if tensor is not None:
                tensor.fill_(1) if tensor.dim() == 1 else tensor.normal_(0, tensor.shape[1] ** -0.5, generator=generator)
    return Decoder(spec, weights)


def start(row, tokens, blocks, *, num_computed=0, num_tokens=None):
    todo = len(tokens) - num_computed if num_tokens is None else num_tokens
    return StartedRow(row, pack_tokens(tokens), len(tokens), num_computed, todo, tuple(blocks), GREEDY)


class Driver:
    """Hands blocks to rows and keeps up to two steps in flight, as the engine does."""

    def __init__(self, runner, spec, num_blocks: int, in_flight: int = 2) -> None:
        self.runner, self.spec = runner, spec
        self._free = list(range(num_blocks))
        self._lengths: dict[int, int] = {}
        self._step = 0
        self._in_flight = in_flight
        self._pending: deque = deque()
        self.said: dict[int, list[int]] = {}

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def submit(self, started=(), going=(), runs=None) -> None:
        """``going``: (row, number of tokens); blocks are added as they are needed."""
        offsets, ids = [0], []
        for row, count in going:
            before = -(-self._lengths[row] // BLOCK)
            self._lengths[row] += count
            ids += self.take(-(-self._lengths[row] // BLOCK) - before)
            offsets.append(len(ids))
        for each in started:
            self._lengths[each.row] = len(each.block_ids) * BLOCK
        step = SchedulerOutput(
            self._step, tuple(started), ContinuedRows([row for row, _ in going], [count for _, count in going], offsets, ids)
        )
        self._step += 1
        self._pending.append(self.runner.launch(step if runs is None else replace(step, shared_runs=runs)))
        while len(self._pending) >= self._in_flight:
            self.collect()

    def collect(self) -> None:
        pending = self._pending.popleft()
        output = pending.result() if hasattr(pending, "result") else pending
        assert not output.failed_rows
        for row, token_id in zip(output.rows, output.token_ids, strict=True):
            self.said.setdefault(row, []).append(token_id)

    def drain(self) -> None:
        while self._pending:
            self.collect()


def prompt_tokens(spec: ModelSpec, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, spec.vocab_size, length).tolist()


def begin_rows(driver: Driver, num_rows: int, context: int, *, prefix: int = 0) -> SharedRuns | None:
    """Rows whose first ``context`` positions are taken as computed (the pool holds noise); of these the first ``prefix`` are in common."""
    common = driver.take(prefix // BLOCK)
    started = []
    for row in range(num_rows):
        blocks = [*common, *driver.take(-(-(context + 1) // BLOCK) - len(common))]
        started.append(start(row, prompt_tokens(driver.spec, context + 1, row), blocks, num_computed=context))
        driver._lengths[row] = context + 1
    runs = SharedRuns([0], [prefix // BLOCK], [0, num_rows], list(range(num_rows))) if prefix and num_rows > 1 else None
    driver.submit(started, runs=runs)
    for row in range(num_rows):
        driver._lengths[row] = context + 1
    return runs
