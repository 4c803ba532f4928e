"""Where a ``KvdCache``'s positions stand in the pool, and how keys and values get there and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvd.executor.kv_pool import KvPool
from kvd.types import BlockId


@dataclass(frozen=True, slots=True)
class Slots:
    """Where positions ``0:end`` of all rows stand: the same for every layer of a forward pass but for the layer's own offset.

    ``places [batch, end]`` are rows of ``KvPool.positions`` for K of layer 0; a padding's is a real one that it reads without meaning, ``is_padding [batch, end]``.
    """

    end: int
    places: torch.Tensor
    is_padding: torch.Tensor | None

    @classmethod
    def empty(cls, device: torch.device) -> Slots:
        return cls(0, torch.zeros((0, 0), dtype=torch.int64, device=device), None)

    @classmethod
    def of(cls, rows: list[tuple[list[BlockId], int]], end: int, pool: KvPool) -> Slots:
        size = pool.block_size_tokens
        places = np.zeros((len(rows), end), dtype=np.int64)
        is_padding = np.zeros((len(rows), end), dtype=bool)
        for index, (block_ids, num_padding) in enumerate(rows):
            positions = np.arange(max(0, end - num_padding))
            blocks = np.asarray(block_ids, dtype=np.int64)[positions // size]
            places[index, num_padding:] = blocks * (pool.num_layers * 2 * size) + positions % size
            is_padding[index, :num_padding] = True
        padded = torch.from_numpy(is_padding).to(pool.device) if is_padding.any() else None
        return cls(end, torch.from_numpy(places).to(pool.device), padded)

    def write(self, pool: KvPool, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """``keys``, ``values [batch, num_kv_heads, new, head_dim]`` of one layer, from position ``start`` on."""
        end = start + keys.shape[2]
        places = self.places[:, start:end].reshape(-1) + layer * 2 * pool.block_size_tokens
        flat = [states.detach().transpose(1, 2).reshape(len(places), -1) for states in (keys, values)]
        if self.is_padding is not None:
            real = ~self.is_padding[:, start:end].reshape(-1)
            places, flat = places[real], [states[real] for states in flat]
        pool.positions.index_copy_(0, places, flat[0])
        pool.positions.index_copy_(0, places + pool.block_size_tokens, flat[1])

    def read(self, pool: KvPool, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of positions ``0:end`` of one layer, each ``[batch, num_kv_heads, end, head_dim]``; zero where there is padding."""
        places = self.places[:, :end]
        num_rows = len(places)
        read = []
        for kv in (0, 1):
            index = places.reshape(-1) + (layer * 2 + kv) * pool.block_size_tokens
            states = pool.positions.index_select(0, index).view(num_rows, end, pool.num_kv_heads, pool.head_dim)
            if self.is_padding is not None:
                states.masked_fill_(self.is_padding[:, :end, None, None], 0)
            read.append(states.transpose(1, 2).contiguous())
        return read[0], read[1]
