"""A step's attention as lists of work for kernels that go tile by tile: pieces for rows of few tokens, chunks for prompts.

A *tile* is a run of context positions at a fixed absolute place; a *piece* is a tile and up to ``tile_queries`` queries that see it through one block table. A run
of blocks that several rows share becomes pieces of all of their queries, where it covers whole tiles; so a tile's partial is the same, shared or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvd.executor.attention.backend import AttentionRows


@dataclass(frozen=True, slots=True)
class TileShape:
    """What the kernels are built for; ``group``: query heads that share a KV head."""

    tile_tokens: int
    tile_queries: int
    chunk_queries: int
    group: int

    @property
    def piece_tokens(self) -> int:
        return self.tile_queries // self.group

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_queries // self.group


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Work of one step for one window; all arrays int32. The first ``len(slots)`` flat tokens are those of pieces, the others those of chunks."""

    pieces: np.ndarray
    """``[P, 4]``: first of ``piece_tokens``, how many of them, the row whose table stands for all, tile."""
    piece_tokens: np.ndarray
    """Flat tokens, the queries of the pieces."""
    slots: np.ndarray
    """``[S]``: token t's partial of tile i lies at ``slots[t] + i``; no two share a place, and they fill ``num_slots`` places."""
    num_slots: int
    chunks: np.ndarray
    """``[C, 4]``: first token, number of tokens, first position, row; the longest contexts first."""


def plan_tiles(rows: AttentionRows, shape: TileShape, window: int) -> TilePlan:
    """Lay out a step. Rows of at most ``shape.piece_tokens`` tokens go by pieces: they come first, since rows ascend by their number of tokens."""
    num_small = int(np.searchsorted(rows.num_tokens, shape.piece_tokens, side="right"))
    size = shape.tile_tokens
    num_tokens = int(rows.starts[num_small])
    positions = rows.positions[:num_tokens]
    first = np.maximum(positions - window + 1, 0) // size if window else np.zeros_like(positions)
    counts = positions // size + 1 - first
    slots = np.cumsum(counts) - counts - first
    shared, shared_tokens, is_shared = _shared_pieces(rows, shape, window, num_small)
    private = _private_pieces(rows, shape, window, num_small, is_shared)
    shared[:, 0] += num_tokens
    return TilePlan(
        pieces=np.concatenate([shared, private]).astype(np.int32),
        piece_tokens=np.concatenate([np.arange(num_tokens), shared_tokens]).astype(np.int32),
        slots=slots.astype(np.int32),
        num_slots=int(counts.sum()),
        chunks=_chunks(rows, shape, num_small),
    )


def _row_tiles(rows: AttentionRows, shape: TileShape, window: int, num_small: int) -> tuple[np.ndarray, np.ndarray]:
    """For each small row its first tile and the one behind its last."""
    computed = rows.num_computed[:num_small]
    first = np.maximum(computed - window + 1, 0) // shape.tile_tokens if window else np.zeros_like(computed)
    return first, (computed + rows.num_tokens[:num_small] - 1) // shape.tile_tokens + 1


def _private_pieces(rows: AttentionRows, shape: TileShape, window: int, num_small: int, is_shared: np.ndarray | None) -> np.ndarray:
    first, end = _row_tiles(rows, shape, window, num_small)
    counts = end - first
    row = np.repeat(np.arange(num_small), counts)
    tile = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    if is_shared is not None:
        is_private = ~is_shared[row, tile]
        row, tile = row[is_private], tile[is_private]
    return np.stack([rows.starts[row], rows.num_tokens[row], row, tile], axis=1)


def _shared_pieces(rows: AttentionRows, shape: TileShape, window: int, num_small: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Pieces whose first column counts within the tokens that come second; third, bool ``[num_small, tiles]``: which tiles they cover."""
    none = np.zeros((0, 4), dtype=np.int64), np.zeros(0, dtype=np.int64), None
    runs = rows.run_offsets
    if len(runs) < 2 or not num_small:
        return none
    first_tile, end_tile = _row_tiles(rows, shape, window, num_small)
    covered = np.zeros((num_small, int(end_tile.max())), dtype=bool)
    pieces: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    num_before = 0
    for run, (begin, end) in enumerate(pairwise(runs.tolist())):
        members = rows.run_rows[begin:end]
        members = members[members < num_small]
        first = -(-int(rows.run_start[run]) // shape.tile_tokens)
        last = int(rows.run_end[run]) // shape.tile_tokens
        if len(members):
            first = max(first, int(first_tile[members].min()))
        if len(members) < 2 or last <= first:
            continue
        covered[members, first:last] = True
        queries = np.concatenate([np.arange(rows.starts[row], rows.starts[row + 1]) for row in members])
        firsts = np.arange(0, len(queries), shape.piece_tokens)
        counts = np.minimum(shape.piece_tokens, len(queries) - firsts)
        tiles = np.arange(first, last)
        each = np.empty((len(tiles), len(firsts), 4), dtype=np.int64)
        each[:, :, 0] = num_before + firsts
        each[:, :, 1] = counts
        each[:, :, 2] = members[0]
        each[:, :, 3] = tiles[:, None]
        pieces.append(each.reshape(-1, 4))
        tokens.append(queries)
        num_before += len(queries)
    if not pieces:
        return none
    return np.concatenate(pieces), np.concatenate(tokens), covered


def _chunks(rows: AttentionRows, shape: TileShape, num_small: int) -> np.ndarray:
    num_tokens = rows.num_tokens[num_small:]
    counts = -(-num_tokens // shape.chunk_tokens)
    row = np.repeat(np.arange(num_small, len(rows.num_tokens)), counts)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * shape.chunk_tokens
    length = np.minimum(shape.chunk_tokens, rows.num_tokens[row] - offset)
    chunks = np.stack([rows.starts[row] + offset, length, rows.num_computed[row] + offset, row], axis=1)
    return chunks[np.argsort(-chunks[:, 2], kind="stable")].astype(np.int32)
