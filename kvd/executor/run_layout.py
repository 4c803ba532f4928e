"""A step's shared runs as arrays over the step's own rows; made anew only when the runs or the rows' order are others than in the step before."""

from __future__ import annotations

import numpy as np

from kvd.step import NO_SHARED_RUNS, SharedRuns

RunArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""``run_start``, ``run_end``, ``run_offsets``, ``run_rows`` of ``AttentionRows``."""


class RunLayout:
    """Remembers the last layout."""

    def __init__(self, max_rows: int, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self._place = np.full(max_rows, -1, dtype=np.int64)
        nothing = np.zeros(0, dtype=np.int64)
        self._none: RunArrays = (nothing, nothing, np.zeros(1, dtype=np.int64), nothing)
        self._runs = NO_SHARED_RUNS
        self._rows = nothing
        self._arrays = self._none

    def lay_out(self, runs: SharedRuns, rows: np.ndarray) -> RunArrays:
        """The arrays for a step of ``rows`` (the scheduler's numbers, in the step's order): runs with at least two of these. Not to be written to."""
        if not runs.rows:
            return self._none
        if runs is not self._runs or not np.array_equal(rows, self._rows):
            self._runs, self._rows, self._arrays = runs, rows, self._map(runs, rows)
        return self._arrays

    def _map(self, runs: SharedRuns, rows: np.ndarray) -> RunArrays:
        self._place.fill(-1)
        self._place[rows] = np.arange(len(rows))
        places = self._place[runs.rows]
        run_of = np.repeat(np.arange(len(runs.first_block)), np.diff(runs.row_offsets))
        counts = np.bincount(run_of[places >= 0], minlength=len(runs.first_block))
        kept = np.flatnonzero(counts >= 2)
        wanted = (places >= 0) & (counts >= 2)[run_of]
        order = np.lexsort((places[wanted], run_of[wanted]))
        return (
            np.array(runs.first_block, dtype=np.int64)[kept] * self._block_size,
            np.array(runs.end_block, dtype=np.int64)[kept] * self._block_size,
            np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts[kept])]),
            places[wanted][order],
        )
