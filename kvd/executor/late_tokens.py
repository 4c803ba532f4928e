"""Tokens that a queue or a device has sampled and the host does not know yet, put into the rows' state when a draft model must read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvd.executor.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class _Late:
    rows: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    done: Callable[[], bool]
    read: Callable[[], np.ndarray]


class LateTokens:
    """In the order of the steps; called from the executor's thread."""

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._starts = np.zeros(len(batch.num_known), dtype=np.int64)
        """How often each row was started: what its predecessor sampled is nobody's."""
        self._late: deque[_Late] = deque()

    def start(self, row: int) -> None:
        """The row begins anew."""
        self._starts[row] += 1

    def expect(self, rows: np.ndarray, positions: np.ndarray, *, done: Callable[[], bool], read: Callable[[], np.ndarray]) -> None:
        """A step was launched that samples a token for each of ``rows`` at absolute ``positions``. ``read`` gives them once ``done``."""
        self.take(wait=False)
        self._late.append(_Late(rows, positions, self._starts[rows], done, read))

    def take(self, *, wait: bool) -> None:
        """Put into ``InputBatch.token_ids`` what is there; ``wait``: all, and ``read`` waits for what is not."""
        while self._late and (wait or self._late[0].done()):
            late = self._late.popleft()
            same = late.starts == self._starts[late.rows]
            self._batch.token_ids[late.rows[same], late.positions[same]] = np.asarray(late.read())[same]
