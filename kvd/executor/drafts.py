"""What rows drafted in a step, and what of it they keep, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class Proposal(Protocol):
    """A draft model's answer for R rows: row i gets ``ids[offsets[i]:offsets[i + 1]]`` (int64), perhaps fewer than it asked for."""

    @property
    def ids(self) -> np.ndarray: ...

    @property
    def offsets(self) -> np.ndarray: ...

    @property
    def probs(self) -> Any:
        """Float32 tensor ``[len(ids), vocab]``: the distributions that the ids were drawn from; None where no row accepts by rejection."""


Propose = Callable[[np.ndarray, np.ndarray], Proposal]
"""From rows and the numbers of tokens that they ask for."""


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """What a step's rows drafted."""

    counts: np.ndarray
    """int64 ``[R]``, in the order of the step's rows: the last so many of a row's tokens are drafted."""
    probs: Mapping[int, Any] = field(default_factory=dict)
    """By row: float32 tensor ``[drafted, vocab]``, the distributions of which a draft model drew them, where the row accepts by rejection."""
    short: tuple[tuple[int, int], ...] = ()
    """(row, drafted) where the draft model proposed fewer than it was asked for."""


@dataclass(frozen=True, slots=True)
class Verified:
    """R rows' samples: entry j of row i is ``token_ids[starts[i] + j]``; the first ``num_kept[i]`` stay."""

    starts: np.ndarray
    """int64 ``[R + 1]``."""
    token_ids: np.ndarray
    """int64."""
    num_kept: np.ndarray
    """int64 ``[R]``; 0: already the first was not usable."""

    @property
    def kept(self) -> np.ndarray:
        """int64: the entries that stay, in order."""
        nth = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return np.flatnonzero(nth < np.repeat(self.num_kept, np.diff(self.starts)))


def keep_agreeing(starts: np.ndarray, token_ids: np.ndarray, drafted: np.ndarray, is_usable: np.ndarray) -> Verified:
    """Keep each row's samples up to the first that differs from the draft, that one included, or to the first that is not usable.

    ``token_ids``, ``drafted`` and bool ``is_usable`` have an entry for each sample; the drafted id of a row's last is -1.
    """
    size = np.diff(starts)
    nth = np.arange(starts[-1]) - np.repeat(starts[:-1], size)
    big = int(size.max(initial=0))

    def first(stops: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(np.where(stops, nth, big), starts[:-1])

    num_kept = np.minimum(first(token_ids != drafted) + 1, first(~is_usable))
    return Verified(starts, token_ids, num_kept)
