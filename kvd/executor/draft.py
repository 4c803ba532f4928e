"""The draft model: a smaller one over its own pool, whose rows bear the numbers of the target's blocks, that proposes tokens for the target to verify.

Speculative decoding (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; Chen et al., "Accelerating large language model decoding
with speculative sampling", 2023). A draft draws with the noise that the target will draw with, the function of (seed, choice, absolute position) of
``sampling.noise``, so that both take the same token wherever their distributions are near (Daliri et al., "Coupling without communication and
drafter-invariant speculative decoding", 2024).

The pool needs nobody else's bookkeeping: of each block is known how many of its first positions hold the draft model's K and V of the block's present
tokens. That is none where a row is given the block fresh or it comes from disk; it is copied with the block, and outlives rows as the block does. What
is missing is computed when a row is asked to draft, so that rows which don't draft cost the draft model nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvd.executor.attention.backend import AttentionRows
from kvd.executor.input_batch import InputBatch, StepRows
from kvd.executor.kv_pool import PoolRows
from kvd.executor.sampling.columns import SamplingColumns
from kvd.executor.sampling.penalties import TokenCounts
from kvd.executor.sampling.sampler import probabilities, sample
from kvd.executor.step_model import StepHidden, StepModel, finite_rows
from kvd.step import SchedulerOutput
from kvd.types import BlockId


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """What is proposed for R rows: row i gets ``ids[offsets[i]:offsets[i + 1]]``, at most as many as it asked for."""

    ids: np.ndarray
    """int64."""
    offsets: np.ndarray
    """int64 ``[R + 1]``."""
    probs: Tensor | None
    """Float32 ``[len(ids), vocab]``: the distributions that the ids of rows which accept by rejection were drawn from; None if there is no such row."""


class DraftModel:
    """``model`` over ``pool``, for the rows of ``batch``, ``sampling`` and ``counts``, which are the target's; called from the executor's thread.

    A forward pass takes at most ``max_tokens`` tokens. Positions from ``max_positions`` on are not drafted.
    """

    def __init__(
        self,
        model: StepModel,
        pool: PoolRows,
        batch: InputBatch,
        sampling: SamplingColumns,
        counts: TokenCounts,
        *,
        max_tokens: int,
        max_positions: int,
    ) -> None:
        self._model = model
        self._pool = pool
        self._batch = batch
        self._sampling = sampling
        self._counts = counts
        self._max_tokens = max_tokens
        self._max_positions = max_positions
        self._block_size = pool.block_size_tokens
        self._num_valid = np.zeros(pool.num_blocks, dtype=np.int64)
        """Of each block, the first positions that hold K and V of its tokens."""
        max_rows = len(batch.num_known)
        self._follows = np.zeros(max_rows, dtype=bool)
        self._is_broken = np.zeros(max_rows, dtype=bool)
        """The draft model's numbers were not finite."""
        self._end = np.zeros(max_rows, dtype=np.int64)
        """The position after the last that was computed of a draft which is not verified yet; else 0."""

    # ------------------------------------------------------------------------------------------ blocks

    def apply(self, step: SchedulerOutput) -> None:
        """Note what becomes of blocks in a step. Every step comes by here, in order, before it is computed."""
        copied = self._num_valid[[copy.source for copy in step.copies]] if step.copies else None
        if step.continued.block_ids:
            self._num_valid[step.continued.block_ids] = 0
        for started in step.started:
            self._num_valid[list(started.block_ids[-(-started.num_computed // self._block_size) :])] = 0
            self._follows[started.row] = started.drafts
            self._is_broken[started.row] = False
            self._end[started.row] = 0
        if copied is not None:
            targets = [copy.target for copy in step.copies]
            self._pool.copy_blocks([copy.source for copy in step.copies], targets)
            self._num_valid[targets] = copied
        for started in step.started:
            if rest := started.num_computed % self._block_size:  # a copied block may have held other tokens behind these
                block_id = started.block_ids[started.num_computed // self._block_size]
                self._num_valid[block_id] = min(self._num_valid[block_id], rest)

    def forget(self, block_ids: Sequence[BlockId]) -> None:
        """The target's rows of these blocks were written from elsewhere: nothing here belongs to them."""
        self._num_valid[list(block_ids)] = 0

    def num_valid(self, row: int, num_tokens: int) -> int:
        """How many of the row's first ``num_tokens`` positions the draft model has computed."""
        size = self._block_size
        valid = self._num_valid[self._batch.block_tables[row, : -(-num_tokens // size)]]
        short = np.flatnonzero(valid < size)
        return num_tokens if not len(short) else min(num_tokens, int(short[0]) * size + int(valid[short[0]]))

    # ------------------------------------------------------------------------------------------ drafting

    def is_asked(self, step: SchedulerOutput) -> bool:
        """Whether the step makes the model compute: tokens are to be proposed, or a prompt of a row that will draft is computed."""
        return any(step.continued.num_draft) or any(started.drafts for started in step.started) or len(self._chunks(step)) > 0

    @torch.inference_mode()
    def follow(self, step: SchedulerOutput) -> None:
        """For rows that will draft, compute what the step's chunks of prompts compute, and what is missing before: as much as one pass takes.

        To be called when ``InputBatch`` has applied the step.
        """
        rows = self._chunks(step)
        if not len(rows):
            return
        begins, takes = self._plan(rows, np.minimum(self._batch.num_computed[rows], self._max_positions), at_least=0)
        active = np.flatnonzero(takes)
        if len(active):
            rows, begins, takes = rows[active], begins[active], takes[active]
            _, _, finite = self._forward(rows, begins, takes, self._known(rows, begins, takes))
            self._is_broken[rows[~finite]] = True

    def _chunks(self, step: SchedulerOutput) -> np.ndarray:
        """Rows that will draft and compute a part of their prompt in this step."""
        continued = step.continued
        if step.started or sum(continued.num_tokens) > len(continued.rows):
            num_draft = continued.num_draft or [0] * len(continued.rows)
            going_on = zip(continued.rows, continued.num_tokens, num_draft, strict=True)
            chunks = [started.row for started in step.started] + [row for row, count, drafted in going_on if count > 1 and not drafted]
            return np.array([row for row in chunks if self._follows[row] and not self._is_broken[row]], dtype=np.int64)
        return np.zeros(0, dtype=np.int64)

    @torch.inference_mode()
    def propose(self, rows: np.ndarray, num_draft: np.ndarray) -> DraftTokens:
        """Up to ``num_draft`` tokens for each of ``rows`` (int64, distinct), after its last known token; they are put into ``InputBatch.token_ids`` too.

        A row whose missing positions are more than one pass takes gets none, and is nearer to it at the next call. ``rewind`` must follow.
        """
        known = self._batch.num_known[rows]
        wanted = np.clip(num_draft, 0, np.maximum(self._max_positions + 1 - known, 0))
        wanted[self._is_broken[rows]] = 0
        drafted = _Drafted(len(rows), int(wanted.max(initial=0)))
        begins, takes = self._plan(rows, np.where(wanted > 0, known, 0), at_least=1)
        wanted[begins + takes < known] = 0  # still catching up
        active = np.flatnonzero(takes)
        tokens = self._known(rows[active], begins[active], takes[active])
        self._end[rows] = 0
        for nth in range(drafted.most):
            if not len(active):
                break
            self._end[rows[active]] = (begins + takes)[active]
            hidden, last, finite = self._forward(rows[active], begins[active], takes[active], tokens)
            self._give_up(rows, wanted, active[~finite], nth)
            drawing = np.flatnonzero(wanted[active] > nth)
            if len(drawing):
                which = active[drawing]
                drafted.ids[which, nth], finite = self._draw(hidden, last[drawing], rows[which], known[which] + nth, drafted)
                drafted.places.extend((which, nth) for _ in range(len(drafted.probs) - len(drafted.places)))
                self._batch.token_ids[rows[which], known[which] + nth] = drafted.ids[which, nth]
                self._give_up(rows, wanted, which[~finite], nth)
            active = np.flatnonzero(wanted > nth + 1)
            begins, takes, tokens = known + nth, np.ones_like(known), drafted.ids[active, nth]
            for index in active.tolist():
                self._claim(int(rows[index]), int(begins[index]), int(begins[index]) + 1)
        for counted_rows, counted_ids in drafted.counted:
            self._counts.take_back(counted_rows, counted_ids)
        return drafted.tokens(wanted)

    def rewind(self, rows: np.ndarray, num_computed: np.ndarray) -> None:
        """The target has verified: of each of ``rows`` the first ``num_computed`` positions hold tokens that stay, whatever was drafted beyond."""
        size = self._block_size
        for row, kept, end in zip(rows.tolist(), num_computed.tolist(), self._end[rows].tolist(), strict=True):
            for index in range(kept // size, -(-end // size)):
                block_id = self._batch.block_tables[row, index]
                self._num_valid[block_id] = min(self._num_valid[block_id], max(0, kept - index * size))
        self._end[rows] = 0

    def _plan(self, rows: np.ndarray, reached: np.ndarray, *, at_least: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each row begins, and how many positions up to ``reached`` (0: none) it takes in one pass, ``at_least`` those.

        Those that lack least come first; what a row computes of shared blocks counts as valid for those after it, in the same pass.
        """
        begins, takes = np.zeros_like(reached), np.zeros_like(reached)
        ends = reached.tolist()
        lacking = [end - self.num_valid(row, end) for row, end in zip(rows.tolist(), ends, strict=True)]
        left = self._max_tokens
        for index in np.argsort(lacking, kind="stable").tolist():
            row, end = int(rows[index]), ends[index]
            begin = max(0, min(self.num_valid(row, end), end - at_least))
            begins[index], takes[index] = begin, min(left, end - begin)
            left -= int(takes[index])
            self._claim(row, begin, begin + int(takes[index]))
        return begins, takes

    def _claim(self, row: int, begin: int, end: int) -> None:
        """These positions are computed, or will be by the next pass."""
        size = self._block_size
        for index in range(begin // size, -(-end // size)):
            block_id = self._batch.block_tables[row, index]
            self._num_valid[block_id] = max(self._num_valid[block_id], min(size, end - index * size))

    def _known(self, rows: np.ndarray, begins: np.ndarray, takes: np.ndarray) -> np.ndarray:
        """The tokens at these positions, row after row."""
        positions = np.arange(takes.sum()) + np.repeat(begins - (np.cumsum(takes) - takes), takes)
        tokens: np.ndarray = self._batch.token_ids[np.repeat(rows, takes), positions]
        return tokens

    def _forward(
        self, rows: np.ndarray, begins: np.ndarray, takes: np.ndarray, token_ids: np.ndarray
    ) -> tuple[StepHidden, np.ndarray, np.ndarray]:
        """Compute ``takes`` positions of each row from ``begins`` on. Returns with the hidden states the flat index of each row's last one, and which rows' are finite."""
        size = self._block_size
        order = np.lexsort((begins, takes))
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(takes[order])])
        token_rows = np.repeat(np.arange(len(rows)), takes[order])
        within = np.arange(starts[-1]) - starts[:-1][token_rows]
        positions = within + begins[order][token_rows]
        given = (np.cumsum(takes) - takes)[order][token_rows] + within
        reached = begins + takes
        last_block = (reached - 1) // size
        tables = self._batch.block_tables[rows[order], : int(last_block.max()) + 1]
        enters = (begins <= last_block * size) & (reached % size != 0)
        fresh = self._batch.block_tables[rows[enters], last_block[enters]].astype(np.int64)
        self._pool.clear_blocks(fresh)
        step = StepRows(
            rows=rows[order],
            attention=AttentionRows(takes[order], begins[order], starts, positions, token_rows, tables),
            token_ids=token_ids[given].astype(np.int64),
            samples=np.ones(len(rows), dtype=bool),
            fresh_blocks=fresh,
        )
        hidden = self._model.forward(step)
        last = np.empty(len(rows), dtype=np.int64)
        last[order] = starts[1:] - 1
        is_finite = np.empty(len(rows), dtype=bool)
        is_finite[order] = np.logical_and.reduceat(hidden.finite(), starts[:-1])
        if not is_finite.all():
            blocks = tables[token_rows, positions // size]
            spoilt = np.unique(blocks[~is_finite[order][token_rows]]).astype(np.int64)
            self._num_valid[spoilt] = 0
            self._pool.clear_blocks(spoilt)  # not even behind a mask may there be a NaN
        return hidden, last, is_finite

    def _draw(
        self, hidden: StepHidden, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray, drafted: _Drafted
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a token at each absolute position from the flat ``tokens`` of a pass; second, whose logits were finite."""
        if self._sampling.are_plain(rows, positions):
            return hidden.greedy(tokens)
        logits = hidden.logits(tokens)
        finite = finite_rows(logits)
        if not finite.all():
            logits[torch.from_numpy(~finite).to(logits.device)] = 0.0
        draws, _ = self._sampling.draws(rows, positions, self._batch.token_ids)

        def note(shaped: Tensor, chosen: np.ndarray) -> np.ndarray:
            drafted.probs.append(probabilities(shaped, draws))
            return chosen

        rejects = self._sampling.reject(rows).any()
        draws = replace(draws, num_logprobs=np.full(len(rows), -1))
        token_ids = sample(logits, draws, self._counts, note if rejects else None).token_ids
        counted = finite & draws.penalised
        if counted.any():
            self._counts.add(rows[counted], token_ids[counted])
            drafted.counted.append((rows[counted], token_ids[counted]))
        return token_ids, finite

    def _give_up(self, rows: np.ndarray, wanted: np.ndarray, which: np.ndarray, nth: int) -> None:
        wanted[which] = np.minimum(wanted[which], nth)
        self._is_broken[rows[which]] = True


class _Drafted:
    """What a call has drawn so far."""

    def __init__(self, num_rows: int, most: int) -> None:
        self.most = most
        self.ids = np.zeros((num_rows, most), dtype=np.int64)
        self.counted: list[tuple[np.ndarray, np.ndarray]] = []
        """Rows and ids that stand in the penalties' counts until all is drawn."""
        self.probs: list[Tensor] = []
        """Float32 ``[rows, vocab]``: the distributions of draws of which one may be rejected."""
        self.places: list[tuple[np.ndarray, int]] = []
        """Which rows, and which of their tokens, each of ``probs`` is of."""

    def tokens(self, counts: np.ndarray) -> DraftTokens:
        """The first ``counts`` of each row."""
        kept = np.arange(self.most)[None, :] < counts[:, None]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        probs = None
        if self.probs:
            probs = self.probs[0].new_zeros((int(offsets[-1]), self.probs[0].shape[1]))
            for (which, nth), of_draws in zip(self.places, self.probs, strict=True):
                is_kept = counts[which] > nth
                probs[torch.from_numpy(offsets[which[is_kept]] + nth).to(probs.device)] = of_draws[
                    torch.from_numpy(is_kept).to(probs.device)
                ]
        return DraftTokens(self.ids[kept], offsets, probs)
