"""The runner on kvd's own CPU kernels: steps are launched into a queue that runs them one after another outside of the interpreter.

What a row sampled stays in the queue and is the next step's input there, so that a step begins when the one before it ends. That goes for rows that are
greedy or draw from all of their distribution, or from what biases, lists and masks leave of it, with log-probabilities or without; steps in which a row wants
more (top-k, top-p, min-p, penalties, bad words of several ids, further choices) are sampled here: launching such a step waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvd.executor.input_batch import StepRows
from kvd.executor.kernels.cpu import native
from kvd.executor.kv_pool import PoolRows
from kvd.executor.native_kv_pool import NativeKvPool
from kvd.executor.native_model import NativeModel, adapter_arguments, step_arrays
from kvd.executor.runner import ModelRunner
from kvd.executor.sampling.noise import stream_keys
from kvd.step import ExecutorOutput, LateMasks, SchedulerOutput
from kvd.types import TokenLogprobs

_IN_QUEUE = -1
"""In the place of a token id that only the queue knows yet."""
_NOTHING = np.zeros(0, dtype=np.int64)
_NO_TEMPERATURES = np.zeros(0, dtype=np.float32)
_NO_KEYS = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched. Any thread may take its result."""

    step: int
    rows: np.ndarray
    """int64 ``[R]``."""
    sampled_rows: list[int]
    choices: list[int]
    queue: Any
    queued: Any
    shaping: Any = None
    """What the rows wished beside tokens; None: nothing."""

    def done(self) -> bool:
        return bool(self.queued.done())

    def result(self) -> ExecutorOutput:
        """Wait for the step; raises what went wrong in it or before it."""
        self.queue.wait(self.queued)
        token_ids, failed = self.queued.sampled, self.queued.failed
        logprobs = None if self.shaping is None else self._logprobs(token_ids)
        if not failed:
            return ExecutorOutput(self.step, self.sampled_rows, self.choices, token_ids, logprobs)
        failed_rows = tuple(self.rows[failed].tolist())
        good = [index for index, row in enumerate(self.sampled_rows) if row not in failed_rows]
        return ExecutorOutput(
            self.step,
            [self.sampled_rows[index] for index in good],
            [self.choices[index] for index in good],
            [token_ids[index] for index in good],
            None if logprobs is None else [logprobs[index] for index in good],
            failed_rows=failed_rows,
            stuck_rows=() if self.shaping is None else tuple(self.sampled_rows[index] for index in self.shaping.stuck),
        )

    def _logprobs(self, token_ids: list[int]) -> list[TokenLogprobs | None] | None:
        scored = self.shaping.scored
        if not scored:
            return None
        entries: list[TokenLogprobs | None] = [None] * len(token_ids)
        for index, logprob, top in scored:
            entries[index] = TokenLogprobs(token_ids[index], logprob, top)
        return entries


