"""The protocol of attention backends: a step's rows in, a function that the decoder calls once a layer out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The step's R rows, ordered by ``num_tokens``, then ``num_computed``; row i owns the flat tokens ``starts[i]:starts[i + 1]``.

    ``block_tables [R, >= blocks]`` holds block ids; of row i the first ``ceil((num_computed[i] + num_tokens[i]) / block_size_tokens)`` count.
    """

    num_tokens: np.ndarray
    """int64 ``[R]``: positions computed in this step, at least 1."""
    num_computed: np.ndarray
    """int64 ``[R]``: positions that have their KV; the first query's own position."""
    starts: np.ndarray
    """int64 ``[R + 1]``."""
    positions: np.ndarray
    """int64 ``[T]``: absolute position of each flat token."""
    token_rows: np.ndarray
    """int64 ``[T]``: which of the R rows a flat token belongs to."""
    block_tables: np.ndarray
    run_start: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """int64 ``[N]``: first position of each shared run; see ``kvd.step.SharedRuns``."""
    run_end: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """int64 ``[N]``: the position after each run's last."""
    run_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """int64 ``[N + 1]`` into ``run_rows``; a run has at least two rows."""
    run_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """int64: indices of the R rows, ascending within a run."""


class StepAttention(Protocol):
    """The decoder's ``Attend`` for one step: keeps K and V of all rows in the pool, then attends."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        """``q [T, num_heads, head_dim]``, ``k, v [T, num_kv_heads, head_dim]`` -> ``[T, num_heads, head_dim]``."""


class AttentionBackend(Protocol):
    """One way to compute attention over a ``KvPool``."""

    def plan(self, rows: AttentionRows) -> StepAttention:
        """Everything that is the same for all layers, computed once a step."""
