"""What the executor remembers of every row between steps, as columns, and a step's flat inputs made from them.

The scheduler sends deltas; this applies them and returns the step's rows in the order that attention wants: by number of tokens, then by
context. Work a step is a handful of array operations, whatever the number of rows, plus a few assignments for each row that starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvd.executor.attention.backend import AttentionRows
from kvd.executor.drafts import Propose, StepDrafts, Verified
from kvd.executor.row_adapters import StepAdapters
from kvd.executor.run_layout import RunArrays, RunLayout
from kvd.step import ContinuedRows, SchedulerOutput, SharedRuns, StartedRow


class BatchError(Exception):
    """A step contradicts what the executor knows: a row that was never started, a position without a token or a block."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """One step's inputs. Arrays of length R follow the order of ``attention``."""

    rows: np.ndarray
    """int64 ``[R]``: the scheduler's numbers."""
    attention: AttentionRows
    token_ids: np.ndarray
    """int64 ``[T]``."""
    samples: np.ndarray
    """bool ``[R]``: the step reaches the row's last known token, and what it drafted after it."""
    fresh_blocks: np.ndarray
    """int64: blocks that a row enters in this step and does not fill."""
    adapters: StepAdapters[Any] | None = None
    """The rows' LoRA adapters; None: no row has one."""
    drafts: StepDrafts | None = None
    """What the rows drafted; None: no row does."""