class NativeRunner(ModelRunner):
    """A runner of a ``NativeModel``; called from one thread."""

    def __init__(
        self, model: NativeModel, pool: NativeKvPool, vocab_size: int, *, max_rows: int, max_model_len: int, queue: Any = None
    ) -> None:
        """``queue`` is that of a runner over the same decoder; without it a new one."""
        super().__init__(model, pool, vocab_size, max_rows=max_rows, max_model_len=max_model_len)
        self._native = model
        self._native_pool = pool
        self._queue = queue or native.module().StepQueue(model.decoder, max_rows)

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        """Launch the step and wait for it."""
        output = self.launch(step)
        return output if isinstance(output, ExecutorOutput) else output.result()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> ExecutorOutput | PendingStep:
        """As ``ModelRunner.execute``, but perhaps still under way. The steps' results may be taken in any order."""
        batch = self._batch
        rows = self._apply(step)
        for started in step.started:
            self._start(started)
        rows = self._with_adapters(step, rows)
        reached = np.flatnonzero(rows.samples)
        sampled_rows = rows.rows[reached]
        positions = batch.num_known[sampled_rows]
        if rows.drafts is None and not self._scores.are_wanted(rows) and self._sampling.are_separable(sampled_rows):
            shaping = self._shaping(sampled_rows, positions, step.late_masks)
            queued = self._put(step, rows, reached, positions, shaping)
            batch.append(sampled_rows, np.full(len(sampled_rows), _IN_QUEUE))
            if self._draft is not None:
                self._late.expect(sampled_rows, positions, done=queued.done, read=lambda: np.array(queued.sampled))
            choices = self._sampling.choices(sampled_rows)
            return PendingStep(step.step, rows.rows, sampled_rows.tolist(), choices, self._queue, queued, shaping)
        queued = self._put(step, rows, _NOTHING, positions)
        self._queue.wait(queued)
        return self._finish_here(step.step, rows, queued)

    def settle(self) -> None:
        self._queue.wait_idle()

    def _know_tokens(self) -> None:
        self._queue.wait_idle()
        super()._know_tokens()

    def _scratch(self, pool: PoolRows) -> NativeRunner:
        assert isinstance(pool, NativeKvPool)
        limits = {"max_rows": self._max_rows, "max_model_len": self._max_model_len}
        return NativeRunner(self._native.over(pool), pool, self._vocab_size, **limits, queue=self._queue)

    def _shaping(self, rows: np.ndarray, positions: np.ndarray, late_masks: LateMasks | None) -> Any:
        """What ``rows`` wish of their draws at ``positions``, for the queue; None: nothing."""
        wishes = self._sampling.wishes(rows, positions)
        if wishes is None:
            return None
        rules = wishes.rules
        shaping = native.module().Shaping(
            len(rows),
            rules.bias_draw,
            rules.bias_id,
            rules.bias_value,
            rules.allowed_draw,
            rules.allowed_id,
            rules.banned_draw,
            rules.banned_id,
            wishes.masked,
            wishes.num_logprobs,
        )
        if wishes.octets is not None:
            shaping.give_masks(wishes.octets.reshape(-1))
        elif late_masks is not None:
            late_masks.when_told(lambda masks: shaping.give_masks(np.frombuffer(masks.words, dtype=np.uint8)))
        return shaping

    def _put(self, step: SchedulerOutput, rows: StepRows, sampling: np.ndarray, positions: np.ndarray, shaping: Any = None) -> Any:
        pool = self._native_pool
        temperatures, keys = _NO_TEMPERATURES, _NO_KEYS
        if len(sampling):
            of_rows, seeds, choices = self._sampling.randomness(rows.rows[sampling])
            if of_rows.any():
                temperatures, keys = of_rows, stream_keys(seeds, choices, positions)
        return self._queue.launch(
            pool.address,
            pool.kv_type,
            pool.num_blocks,
            pool.row_bytes,
            np.array([copy.source for copy in step.copies], dtype=np.int64),
            np.array([copy.target for copy in step.copies], dtype=np.int64),
            rows.fresh_blocks,
            rows.rows,
            np.isin(rows.rows, [started.row for started in step.started]) if step.started else np.zeros(len(rows.rows), dtype=bool),
            *step_arrays(rows),
            sampling,
            temperatures,
            keys,
            *adapter_arguments(rows),
            shaping=shaping,
        )

    def _finish_here(self, step: int, rows: StepRows, queued: Any) -> ExecutorOutput:
        """Sample with all that the sampler knows; what it finds out is told the queue."""
        batch = self._batch
        failed = np.zeros(len(rows.rows), dtype=bool)
        failed[queued.failed] = True
        if rows.drafts is not None:
            failed &= rows.drafts.counts == 0  # what was drafted wrongly may be at fault: the logits decide
        batch.failed[rows.rows] = failed
        output = self._sample(step, rows, self._native.hidden())
        if output.failed_rows or queued.failed:
            self._queue.set_failed(rows.rows, batch.failed[rows.rows])
        return output
