"""The runner whose steps are handed to a GPU and not waited for: what a row sampled stays on the device and is the next step's input there.

A step whose rows are greedy, or draw from all of their distribution, is launched whole; its tokens come to the host when somebody asks for them. Steps in which a row wants more (top-k, top-p,
min-p, penalties, log-probabilities, bans, further choices) are sampled with the host's help: launching such a step waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvd.executor.gpu.transfer import Download, download, upload
from kvd.executor.gpu.triton_model import TritonHidden, TritonModel
from kvd.executor.input_batch import StepRows
from kvd.executor.kv_pool import KvPool, PoolRows
from kvd.executor.runner import ModelRunner
from kvd.executor.sampling.noise import gumbel, stream_keys
from kvd.step import ExecutorOutput, SchedulerOutput

_ON_DEVICE = -1
"""In the place of a token id that only the device knows yet."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched. Any thread may take its result, once."""

    step: int
    rows: np.ndarray
    """int64 ``[R]``."""
    sampled: np.ndarray
    """Indices of the R rows that sample a token."""
    choices: list[int]
    drawn: Download
    """bool ``[R]``: which rows have failed; int64 ``[len(sampled)]``: token ids."""

    def done(self) -> bool:
        return self.drawn.fence.done()

    def result(self) -> ExecutorOutput:
        """Wait for the device; raises what went wrong there."""
        self.drawn.fence.wait()
        failed, token_ids = (tensor.numpy() for tensor in self.drawn.tensors)
        good = np.flatnonzero(~failed[self.sampled])
        return ExecutorOutput(
            self.step,
            self.rows[self.sampled[good]].tolist(),
            [self.choices[index] for index in good],
            token_ids[good].tolist(),
            failed_rows=tuple(self.rows[failed].tolist()),
        )


def _token_ids(drawn: Download) -> np.ndarray:
    drawn.fence.wait()
    token_ids: np.ndarray = drawn.tensors[1].numpy()
    return token_ids