class InputBatch:
    """Row state for up to ``max_rows`` rows of up to ``max_model_len`` positions."""

    def __init__(self, max_rows: int, max_model_len: int, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self.token_ids = np.zeros((max_rows, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((max_rows, -(-max_model_len // block_size_tokens) + 1), dtype=np.int32)
        self.num_blocks = np.zeros(max_rows, dtype=np.int64)
        self.num_known = np.zeros(max_rows, dtype=np.int64)
        """Tokens known: prompt and sampled ones. 0 for a row that is not live."""
        self.num_computed = np.zeros(max_rows, dtype=np.int64)
        self.failed = np.zeros(max_rows, dtype=bool)
        self._runs = RunLayout(max_rows, block_size_tokens)

    def apply(self, step: SchedulerOutput, propose: Propose | None = None) -> StepRows:
        """Apply a step's deltas and lay out its inputs; the positions count as computed from here on. ``propose`` drafts for the rows that are not given their drafts.

        Raises:
            BatchError: the step does not fit the rows' state.
        """
        if step.released:
            self.num_known[list(step.released)] = 0
        for copy in step.copies:
            # a row that starts in this step brings a table that holds the target already
            if self.num_known[copy.row] and copy.index < self.num_blocks[copy.row]:
                self.block_tables[copy.row, copy.index] = copy.target
        for started in step.started:
            self._start(started)
        continued = step.continued
        if continued.block_ids:
            self._append_blocks(continued)
        if continued.given_ids:
            self._put_given(continued)
        rows = np.array([started.row for started in step.started] + continued.rows, dtype=np.int64)
        num_tokens = np.array([started.num_tokens for started in step.started] + continued.num_tokens, dtype=np.int64)
        if not continued.num_draft:
            return self._lay_out(rows, num_tokens, step.shared_runs)
        num_draft = np.array([0] * len(step.started) + continued.num_draft, dtype=np.int64)
        num_given = (
            np.diff(np.array(continued.given_offsets, dtype=np.int64))
            if continued.given_offsets
            else np.zeros(len(continued.rows), dtype=np.int64)
        )
        asks = (num_draft > 0) & np.concatenate([np.ones(len(step.started), dtype=bool), num_given == 0])
        drafts = self._propose(rows, num_tokens, num_draft, np.flatnonzero(asks), propose)
        return self._lay_out(rows, num_tokens, step.shared_runs, drafts)

    def accept(self, rows: np.ndarray, verified: Verified) -> None:
        """Note what each of ``rows`` keeps of its samples: the last is its next input, those before it are computed."""
        kept = verified.kept
        nth = np.arange(verified.starts[-1]) - np.repeat(verified.starts[:-1], np.diff(verified.starts))
        of_row = np.repeat(rows, np.diff(verified.starts))[kept]
        self.token_ids[of_row, self.num_known[of_row] + nth[kept]] = verified.token_ids[kept]
        self.num_known[rows] += verified.num_kept
        self.num_computed[rows] = self.num_known[rows] - 1

    def append(self, rows: np.ndarray, token_ids: Sequence[int] | np.ndarray) -> None:
        """Note the token that each of ``rows`` sampled: it is the row's next input."""
        self.token_ids[rows, self.num_known[rows]] = token_ids
        self.num_known[rows] += 1

    def _start(self, started: StartedRow) -> None:
        row = started.row
        known = np.frombuffer(started.token_ids, dtype="<u4")
        if not len(known) or len(known) > self.token_ids.shape[1] or len(started.block_ids) > self.block_tables.shape[1]:
            raise BatchError(
                f"row {row} starts with {len(known)} tokens and {len(started.block_ids)} blocks; "
                f"there is room for {self.token_ids.shape[1]} and {self.block_tables.shape[1]}"
            )
        self.token_ids[row, : len(known)] = known
        self.block_tables[row, : len(started.block_ids)] = started.block_ids
        self.num_blocks[row] = len(started.block_ids)
        self.num_known[row] = len(known)
        self.num_computed[row] = started.num_computed
        self.failed[row] = False

    def _append_blocks(self, continued: ContinuedRows) -> None:
        offsets = np.array(continued.block_offsets, dtype=np.int64)
        counts = np.diff(offsets)
        rows = np.array(continued.rows, dtype=np.int64)
        if (self.num_blocks[rows] + counts).max() > self.block_tables.shape[1]:
            raise BatchError(f"a row's table outgrows {self.block_tables.shape[1]} blocks")
        columns = np.arange(offsets[-1]) + np.repeat(self.num_blocks[rows] - offsets[:-1], counts)
        self.block_tables[np.repeat(rows, counts), columns] = continued.block_ids
        self.num_blocks[rows] += counts

    def _put_given(self, continued: ContinuedRows) -> None:
        """Tokens that take the places from a row's first uncomputed position on, whatever it sampled."""
        offsets = np.array(continued.given_offsets, dtype=np.int64)
        counts = np.diff(offsets)
        rows = np.array(continued.rows, dtype=np.int64)
        columns = np.arange(offsets[-1]) + np.repeat(self.num_computed[rows] - offsets[:-1], counts)
        self.token_ids[np.repeat(rows, counts), columns] = continued.given_ids

    def _propose(
        self, rows: np.ndarray, num_tokens: np.ndarray, num_draft: np.ndarray, asking: np.ndarray, propose: Propose | None
    ) -> StepDrafts:
        """What rows ``rows[asking]`` get drafted; they compute fewer tokens where that is less than they asked for. ``num_tokens`` and ``num_draft`` are changed."""
        if not len(asking):
            return StepDrafts(num_draft)
        if propose is None:
            raise BatchError(
                f"row {int(rows[asking[0]])} drafts {int(num_draft[asking[0]])} tokens, is given none, and there is no draft model"
            )
        proposed = propose(rows[asking], num_draft[asking])
        counts = np.diff(proposed.offsets)
        is_short = counts < num_draft[asking]
        short = tuple(zip(rows[asking[is_short]].tolist(), counts[is_short].tolist(), strict=True))
        of_row = np.repeat(rows[asking], counts)
        nth = np.arange(len(proposed.ids)) - np.repeat(proposed.offsets[:-1], counts)
        self.token_ids[of_row, self.num_known[of_row] + nth] = proposed.ids
        num_tokens[asking] -= num_draft[asking] - counts
        num_draft[asking] = counts
        probs: dict[int, Any] = {}
        if proposed.probs is not None:
            ends = proposed.offsets.tolist()
            probs = {row: proposed.probs[ends[at] : ends[at + 1]] for at, row in enumerate(rows[asking].tolist())}
        return StepDrafts(num_draft, probs, short)

    def _lay_out(self, rows: np.ndarray, num_tokens: np.ndarray, shared_runs: SharedRuns, drafts: StepDrafts | None = None) -> StepRows:
        order = np.lexsort((self.num_computed[rows], num_tokens))
        rows, num_tokens = rows[order], num_tokens[order]
        end = self.num_known[rows]
        if drafts is not None:
            drafts = replace(drafts, counts=drafts.counts[order])
            end += drafts.counts
        num_computed = self.num_computed[rows]  # a copy: taken before the step's positions are counted
        reached = num_computed + num_tokens
        self._check(rows, num_tokens, reached, end)
        runs = self._runs.lay_out(shared_runs, rows)
        self._check_runs(rows, num_computed, runs)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_tokens)])
        token_rows = np.repeat(np.arange(len(rows)), num_tokens)
        positions = np.arange(starts[-1]) + (num_computed - starts[:-1])[token_rows]
        self.num_computed[rows] = reached
        size = self._block_size
        last_block = (reached - 1) // size
        enters = (num_computed <= last_block * size) & (reached % size != 0)
        most_blocks = int(last_block.max(initial=0)) + 1
        return StepRows(
            rows=rows,
            attention=AttentionRows(num_tokens, num_computed, starts, positions, token_rows, self.block_tables[rows, :most_blocks], *runs),
            token_ids=self.token_ids[rows[token_rows], positions].astype(np.int64),
            samples=reached == end,
            fresh_blocks=self.block_tables[rows[enters], last_block[enters]].astype(np.int64),
            drafts=drafts,
        )

    def _check(self, rows: np.ndarray, num_tokens: np.ndarray, reached: np.ndarray, end: np.ndarray) -> None:
        wrong = (num_tokens < 1) | (reached > end) | (reached > self.num_blocks[rows] * self._block_size)
        if wrong.any():
            row = int(rows[wrong.argmax()])
            raise BatchError(
                f"row {row}: {int(num_tokens[wrong.argmax()])} tokens after {int(self.num_computed[row])} computed, "
                f"with {int(self.num_known[row])} known and {int(self.num_blocks[row])} blocks"
            )

    @staticmethod
    def _check_runs(rows: np.ndarray, num_computed: np.ndarray, runs: RunArrays) -> None:
        _, run_end, run_offsets, run_rows = runs
        if not len(run_rows):
            return
        early = np.repeat(run_end, np.diff(run_offsets)) > num_computed[run_rows]
        if early.any():
            place = run_rows[early.argmax()]
            raise BatchError(f"row {int(rows[place])}: {int(num_computed[place])} positions are computed, a shared run claims more")
