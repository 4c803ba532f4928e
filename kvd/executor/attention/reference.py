"""Reference attention: K and V of a group of rows are gathered block by block, then torch's scaled-dot-product attention does the rest.

Rows of like shape form a group: equal numbers of queries, contexts within a quarter of each other, and a bounded gather; so neither padding
nor memory grows with the mixture. A long chunk's queries run in tiles, each over no more context than its last query sees.
Padding repeats a row's own blocks: masked scores weigh zero, but zero times a foreign NaN would still be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvd.executor.attention.backend import AttentionRows
from kvd.executor.kv_pool import KvPool

MAX_GATHER_BYTES = 64 << 20
"""K and V gathered at once, unless a single row needs more."""
_SLACK_TOKENS = 64
_QUERY_TILE = 128


class AttentionShape(Protocol):
    """The part of a model's spec that shapes attention."""

    @property
    def num_heads(self) -> int: ...

    @property
    def windows(self) -> tuple[int, ...]: ...

    @property
    def attention_scale(self) -> float: ...


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries ``first:last`` of each row of a group, over the first ``context`` gathered positions."""

    first: int
    last: int
    context: int
    mask: Tensor
    """``[n, 1, last - first, context]``, 0 or -inf, in the pool's dtype."""


@dataclass(frozen=True, slots=True)
class _Group:
    """``n`` rows of ``num_queries`` tokens each, the flat tokens ``first_token:last_token``."""

    first_token: int
    last_token: int
    num_rows: int
    num_queries: int
    planes: Tensor
    """int64 ``[2 * n * blocks]``: K planes, then V planes, of layer 0."""
    tiles: tuple[_Tile, ...]