class DeviceRunner(ModelRunner):
    """A runner of ``TritonModel``; called from one thread."""

    def __init__(self, model: TritonModel, pool: KvPool, vocab_size: int, *, max_rows: int, max_model_len: int) -> None:
        super().__init__(model, pool, vocab_size, max_rows=max_rows, max_model_len=max_model_len)
        self._triton = model
        self._failed = torch.zeros(max_rows, dtype=torch.bool, device=pool.device)
        self._vocabulary = torch.arange(vocab_size, device=pool.device)

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        """Launch the step and wait for it."""
        output = self.launch(step)
        return output if isinstance(output, ExecutorOutput) else output.result()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> ExecutorOutput | PendingStep:
        """As ``ModelRunner.execute``, but perhaps still under way. The steps' results may be taken in any order."""
        rows = self._begin(step)
        if not len(rows.rows):
            return ExecutorOutput(step.step, [], [], [])
        hidden = self._triton.forward(rows)
        reached = np.flatnonzero(rows.samples)
        sampled_rows = rows.rows[reached]
        positions = self._batch.num_known[sampled_rows]
        on_device = self._upload(step, rows, reached, positions)
        failed = self._note_failures(hidden, on_device)
        if rows.drafts is None and not self._scores.are_wanted(rows) and self._sampling.are_untruncated(sampled_rows, positions):
            drawn = self._draw_on_device(rows, reached, hidden, failed, on_device)
            if self._draft is not None:
                self._late.expect(sampled_rows, positions, done=drawn.fence.done, read=lambda: _token_ids(drawn))
            return PendingStep(step.step, rows.rows, reached, self._sampling.choices(sampled_rows), drawn)
        return self._finish_here(step.step, rows, reached, hidden, failed)

    def warm_up(self) -> None:
        """As ``ModelRunner.warm_up``, then the graphs of decoding, over no block at all."""
        super().warm_up()
        self._triton.capture()

    def _scratch(self, pool: PoolRows) -> DeviceRunner:
        assert isinstance(pool, KvPool), "a scratch pool is of its pool's kind"
        model = self._triton.over(pool)
        return DeviceRunner(model, pool, self._vocab_size, max_rows=self._max_rows, max_model_len=self._max_model_len)

    def _upload(self, step: SchedulerOutput, rows: StepRows, reached: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        sampled_rows = rows.rows[reached]
        starts_here = np.isin(rows.rows, [started.row for started in step.started])
        arrays = {
            "rows": rows.rows,
            "token_rows": rows.attention.token_rows,
            "goes_on": (~starts_here).astype(np.int32),
            "reached": reached,
            "sampled_rows": sampled_rows,
            "tokens": rows.attention.starts[reached + 1] - 1,
        }
        if not self._sampling.are_plain(sampled_rows, positions):
            temperature, seeds, choices = self._sampling.randomness(sampled_rows)
            arrays["temperature"] = temperature
            arrays["keys"] = stream_keys(seeds, choices, positions).view(np.int64)
        return upload(arrays, self._pool.device)

    def _note_failures(self, hidden: TritonHidden, on_device: dict[str, Tensor]) -> Tensor:
        """Bool ``[R]``: rows that have failed since they started; a hidden state that is not finite is a failure."""
        is_bad = (~hidden.device_finite()).to(torch.int32)
        failed = torch.zeros(len(on_device["rows"]), dtype=torch.int32, device=is_bad.device).index_add_(0, on_device["token_rows"], is_bad)
        return (failed > 0) | (self._failed[on_device["rows"]] & (on_device["goes_on"] > 0))

    def _draw_on_device(
        self, rows: StepRows, reached: np.ndarray, hidden: TritonHidden, failed: Tensor, on_device: dict[str, Tensor]
    ) -> Download:
        sampled_rows = rows.rows[reached]
        token_ids = torch.zeros(0, dtype=torch.int64, device=failed.device)
        if len(reached):
            logits = hidden.device_logits(on_device["tokens"])
            failed[on_device["reached"]] |= ~torch.isfinite(logits.sum(dim=-1))
            if "keys" in on_device:
                temperature = on_device["temperature"][:, None]
                noisy = logits / temperature.clamp(min=1e-30) + gumbel(on_device["keys"], self._vocabulary)
                logits = torch.where(temperature > 0, noisy, logits)
            token_ids = torch.where(
                failed[on_device["reached"]], 0, logits.argmax(dim=-1)
            )  # 0 keeps a step that is already in flight in range
            self._triton.sampled[on_device["sampled_rows"]] = token_ids.to(torch.int32)
            self._batch.append(sampled_rows, np.full(len(sampled_rows), _ON_DEVICE))
        self._failed[on_device["rows"]] = failed
        return download(failed, token_ids)

    def _finish_here(self, step: int, rows: StepRows, reached: np.ndarray, hidden: TritonHidden, failed: Tensor) -> ExecutorOutput:
        batch = self._batch
        batch.failed[rows.rows] = failed.cpu().numpy()
        if rows.drafts is not None:
            batch.failed[rows.rows[rows.drafts.counts > 0]] = False  # what was drafted wrongly may be at fault: the logits decide
        output = self._sample(step, rows, hidden)
        sampled_rows = rows.rows[reached]
        on_device = upload(
            {
                "rows": rows.rows,
                "failed": batch.failed[rows.rows].astype(np.int32),
                "sampled_rows": sampled_rows,
                "token_ids": batch.token_ids[sampled_rows, batch.num_known[sampled_rows] - 1],
            },
            self._pool.device,
        )
        self._failed[on_device["rows"]] = on_device["failed"] > 0
        self._triton.sampled[on_device["sampled_rows"]] = on_device["token_ids"]
        return replace(output, failed_rows=tuple(rows.rows[batch.failed[rows.rows]].tolist()))
