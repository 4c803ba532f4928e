"""LoRA adapters as torch tensors, and what they add to a step's products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvd.executor.adapters import Adapter
from kvd.executor.row_adapters import StepAdapters, by_product, tensor_values


@dataclass(frozen=True, slots=True)
class _Part:
    first_row: int
    first_rank: int
    b: Tensor
    """Float32 ``[num_rows, rank]``, times the scale."""


@dataclass(frozen=True, slots=True)
class _LowRank:
    a: Tensor
    """``[sum of ranks, inputs]`` in the decoder's dtype: the A of all parts of a fused product, one below the other."""
    parts: tuple[_Part, ...]


class TorchAdapter:
    """One adapter's tensors on the decoder's device."""

    def __init__(self, adapter: Adapter, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises:
        AdapterError: a value is not finite.
        """
        self._products: dict[tuple[int, str], _LowRank] = {}
        for (layer, part), pieces in by_product(adapter.modules).items():
            what = f"adapter {adapter.name}: a tensor of layer {layer}"
            a = np.concatenate([tensor_values(piece.a, what, dtype=str(dtype).removeprefix("torch.")) for piece in pieces])
            parts, first_rank = [], 0
            for piece in pieces:
                b = torch.from_numpy(tensor_values(piece.b, what, scale=piece.scale)).to(device)
                parts.append(_Part(piece.first_row, first_rank, b))
                first_rank += piece.rank
            self._products[layer, part] = _LowRank(torch.from_numpy(a).to(device=device, dtype=dtype), tuple(parts))

    def add(self, layer: int, part: str, inputs: Tensor, outputs: Tensor, tokens: Tensor) -> None:
        """``outputs[tokens] += scale * B (A inputs[tokens])`` for the product ``part`` of ``layer``; in place."""
        low_rank = self._products.get((layer, part))
        if low_rank is None:
            return
        inner = functional.linear(inputs[tokens], low_rank.a).float()
        for each in low_rank.parts:
            num_rows, rank = each.b.shape
            added = functional.linear(inner[:, each.first_rank : each.first_rank + rank], each.b)
            columns = outputs[:, each.first_row : each.first_row + num_rows]
            columns[tokens] = (columns[tokens].float() + added).to(outputs.dtype)


class TokenAdapters:
    """The adapters of a step, by token."""

    def __init__(self, step: StepAdapters[TorchAdapter], token_rows: np.ndarray, device: torch.device) -> None:
        """``token_rows`` int64 ``[T]``: the row of each token."""
        of_tokens = step.of_rows[token_rows]
        self._groups = [
            (adapter, torch.from_numpy(np.flatnonzero(of_tokens == index)).to(device)) for index, adapter in enumerate(step.adapters)
        ]

    def add(self, layer: int, part: str, inputs: Tensor, outputs: Tensor) -> None:
        """What each token's adapter adds to ``outputs [T, …]`` of a product of ``inputs [T, …]``; in place."""
        for adapter, tokens in self._groups:
            adapter.add(layer, part, inputs, outputs, tokens)