class ReferenceAttention:
    """The reference backend over one pool."""

    def __init__(self, spec: AttentionShape, pool: KvPool) -> None:
        self._pool = pool
        self._windows = spec.windows
        self._scale = spec.attention_scale
        self._max_gather_tokens = MAX_GATHER_BYTES // (2 * pool.num_kv_heads * pool.head_dim * pool.dtype.itemsize)

    def plan(self, rows: AttentionRows) -> _Step:
        size = self._pool.block_size_tokens
        block_ids = rows.block_tables[rows.token_rows, rows.positions // size].astype(np.int64)
        targets = block_ids * (self._pool.num_layers * 2 * size) + rows.positions % size
        plans = {window: self._groups(rows, window) for window in set(self._windows)}
        return _Step(self._pool, self._scale, self._to_device(targets), tuple(plans[window] for window in self._windows))

    def _groups(self, rows: AttentionRows, window: int) -> tuple[_Group, ...]:
        size = self._pool.block_size_tokens
        # the first block that the first query can see
        first_block = np.maximum(rows.num_computed - window + 1, 0) // size if window else np.zeros_like(rows.num_computed)
        num_blocks = -(-(rows.num_computed + rows.num_tokens) // size) - first_block
        groups = []
        first = 0
        while first < len(rows.num_tokens):
            last = self._group_end(rows, num_blocks * size, first)
            groups.append(self._group(rows, slice(first, last), first_block, num_blocks, window))
            first = last
        return tuple(groups)

    def _group_end(self, rows: AttentionRows, contexts: np.ndarray, first: int) -> int:
        """Contexts ascend among rows of equal ``num_tokens`` (but for a block's rounding), so that both bounds are found by bisection."""
        last = int(np.searchsorted(rows.num_tokens, rows.num_tokens[first], side="right"))
        widest = np.maximum.accumulate(contexts[first:last])
        gathered = widest[: np.searchsorted(widest, widest[0] + widest[0] // 4 + _SLACK_TOKENS, side="right")]
        gathered = gathered * np.arange(1, len(gathered) + 1)
        return first + max(1, int(np.searchsorted(gathered, self._max_gather_tokens, side="right")))

    def _group(self, rows: AttentionRows, part: slice, first_block: np.ndarray, num_blocks: np.ndarray, window: int) -> _Group:
        size = self._pool.block_size_tokens
        blocks = int(num_blocks[part].max())
        columns = first_block[part, None] + np.minimum(np.arange(blocks), num_blocks[part, None] - 1)
        planes = np.take_along_axis(rows.block_tables[part], columns, axis=1).astype(np.int64).reshape(-1) * (self._pool.num_layers * 2)
        num_rows, num_queries = part.stop - part.start, int(rows.num_tokens[part.start])
        key_positions = first_block[part, None] * size + np.arange(blocks * size)
        tiles = []
        for first in range(0, num_queries, _QUERY_TILE):
            last = min(first + _QUERY_TILE, num_queries)
            query_positions = rows.num_computed[part, None] + np.arange(first, last)
            context = int((query_positions[:, -1] - key_positions[:, 0]).max()) + 1
            distance = query_positions[:, :, None] - key_positions[:, None, :context]
            hidden = (distance < 0) | (distance >= window) if window else distance < 0
            mask = torch.zeros((num_rows, 1, last - first, context), dtype=self._pool.dtype, device=self._pool.device)
            mask.masked_fill_(self._to_device(hidden)[:, None], float("-inf"))
            tiles.append(_Tile(first, last, context, mask))
        return _Group(
            first_token=int(rows.starts[part.start]),
            last_token=int(rows.starts[part.stop]),
            num_rows=num_rows,
            num_queries=num_queries,
            planes=self._to_device(np.concatenate([planes, planes + 1])),
            tiles=tuple(tiles),
        )

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._pool.device)


class _Step:
    """Attention of one step; ``plans`` has one entry a layer."""

    def __init__(self, pool: KvPool, scale: float, targets: Tensor, plans: tuple[tuple[_Group, ...], ...]) -> None:
        self._pool = pool
        self._scale = scale
        self._targets = targets
        self._plans = plans

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        pool = self._pool
        targets = self._targets + layer * 2 * pool.block_size_tokens
        pool.positions.index_copy_(0, targets, k.reshape(len(k), -1))
        pool.positions.index_copy_(0, targets + pool.block_size_tokens, v.reshape(len(v), -1))
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._plans[layer]:
            gathered = pool.planes.index_select(0, group.planes + layer * 2)
            keys, values = gathered.view(2, group.num_rows, -1, pool.num_kv_heads, pool.head_dim).transpose(2, 3)
            part = slice(group.first_token, group.last_token)
            self._attend(group, q[part], keys, values, attended[part])
        return attended

    def _attend(self, group: _Group, q: Tensor, keys: Tensor, values: Tensor, attended: Tensor) -> None:
        """``q``, ``attended [n * num_queries, num_heads, head_dim]``; ``keys``, ``values [n, num_kv_heads, context, head_dim]``."""
        num_heads, head_dim = q.shape[1:]
        if group.num_queries == 1:
            # the heads that share a KV head are its queries: K and V are read once for all of them
            tile = group.tiles[0]
            queries = q.view(group.num_rows, self._pool.num_kv_heads, -1, head_dim)
            context = functional.scaled_dot_product_attention(
                queries, keys[:, :, : tile.context], values[:, :, : tile.context], attn_mask=tile.mask, scale=self._scale
            )
            attended.copy_(context.reshape(attended.shape))
            return
        queries = q.view(group.num_rows, group.num_queries, num_heads, head_dim).transpose(1, 2)
        target = attended.view(group.num_rows, group.num_queries, num_heads, head_dim).transpose(1, 2)
        for tile in group.tiles:
            target[:, :, tile.first : tile.last] = functional.scaled_dot_product_attention(
                queries[:, :, tile.first : tile.last],
                keys[:, :, : tile.context],
                values[:, :, : tile.context],
                attn_mask=tile.mask,
                scale=self._scale,
                enable_gqa=True,
            )
