"""What a step's masks take from its draws: a bit a token, made by the constraint of a row's request, one mask for each token that the row may sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvd.executor.kernels.cpu import native
from kvd.step import TokenMasks


@dataclass(frozen=True, slots=True)
class DrawMasks:
    """The masks of M of a step's draws."""

    draws: np.ndarray
    """int64 ``[M]``."""
    octets: np.ndarray
    """uint8 ``[M, B]``: bit j of byte b says whether token 8 b + j may be drawn."""

    def forbid(self, logits: Tensor) -> None:
        """Minus infinity in the place of what ``logits [N, V]`` may not become, in place; on their device."""
        if logits.device.type == "cpu" and native.status().isa is not None:
            native.module().forbid(native.pool(), logits.numpy(), self.draws, self.octets)
            return
        octets = torch.from_numpy(self.octets).to(logits.device)
        bits = octets[:, :, None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=logits.device)).bitwise_and_(1)
        forbidden = bits.view(len(octets), -1)[:, : logits.shape[1]] == 0
        if len(self.draws) == len(logits):
            logits.masked_fill_(forbidden, float("-inf"))
        else:
            where = torch.from_numpy(self.draws).to(logits.device)
            logits[where] = logits[where].masked_fill_(forbidden, float("-inf"))


class StepMasks:
    """The masks of one step by row."""

    __slots__ = ("_first", "_octets")

    def __init__(self, masks: TokenMasks, max_rows: int) -> None:
        counts = np.array(masks.counts, dtype=np.int64)
        self._first = np.full(max_rows, -1, dtype=np.int64)
        self._first[masks.rows] = np.cumsum(counts) - counts
        self._octets = np.frombuffer(masks.words, dtype=np.uint8).reshape(-1, 4 * masks.num_words)

    def of(self, rows: np.ndarray, positions: np.ndarray) -> DrawMasks | None:
        """The masks of draws of ``rows`` at ``positions``, both ``[N]``: a row's first position takes its first mask, the next one the second.

        Choices of one row that are drawn at the same position share a mask. None: no draw has one.
        """
        masked = np.flatnonzero(self._first[rows] >= 0)
        if not len(masked):
            return None
        base = np.full(len(self._first), np.iinfo(np.int64).max)
        np.minimum.at(base, rows, positions)
        which = rows[masked]
        return DrawMasks(masked, self._octets[self._first[which] + positions[masked] - base[which]])
