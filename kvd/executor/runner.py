"""The real runner: a step in, sampled tokens out, over one model and one paged pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from kvd.executor.attention.reference import AttentionShape, ReferenceAttention
from kvd.executor.draft import DraftModel
from kvd.executor.input_batch import InputBatch, StepRows
from kvd.executor.kv_pool import KvPool, KvShape, PoolRows
from kvd.executor.late_tokens import LateTokens
from kvd.executor.prompt_scores import PromptScores
from kvd.executor.row_adapters import RowAdapters
from kvd.executor.sampling.columns import Draws, SamplingColumns
from kvd.executor.sampling.penalties import TokenCounts
from kvd.executor.sampling.sampler import Sampled, sample
from kvd.executor.step_model import StepDecoder, StepHidden, StepModel, TorchModel, finite_rows
from kvd.executor.verification import Verifier, joined
from kvd.step import ContinuedRows, ExecutorOutput, SchedulerOutput, StartedRow
from kvd.types import BlockId, SamplingParams, pack_tokens


class RunnerSpec(KvShape, AttentionShape, Protocol):
    """The part of a model's spec that the torch runner looks at."""

    @property
    def vocab_size(self) -> int: ...


Draw = Callable[[int, StepRows, np.ndarray, StepHidden], ExecutorOutput]
"""Samples, in step so and so, for rows with these indices."""


class PendingOutput(Protocol):
    """The output of a step that a device still works on."""

    def done(self) -> bool: ...

    def result(self) -> ExecutorOutput:
        """Wait for it; raises what went wrong."""


