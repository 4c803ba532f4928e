"""The seam between the runner and whatever computes a step: torch's decoder over an attention backend, or kvd's own kernels."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvd.executor.attention.backend import AttentionBackend, StepAttention
from kvd.executor.input_batch import StepRows


class StepHidden(Protocol):
    """What the layers made of a step's T tokens. Valid until its model's next ``forward``."""

    def finite(self) -> np.ndarray:
        """Bool ``[T]``: whether every value of the token's hidden state is finite."""

    def logits(self, tokens: np.ndarray) -> Tensor:
        """Float32 ``[len(tokens), vocab]`` on the model's device, of the flat ``tokens`` (int64).

        The caller may overwrite it; the model's next call may, too.
        """


class StepModel(Protocol):
    """A whole model over one KV pool, weights and attention included."""

    def forward(self, rows: StepRows) -> StepHidden:
        """Compute a step: keeps K and V of all tokens in the pool.

        Raises:
            IndexError: a block or a token id that does not exist.
        """


class StepDecoder(Protocol):
    """The torch decoder, as ``TorchModel`` drives it."""

    def forward(self, token_ids: Tensor, positions: Tensor, attend: StepAttention) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TorchModel:
    """A decoder of torch operators and an attention backend, on ``device``."""

    def __init__(self, decoder: StepDecoder, attention: AttentionBackend, device: torch.device) -> None:
        self._decoder = decoder
        self._attention = attention
        self._device = device

    def forward(self, rows: StepRows) -> StepHidden:
        attend = self._attention.plan(rows.attention)
        hidden = self._decoder.forward(self._to_device(rows.token_ids), self._to_device(rows.attention.positions), attend)
        return _TorchHidden(self._decoder, hidden)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


class _TorchHidden:
    def __init__(self, decoder: StepDecoder, hidden: Tensor) -> None:
        self._decoder = decoder
        self._hidden = hidden

    def finite(self) -> np.ndarray:
        finite: np.ndarray = torch.isfinite(self._hidden.sum(dim=-1, dtype=torch.float32)).cpu().numpy()
        return finite

    def logits(self, tokens: np.ndarray) -> Tensor:
        return self._decoder.logits(self._hidden[torch.from_numpy(tokens).to(self._hidden.device)])
