"""Drafted tokens verified: all of a row's are computed in the step's one forward pass, and the target says of each whether it stays.

By *coupling*, a drafted token stays while it is what the target samples in its place, with the noise that it always samples this position with: so the output is the one
without drafts, token for token. By *rejection* (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Chen et al., "Accelerating large language
model decoding with speculative sampling", 2023), a token x that was drafted with probability q(x) stays with probability min(1, p(x) / q(x)), and where it doesn't, one is drawn from what
p exceeds q by: so the output has the target's distribution. Prompt lookup draws nothing, its q(x) is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvd.executor.drafts import StepDrafts, Verified, keep_agreeing
from kvd.executor.input_batch import InputBatch, StepRows
from kvd.executor.kv_pool import PoolRows
from kvd.executor.sampling.columns import Draws, SamplingColumns
from kvd.executor.sampling.noise import gumbel, stream_keys
from kvd.executor.sampling.penalties import TokenCounts
from kvd.executor.sampling.sampler import probabilities, sample
from kvd.executor.step_model import StepHidden, finite_rows
from kvd.step import ExecutorOutput
from kvd.types import TokenLogprobs

_SLICE_VALUES = 1 << 23
"""Logits that are in memory at once, some copies aside: drafts would multiply those of a step."""
_ACCEPTS = 1 << 32
_REDRAWS = 1 << 33
"""Added to the choice, these name streams of noise of their own: the choice's own stream has drawn the draft."""


