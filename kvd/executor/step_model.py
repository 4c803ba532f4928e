"""The seam between the runner and whatever computes a step: torch's decoder over an attention backend, or kvd's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvd.executor.attention.backend import AttentionBackend, StepAttention
from kvd.executor.input_batch import StepRows
from kvd.executor.kv_pool import KvPool
from kvd.executor.torch_adapters import TokenAdapters


class StepHidden(Protocol):
    """What the layers made of a step's T tokens. Valid until its model's next ``forward``."""

    def finite(self) -> np.ndarray:
        """Bool ``[T]``: whether every value of the token's hidden state is finite."""

    def logits(self, tokens: np.ndarray) -> Tensor:
        """Float32 ``[len(tokens), vocab]`` on the model's device, of the flat ``tokens`` (int64).

        The caller may overwrite it; the model's next call may, too.
        """

    def greedy(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the flat ``tokens`` (int64), int64 and bool ``[len(tokens)]``: the id of the largest logit, the lowest among equals, and whether
        all of the token's logits are finite (where not, the id says nothing).
        """


class StepModel(Protocol):
    """A whole model over one KV pool, weights and attention included."""

    @property
    def warm_up_prompts(self) -> tuple[int, ...]:
        """Lengths of prompts, one of each shape class, after which nothing runs for the first time."""

    @property
    def warm_up_rows(self) -> int:
        """Rows of the largest batch of decodes after which nothing runs for the first time, however many there may be."""

    def over(self, pool: Any) -> StepModel:
        """The same weights over another pool of the same layout."""

    def forward(self, rows: StepRows) -> StepHidden:
        """Compute a step: keeps K and V of all tokens in the pool.

        Raises:
            IndexError: a block or a token id that does not exist.
        """


class StepDecoder(Protocol):
    """The torch decoder, as ``TorchModel`` drives it."""

    def forward(self, token_ids: Tensor, positions: Tensor, attend: StepAttention, adapters: TokenAdapters | None = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TorchModel:
    """A decoder of torch operators over ``pool``, on its device; ``attention`` makes the backend for a pool."""

    warm_up_prompts = (1, 16, 64, 256, 512)
    warm_up_rows = 1 << 16

    def __init__(self, decoder: StepDecoder, attention: Callable[[KvPool], AttentionBackend], pool: KvPool) -> None:
        self._decoder = decoder
        self._make_attention = attention
        self._attention = attention(pool)
        self._device = pool.device

    def over(self, pool: KvPool) -> TorchModel:
        return TorchModel(self._decoder, self._make_attention, pool)

    def forward(self, rows: StepRows) -> StepHidden:
        attend = self._attention.plan(rows.attention)
        inputs = (self._to_device(rows.token_ids), self._to_device(rows.attention.positions), attend)
        if rows.adapters is None:
            return _TorchHidden(self._decoder, self._decoder.forward(*inputs))
        adapters = TokenAdapters(rows.adapters, rows.attention.token_rows, self._device)
        hidden = self._decoder.forward(*inputs, adapters)
        return _TorchHidden(self._decoder, hidden)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


class _TorchHidden:
    def __init__(self, decoder: StepDecoder, hidden: Tensor) -> None:
        self._decoder = decoder
        self._hidden = hidden

    def finite(self) -> np.ndarray:
        return finite_rows(self._hidden)

    def greedy(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = self.logits(tokens)
        return logits.argmax(dim=-1).cpu().numpy(), finite_rows(logits)

    def logits(self, tokens: np.ndarray) -> Tensor:
        return self._decoder.logits(self._hidden[torch.from_numpy(tokens).to(self._hidden.device)])


def finite_rows(values: Tensor) -> np.ndarray:
    """Bool ``[N]`` of ``values [N, size]``: a row's sum is not finite if one of its values is not."""
    finite: np.ndarray = torch.isfinite(values.sum(dim=-1, dtype=torch.float32)).cpu().numpy()
    return finite