class ModelRunner:
    """Keeps the rows' state and runs steps of ``model`` over ``pool``, on its device; called from one thread."""

    def __init__(self, model: StepModel, pool: PoolRows, vocab_size: int, *, max_rows: int, max_model_len: int) -> None:
        self._model = model
        self._pool = pool
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._batch = InputBatch(max_rows, max_model_len, pool.block_size_tokens)
        self._sampling = SamplingColumns(max_rows)
        self._counts = TokenCounts(max_rows, vocab_size, pool.device)
        self._verifier = Verifier(self._batch, self._sampling, self._counts, pool, vocab_size)
        self._draft: DraftModel | None = None
        self._late = LateTokens(self._batch)
        self._scores = PromptScores(self._batch, vocab_size)
        self.adapters: RowAdapters[Any] = RowAdapters()

    def attach_draft(self, model: StepModel, pool: PoolRows, *, max_tokens: int, max_positions: int) -> None:
        """From the next step on ``model`` over ``pool`` drafts for rows that ask for it; ``max_tokens`` and ``max_positions`` as for ``DraftModel``."""
        self._draft = DraftModel(model, pool, self._batch, self._sampling, self._counts, max_tokens=max_tokens, max_positions=max_positions)

    def forget_draft(self, block_ids: Sequence[BlockId]) -> None:
        """The blocks get bytes from elsewhere: what a draft model keeps of them belongs to others."""
        if self._draft is not None:
            self._draft.forget(block_ids)

    def _know_tokens(self) -> None:
        """Have every sampled token in the rows' state, and the threads free that the draft model computes with."""
        self._late.take(wait=True)

    def launch(self, step: SchedulerOutput) -> ExecutorOutput | PendingOutput:
        """``execute``, for a caller that can wait later; a device may still work on what is returned."""
        return self.execute(step)

    def settle(self) -> None:
        """Return when nothing that was launched still writes to the pool, as far as that is not the device's own concern."""

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        """Apply the step's deltas, compute its positions, sample where a row's last known token is reached.

        A row whose hidden states or logits are not finite is named in ``failed_rows``, and again at each later step, until it is
        released or started anew; the others are unharmed.

        Raises:
            BatchError: the step does not fit the rows' state.
            IndexError: a block or a token id that does not exist.
        """
        rows = self._begin(step)
        if not len(rows.rows):
            return ExecutorOutput(step.step, [], [], [])
        hidden = self._model.forward(rows)
        finite = hidden.finite()
        if not finite.all():
            failed = ~np.logical_and.reduceat(finite, rows.attention.starts[:-1])
            if rows.drafts is not None:
                failed &= rows.drafts.counts == 0  # what was drafted wrongly may be at fault: the logits decide
            self._batch.failed[rows.rows] |= failed
        return self._sample(step.step, rows, hidden)

    def warm_up(self) -> None:
        """Run one step of each shape class, decodes by batch size and prompts by length, on a scratch pool and with no other trace."""
        size = self._pool.block_size_tokens
        prompts = [length for length in self._model.warm_up_prompts if length < self._max_model_len]
        most_rows = min(self._max_rows, self._model.warm_up_rows)
        decodes = [1 << power for power in range(most_rows.bit_length())]
        blocks_of_prompt = -(-max(prompts) // size)
        scratch = self._scratch(self._pool.scratch(max(blocks_of_prompt, decodes[-1])))
        sampling = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
        for length in prompts:
            table = tuple(BlockId(block) for block in range(-(-length // size)))
            scratch.execute(SchedulerOutput(0, (_warm_row(0, length, table, sampling[0]),), ContinuedRows()))
        for count in decodes:
            rows = tuple(_warm_row(row, 1, (BlockId(row),), sampling[row % 3]) for row in range(count))
            scratch.execute(SchedulerOutput(0, rows, ContinuedRows()))

    def _scratch(self, pool: PoolRows) -> ModelRunner:
        """A runner over another pool, for warming up what is there once for all."""
        return ModelRunner(self._model.over(pool), pool, self._vocab_size, max_rows=self._max_rows, max_model_len=self._max_model_len)

    def _begin(self, step: SchedulerOutput) -> StepRows:
        """All that comes before the forward pass."""
        rows = self._apply(step)
        self._pool.copy_blocks([copy.source for copy in step.copies], [copy.target for copy in step.copies])
        self._pool.clear_blocks(rows.fresh_blocks)
        for started in step.started:
            self._start(started)
        return self._with_adapters(step, rows)

    def _with_adapters(self, step: SchedulerOutput, rows: StepRows) -> StepRows:
        """The step's inputs with the adapters of its rows, those that start in it included."""
        self.adapters.release(step.released)
        for started in step.started:
            self.adapters.start(started.row, started.adapter)
        adapters = self.adapters.of(rows.rows)
        return rows if adapters is None else replace(rows, adapters=adapters)

    def _apply(self, step: SchedulerOutput) -> StepRows:
        """The step's inputs, what the draft model proposes among them."""
        self._sampling.begin_step(step)
        draft = self._draft
        if draft is None:
            return self._batch.apply(step)
        if draft.is_asked(step):
            self._know_tokens()  # before a row that starts may take the place of another
        draft.apply(step)
        rows = self._batch.apply(step, draft.propose)
        draft.follow(step)
        return rows

    def _start(self, started: StartedRow) -> None:
        self._sampling.start(started)
        self._late.start(started.row)
        self._scores.start(started)
        if self._sampling.penalised(started.row):
            known = np.frombuffer(started.token_ids, dtype="<u4")
            self._counts.start(started.row, known[: started.num_prompt_tokens], known[started.num_prompt_tokens :])

    def _sample(self, step: int, rows: StepRows, hidden: StepHidden) -> ExecutorOutput:
        batch = self._batch
        scores = self._scores.of(rows, hidden)
        reached = np.flatnonzero(rows.samples)
        wanted = reached[~batch.failed[rows.rows[reached]]]
        output = ExecutorOutput(step, [], [], [])
        if len(wanted):
            positions = batch.num_known[rows.rows[wanted]]
            is_plain = self._sampling.are_plain(rows.rows[wanted], positions)
            draw = self._draw_greedy if is_plain else self._draw
            if rows.drafts is None:
                output = draw(step, rows, wanted, hidden)
            else:
                output = self._verify(step, rows, wanted, hidden, None if is_plain else draw)
        if scores:
            output = replace(output, prompt_logprobs=scores)
        if not batch.failed[rows.rows].any():
            return output
        failed = rows.rows[batch.failed[rows.rows]]
        stuck = rows.rows[reached][batch.failed[rows.rows[reached]]]
        batch.append(stuck, np.zeros(len(stuck), dtype=np.int64))  # keeps a step that is already in flight in range
        return replace(output, failed_rows=tuple(failed.tolist()))

    def _verify(self, step: int, rows: StepRows, wanted: np.ndarray, hidden: StepHidden, draw: Draw | None) -> ExecutorOutput:
        """As ``draw``, which is for rows that drafted nothing, where some did; None: all rows are of one kind, so that they share one pass."""
        drafts = rows.drafts
        assert drafts is not None, "somebody drafts"
        drafting = drafts.counts[wanted] > 0
        if draw is None or drafting.all():
            output = self._verifier.verify(step, rows, wanted, hidden)
        else:
            output = draw(step, rows, wanted[~drafting], hidden)
            if drafting.any():
                output = joined(output, self._verifier.verify(step, rows, wanted[drafting], hidden))
        if self._draft is not None:
            drafted_rows = rows.rows[drafts.counts > 0]
            self._draft.rewind(drafted_rows, self._batch.num_computed[drafted_rows])
        return replace(output, short_drafts=drafts.short)

    def _draw_greedy(self, step: int, rows: StepRows, wanted: np.ndarray, hidden: StepHidden) -> ExecutorOutput:
        """The most frequent case: every row takes its largest logit, and nothing else is asked of any."""
        token_ids, finite = hidden.greedy(rows.attention.starts[wanted + 1] - 1)
        sampled_rows = rows.rows[wanted]
        if not finite.all():
            self._batch.failed[sampled_rows[~finite]] = True
            sampled_rows, token_ids = sampled_rows[finite], token_ids[finite]
        self._batch.append(sampled_rows, token_ids)
        return ExecutorOutput(step, sampled_rows.tolist(), self._sampling.choices(sampled_rows), token_ids.tolist())

    def _draw(self, step: int, rows: StepRows, wanted: np.ndarray, hidden: StepHidden) -> ExecutorOutput:
        batch = self._batch
        logits = hidden.logits(rows.attention.starts[wanted + 1] - 1)
        finite = finite_rows(logits)
        if not finite.all():
            batch.failed[rows.rows[wanted[~finite]]] = True
            logits = logits[self._to_device(np.flatnonzero(finite))]
            wanted = wanted[finite]
            if not len(wanted):
                return ExecutorOutput(step, [], [], [])
        sampled_rows = rows.rows[wanted]
        draws, index = self._sampling.draws(sampled_rows, batch.num_known[sampled_rows], batch.token_ids)
        if len(draws.row) > len(wanted):
            logits = logits[self._to_device(index)]
        sampled = sample(logits, draws, self._counts)
        own = np.flatnonzero(np.diff(index, prepend=-1))  # a row's first draw is its own choice
        if sampled.stuck is not None:
            return self._drop_stuck(step, draws, sampled, own)
        batch.append(sampled_rows, sampled.token_ids[own])
        counted = own[draws.penalised[own]]
        if len(counted):
            self._counts.add(draws.row[counted], sampled.token_ids[counted])
        return ExecutorOutput(step, draws.row.tolist(), draws.choice.tolist(), sampled.token_ids.tolist(), sampled.logprobs)

    def _drop_stuck(self, step: int, draws: Draws, sampled: Sampled, own: np.ndarray) -> ExecutorOutput:
        """Rows whose rules left nothing to sample, for one choice at least, fail; the others go on."""
        assert sampled.stuck is not None, "somebody is stuck"
        stuck_rows = np.unique(draws.row[sampled.stuck])
        self._batch.failed[stuck_rows] = True
        goes_on = ~np.isin(draws.row, stuck_rows)
        own = own[goes_on[own]]
        self._batch.append(draws.row[own], sampled.token_ids[own])
        counted = own[draws.penalised[own]]
        if len(counted):
            self._counts.add(draws.row[counted], sampled.token_ids[counted])
        kept = np.flatnonzero(goes_on)
        logprobs = None if sampled.logprobs is None else [sampled.logprobs[draw] for draw in kept]
        return ExecutorOutput(
            step,
            draws.row[kept].tolist(),
            draws.choice[kept].tolist(),
            sampled.token_ids[kept].tolist(),
            logprobs,
            stuck_rows=tuple(stuck_rows.tolist()),
        )

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._pool.device)


class TorchRunner(ModelRunner):
    """A runner of torch's decoder over the reference attention."""

    def __init__(self, decoder: StepDecoder, spec: RunnerSpec, pool: KvPool, *, max_rows: int, max_model_len: int) -> None:
        model = TorchModel(decoder, lambda pool: ReferenceAttention(spec, pool), pool)
        super().__init__(model, pool, spec.vocab_size, max_rows=max_rows, max_model_len=max_model_len)


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
