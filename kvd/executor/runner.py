"""The real runner: a step in, sampled tokens out, over one decoder, one paged pool and one attention backend."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvd.executor.attention.backend import AttentionBackend, StepAttention
from kvd.executor.attention.reference import AttentionShape, ReferenceAttention
from kvd.executor.input_batch import InputBatch, StepRows
from kvd.executor.kv_pool import KvPool, KvShape
from kvd.executor.sampling.columns import SamplingColumns
from kvd.executor.sampling.penalties import TokenCounts
from kvd.executor.sampling.sampler import sample
from kvd.step import ContinuedRows, ExecutorOutput, SchedulerOutput, StartedRow
from kvd.types import BlockId, SamplingParams, TokenLogprobs, pack_tokens

_WARM_UP_PROMPTS = (1, 16, 64, 256, 512)


class RunnerSpec(KvShape, AttentionShape, Protocol):
    """The part of a model's spec that the runner looks at."""

    @property
    def vocab_size(self) -> int: ...


class StepDecoder(Protocol):
    """The decoder, as the runner drives it."""

    def forward(self, token_ids: Tensor, positions: Tensor, attend: StepAttention) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TorchRunner:
    """Keeps the rows' state and runs steps on the pool's device; called from one thread."""

    def __init__(self, decoder: StepDecoder, spec: RunnerSpec, pool: KvPool, *, max_rows: int, max_model_len: int) -> None:
        self._decoder = decoder
        self._spec = spec
        self._pool = pool
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._attention: AttentionBackend = ReferenceAttention(spec, pool)
        self._batch = InputBatch(max_rows, max_model_len, pool.block_size_tokens)
        self._sampling = SamplingColumns(max_rows)
        self._counts = TokenCounts(max_rows, spec.vocab_size, pool.device)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        """Apply the step's deltas, compute its positions, sample where a row's last known token is reached.

        A row whose hidden states or logits are not finite is named in ``failed_rows``, and again at each later step, until it is
        released or started anew; the others are unharmed.

        Raises:
            BatchError: the step does not fit the rows' state.
            IndexError: a block or a token id that does not exist.
        """
        rows = self._batch.apply(step)
        self._pool.copy_blocks([copy.source for copy in step.copies], [copy.target for copy in step.copies])
        self._pool.clear_blocks(rows.fresh_blocks)
        for started in step.started:
            self._start(started)
        if not len(rows.rows):
            return ExecutorOutput(step.step, [], [], [])
        attention = rows.attention
        attend = self._attention.plan(attention)
        hidden = self._decoder.forward(self._to_device(rows.token_ids), self._to_device(attention.positions), attend)
        finite = torch.isfinite(hidden.sum(dim=-1, dtype=torch.float32)).cpu().numpy()
        self._batch.failed[rows.rows] |= ~np.logical_and.reduceat(finite, attention.starts[:-1])
        return self._sample(step.step, rows, hidden)

    def warm_up(self) -> None:
        """Run one step of each shape class, decodes by batch size and prompts by length, on a scratch pool and with no other trace."""
        size = self._pool.block_size_tokens
        prompts = [length for length in _WARM_UP_PROMPTS if length < self._max_model_len]
        decodes = [1 << power for power in range(self._max_rows.bit_length()) if 1 << power <= self._max_rows]
        blocks_of_prompt = -(-max(prompts) // size)
        shape = (max(blocks_of_prompt, decodes[-1]), size, self._pool.dtype, self._pool.device)
        scratch = TorchRunner(
            self._decoder, self._spec, KvPool(self._spec, *shape), max_rows=self._max_rows, max_model_len=self._max_model_len
        )
        sampling = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
        for length in prompts:
            table = tuple(BlockId(block) for block in range(-(-length // size)))
            scratch.execute(SchedulerOutput(0, (_warm_row(0, length, table, sampling[0]),), ContinuedRows()))
        for count in decodes:
            rows = tuple(_warm_row(row, 1, (BlockId(row),), sampling[row % 3]) for row in range(count))
            scratch.execute(SchedulerOutput(0, rows, ContinuedRows()))

    def _start(self, started: StartedRow) -> None:
        self._sampling.start(started)
        if self._sampling.penalised(started.row):
            known = np.frombuffer(started.token_ids, dtype="<u4")
            self._counts.start(started.row, known[: started.num_prompt_tokens], known[started.num_prompt_tokens :])

    def _sample(self, step: int, rows: StepRows, hidden: Tensor) -> ExecutorOutput:
        batch = self._batch
        reached = np.flatnonzero(rows.samples)
        wanted = reached[~batch.failed[rows.rows[reached]]]
        token_ids: list[int] = []
        choices: list[int] = []
        drawn_rows: list[int] = []
        logprobs: list[TokenLogprobs | None] | None = None
        if len(wanted):
            logits = self._decoder.logits(hidden[self._to_device(rows.attention.starts[wanted + 1] - 1)])
            # a row's sum is not finite if one of its logits is not
            finite = torch.isfinite(logits.sum(dim=-1)).cpu().numpy()
            if not finite.all():
                batch.failed[rows.rows[wanted[~finite]]] = True
                logits = logits[self._to_device(np.flatnonzero(finite))]
                wanted = wanted[finite]
        if len(wanted):
            sampled_rows = rows.rows[wanted]
            draws, index = self._sampling.draws(sampled_rows, batch.num_known[sampled_rows])
            if len(draws.row) > len(wanted):
                logits = logits[self._to_device(index)]
            sampled = sample(logits, draws, self._counts)
            token_ids, choices, drawn_rows = sampled.token_ids.tolist(), draws.choice.tolist(), draws.row.tolist()
            logprobs = sampled.logprobs
            own = np.flatnonzero(np.diff(index, prepend=-1))  # a row's first draw is its own choice
            batch.append(sampled_rows, sampled.token_ids[own])
            counted = own[draws.penalised[own]]
            if len(counted):
                self._counts.add(draws.row[counted], sampled.token_ids[counted])
        failed = rows.rows[batch.failed[rows.rows]]
        stuck = rows.rows[reached][batch.failed[rows.rows[reached]]]
        batch.append(stuck, np.zeros(len(stuck), dtype=np.int64))  # keeps a step that is already in flight in range
        return ExecutorOutput(step, drawn_rows, choices, token_ids, logprobs, tuple(failed.tolist()))

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._pool.device)


def _warm_row(row: int, num_tokens: int, block_ids: tuple[BlockId, ...], sampling: SamplingParams) -> StartedRow:
    return StartedRow(
        row=row,
        token_ids=pack_tokens([0]) * num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed=0,
        num_tokens=num_tokens,
        block_ids=block_ids,
        sampling=sampling,
    )