def reject(logits: Tensor, draws: Draws, chosen: np.ndarray, drafted: np.ndarray, probs: Tensor | None) -> np.ndarray:
    """By rejection, what the draws' positions get: the drafted token where it is accepted, else another one.

    Shaped ``logits [N, V]`` of the draws (``sampler.shape``), the target's own samples ``chosen [N]``, which stay where nothing was drafted (``drafted [N]`` is -1), and
    the distributions ``probs [N, V]`` that the drafted ids were drawn from; None: they were not drawn.
    """
    which = np.flatnonzero(drafted >= 0)
    if not len(which):
        return chosen
    device = logits.device

    def to(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    target = probabilities(logits, draws)[to(which)]
    ids = to(drafted[which])[:, None]
    proposed = torch.zeros_like(target).scatter_(1, ids, 1.0) if probs is None else probs[to(which)]
    accepts = stream_keys(draws.seed[which], draws.choice[which] + _ACCEPTS, draws.position[which])
    uniform = torch.exp(-torch.exp(-gumbel(accepts, torch.zeros(1, dtype=torch.int64, device=device))))
    # equal probabilities accept, also where the noise's uniform has been rounded to 1: nothing is left there to be drawn instead
    accepted = (uniform * proposed.gather(1, ids) <= target.gather(1, ids)).squeeze(1)
    redraws = stream_keys(draws.seed[which], draws.choice[which] + _REDRAWS, draws.position[which])
    rest = (target - proposed).clamp_(min=0.0).log_()
    others = (rest + gumbel(redraws, torch.arange(target.shape[1], device=device))).argmax(dim=-1)
    token_ids = chosen.copy()
    token_ids[which] = torch.where(accepted, ids.squeeze(1), others).cpu().numpy()
    return token_ids


class Verifier:
    """Says what rows keep, on the state of a runner: ``batch``, ``sampling`` and ``counts`` are the rows', ``pool`` holds their blocks."""

    def __init__(self, batch: InputBatch, sampling: SamplingColumns, counts: TokenCounts, pool: PoolRows, vocab_size: int) -> None:
        self._batch = batch
        self._sampling = sampling
        self._counts = counts
        self._pool = pool
        self._vocab_size = vocab_size

    def verify(self, step: int, rows: StepRows, wanted: np.ndarray, hidden: StepHidden) -> ExecutorOutput:
        """Sample, for the step's rows ``wanted`` (indices, int64), after the last known token and after each drafted one, and note what stays.

        A row that drafts does not fail where its numbers are not finite: it keeps what comes before, perhaps nothing. One that doesn't is marked as failed. So many rows
        are sampled at once as ``_SLICE_VALUES`` logits are enough for, one at least.
        """
        assert rows.drafts is not None, "somebody drafts"
        ends = np.cumsum(rows.drafts.counts[wanted] + 1)
        most = max(1, _SLICE_VALUES // self._vocab_size)
        output: ExecutorOutput | None = None
        first = 0
        while first < len(wanted):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
            part = self._verify_part(step, rows, wanted[first:last], hidden)
            output = part if output is None else joined(output, part)
            first = last
        return ExecutorOutput(step, [], [], []) if output is None else output

    def _verify_part(self, step: int, rows: StepRows, wanted: np.ndarray, hidden: StepHidden) -> ExecutorOutput:
        assert rows.drafts is not None, "somebody drafts"
        counts = rows.drafts.counts[wanted]
        own_rows = rows.rows[wanted]
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts + 1)])
        of_row = np.repeat(np.arange(len(wanted)), counts + 1)
        nth = np.arange(starts[-1]) - starts[of_row]
        positions = self._batch.num_known[own_rows][of_row] + nth
        tokens = (rows.attention.starts[wanted + 1] - 1 - counts)[of_row] + nth
        drafted = np.where(nth < counts[of_row], self._batch.token_ids[own_rows[of_row], positions], -1)
        logprobs: list[TokenLogprobs | None] | None = None
        stuck: np.ndarray | None = None
        if self._sampling.are_plain(own_rows, positions[starts[:-1]]):
            token_ids, usable = hidden.greedy(tokens)
        else:
            logits = hidden.logits(tokens)
            usable = finite_rows(logits)
            if not usable.all():
                logits[torch.from_numpy(~usable).to(logits.device)] = 0.0
            draws, _ = self._sampling.draws(own_rows[of_row], positions, self._batch.token_ids)
            draws = self._with_drafted(draws, nth, starts, of_row, drafted)
            sampled = sample(logits, draws, self._counts, self._amendment(rows.drafts, draws, drafted, nth))
            token_ids, logprobs, stuck = sampled.token_ids, sampled.logprobs, sampled.stuck
            if stuck is not None:
                usable = usable & ~stuck
        verified = keep_agreeing(starts, token_ids, drafted, usable)
        fails = (verified.num_kept == 0) & (counts == 0)
        if stuck is not None:
            is_stuck = (verified.num_kept == 0) & stuck[starts[:-1]]
            fails |= is_stuck
        self._note(own_rows, verified, fails, ~usable)
        kept = verified.kept
        choices = np.array(self._sampling.choices(own_rows), dtype=np.int64)
        return ExecutorOutput(
            step,
            own_rows[of_row[kept]].tolist(),
            choices[of_row[kept]].tolist(),
            token_ids[kept].tolist(),
            None if logprobs is None else [logprobs[at] for at in kept.tolist()],
            stuck_rows=() if stuck is None else tuple(own_rows[is_stuck].tolist()),
        )

    def _note(self, rows: np.ndarray, verified: Verified, fails: np.ndarray, unusable: np.ndarray) -> None:
        batch = self._batch
        reached = batch.num_computed[rows]
        batch.failed[rows[fails]] = True
        goes_on = np.flatnonzero(~fails)
        size = np.diff(verified.starts)
        kept = verified.kept
        of_row = np.repeat(np.arange(len(rows)), size)[kept]
        nth = kept - verified.starts[of_row]
        batch.accept(rows, verified)
        batch.num_computed[rows[fails]] = reached[fails]
        for place in range(int(verified.num_kept.max(initial=0))):
            said = kept[nth == place]
            said_rows = rows[of_row[nth == place]]
            counted = np.array([self._sampling.penalised(row) for row in said_rows.tolist()], dtype=bool)
            if counted.any():
                self._counts.add(said_rows[counted], verified.token_ids[said[counted]])
        if unusable.any():
            for at in goes_on.tolist():
                if unusable[verified.starts[at] : verified.starts[at + 1]].any():
                    self._clear(int(rows[at]), int(reached[at]))

    def _clear(self, row: int, end: int) -> None:
        """What was computed of the row's drafts is not finite: nothing of it may stay behind the positions that attention reads."""
        size = self._pool.block_size_tokens
        positions = np.arange(self._batch.num_computed[row], end)
        self._pool.clear_positions(self._batch.block_tables[row, positions // size].astype(np.int64), positions % size)

    @staticmethod
    def _with_drafted(draws: Draws, nth: np.ndarray, starts: np.ndarray, of_row: np.ndarray, drafted: np.ndarray) -> Draws:
        """The draws of penalised rows with the tokens drafted before them."""
        later = np.flatnonzero(draws.penalised & (nth > 0))
        if not len(later):
            return draws
        draw = np.repeat(later, nth[later])
        before = np.arange(len(draw)) - np.repeat(np.cumsum(nth[later]) - nth[later], nth[later])
        return replace(draws, drafted=(draw, drafted[starts[of_row[draw]] + before]))

    def _amendment(
        self, drafts: StepDrafts, draws: Draws, drafted: np.ndarray, nth: np.ndarray
    ) -> Callable[[Tensor, np.ndarray], np.ndarray] | None:
        rejects = self._sampling.reject(draws.row) & (drafted >= 0)
        if not rejects.any():
            return None
        asked = np.where(rejects, drafted, -1)

        def amend(logits: Tensor, chosen: np.ndarray) -> np.ndarray:
            probs = None
            if drafts.probs:
                probs = torch.zeros_like(logits)
                for draw in np.flatnonzero(rejects).tolist():
                    of_row = drafts.probs.get(int(draws.row[draw]))
                    if of_row is None or not len(of_row):
                        probs[draw, asked[draw]] = 1.0
                    else:
                        probs[draw] = of_row[nth[draw]]
            return reject(logits, draws, chosen, asked, probs)

        return amend


def joined(first: ExecutorOutput, second: ExecutorOutput) -> ExecutorOutput:
    """Of two parts of a step, the samples and what is told of rows that are stuck."""
    logprobs: list[TokenLogprobs | None] | None = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or [None] * len(first.rows)), *(second.logprobs or [None] * len(second.rows))]
    return ExecutorOutput(
        first.step,
        first.rows + second.rows,
        first.choices + second.choices,
        first.token_ids + second.token_ids,
        logprobs,
        stuck_rows=first.stuck_rows + second.stuck_rows,
    )
