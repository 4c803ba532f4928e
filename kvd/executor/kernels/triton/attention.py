"""Paged attention straight from the block-major pool.

The context is cut into tiles at fixed absolute places. A tile gives a query a partial (largest score, sum of weights, weighted values) that depends on the
query and the tile alone; partials are merged in ascending order of tiles (Milakov and Gimelshein 2018; split over the context as in Flash-Decoding, Dao et
al. 2023). So a run of blocks that many rows share can be attended once for all of them (ChunkAttention, Ye et al. 2024; Hydragen, Juravsky et al. 2024;
FlashInfer's cascade, Ye et al. 2025): each query gets the very partials that it would get alone, bit for bit, since one kernel of one shape computes both.

Two ways through the tiles. ``attend_pieces``, for rows of few tokens: one program a *piece* (a tile and the queries that see it), its partials written out and merged by a
second kernel. ``attend_chunks``, for prompts: one program for some queries of a row, over all tiles, merged in registers. A matrix product gives each of its rows the same
sum whatever the other rows hold; a program's rows are the queries of the heads that share a KV head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tile_partial(
    queries,
    query_positions,
    table,
    table_stride,
    tile,
    last_position,
    pool,
    plane,
    planes_per_block,
    kv_head,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """``queries [lanes, DIMS]`` over tile ``tile`` of a block table: largest ``[lanes]``, sums ``[lanes]``, weighted values ``[lanes, DIMS]``.

    The table's entries lie ``table_stride`` apart. Nothing behind ``last_position`` is loaded: what lies there may be no number, and zero times that would be none either.
    """
    position = tile * TILE + tl.arange(0, TILE)
    is_written = position <= last_position
    block = tl.load(table + position // BLOCK * table_stride, mask=is_written, other=0).to(tl.int64)
    place = (block * planes_per_block + plane) * BLOCK + position % BLOCK
    dim = tl.arange(0, DIMS)
    offset = (place * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
    is_there = is_written[:, None] & (dim < HEAD_DIM)[None, :]
    keys = tl.load(pool + offset, mask=is_there, other=0.0)
    scores = tl.dot(queries.to(OPERAND), tl.trans(keys).to(OPERAND), input_precision="ieee") * scale
    distance = query_positions[:, None] - position[None, :]
    is_seen = distance >= 0
    if WINDOW > 0:
        is_seen = is_seen & (distance < WINDOW)
    scores = tl.where(is_seen, scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    weights = tl.exp(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    values = tl.load(pool + offset + BLOCK * NUM_KV_HEADS * HEAD_DIM, mask=is_there, other=0.0)
    weighted = tl.dot(weights.to(values.dtype).to(OPERAND), values.to(OPERAND), input_precision="ieee")
    return largest, tl.sum(weights, axis=1), weighted


@triton.jit
def _merge(largest, total, weighted, tile_largest, tile_total, tile_weighted):
    """Log-sum-exp merge of what precedes with the next tile's partial; a tile that a query does not see changes nothing."""
    both = tl.maximum(largest, tile_largest)
    base = tl.where(both == float("-inf"), 0.0, both)
    before = tl.exp(largest - base)
    now = tl.exp(tile_largest - base)
    return both, total * before + tile_total * now, weighted * before[:, None] + tile_weighted * now[:, None]


@triton.jit
def _first_tile(position, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile that a query at ``position`` sees something of."""
    return tl.maximum(position - WINDOW + 1, 0) // TILE if WINDOW > 0 else position * 0


@triton.jit(do_not_specialize=["plane", "table_stride"])
def _attend_pieces(
    q,
    pool,
    tables,
    table_stride,
    num_pieces,
    pieces,
    piece_tokens,
    positions,
    slots,
    totals,
    weighted_out,
    plane,
    planes_per_block,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    LANES: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Pieces are dealt out in turn to as many programs as there are, so that a captured launch fits any number of pieces."""
    kv_head = tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    lane = tl.arange(0, LANES)
    head = kv_head * group + lane % group
    dim = tl.arange(0, DIMS)
    for piece in range(tl.program_id(0), tl.load(num_pieces), tl.num_programs(0)):
        first = tl.load(pieces + piece * 4)
        row = tl.load(pieces + piece * 4 + 2)
        tile = tl.load(pieces + piece * 4 + 3)
        is_query = lane // group < tl.load(pieces + piece * 4 + 1)
        token = tl.load(piece_tokens + first + lane // group, mask=is_query, other=0)
        position = tl.load(positions + token, mask=is_query, other=-1)
        query = (token * NUM_HEADS + head)[:, None].to(tl.int64) * HEAD_DIM + dim[None, :]
        is_there = is_query[:, None] & (dim < HEAD_DIM)[None, :]
        queries = tl.load(q + query, mask=is_there, other=0.0)
        largest, total, weighted = _tile_partial(
            queries, position, tables + row, table_stride, tile, tl.max(position, axis=0), pool, plane, planes_per_block, kv_head, scale,
            NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK, TILE, WINDOW, OPERAND,
        )  # fmt: skip
        slot = (tl.load(slots + token, mask=is_query, other=0) + tile).to(tl.int64) * NUM_HEADS + head
        is_kept = is_query & (tile >= _first_tile(position, TILE, WINDOW)) & (tile * TILE <= position)
        tl.store(totals + slot * 2, largest, mask=is_kept)
        tl.store(totals + slot * 2 + 1, total, mask=is_kept)
        tl.store(weighted_out + slot[:, None] * HEAD_DIM + dim[None, :], weighted, mask=is_there & is_kept[:, None])


@triton.jit
def _merge_pieces(
    positions,
    slots,
    totals,
    weighted_in,
    out,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program for a token's heads of one KV head. A token at position -1 is padding and gets zeros."""
    token = tl.program_id(0).to(tl.int64)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    nth = tl.arange(0, HEADS)
    head = tl.program_id(1) * group + nth
    is_head = nth < group
    dim = tl.arange(0, DIMS)
    is_there = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    position = tl.load(positions + token)
    first_slot = tl.load(slots + token)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, DIMS], tl.float32)
    for tile in range(_first_tile(position, TILE, WINDOW), (position + TILE) // TILE):
        slot = (first_slot + tile).to(tl.int64) * NUM_HEADS + head
        tile_largest = tl.load(totals + slot * 2, mask=is_head, other=float("-inf"))
        tile_total = tl.load(totals + slot * 2 + 1, mask=is_head, other=0.0)
        tile_weighted = tl.load(weighted_in + slot[:, None] * HEAD_DIM + dim[None, :], mask=is_there, other=0.0)
        largest, total, weighted = _merge(largest, total, weighted, tile_largest, tile_total, tile_weighted)
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["plane", "table_stride"])
def _attend_chunks(
    q,
    pool,
    tables,
    table_stride,
    chunks,
    out,
    plane,
    planes_per_block,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    LANES: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One program for the queries of one chunk and one KV head: ``chunks[i]`` is first token, number of tokens, first position, row."""
    chunk = chunks + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    first_token = tl.load(chunk)
    num_tokens = tl.load(chunk + 1)
    first_position = tl.load(chunk + 2)
    table = tables + tl.load(chunk + 3)
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, DIMS)
    position = first_position + lane // group
    is_there = (lane // group < num_tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    query = ((first_token + lane // group) * NUM_HEADS + kv_head * group + lane % group)[:, None].to(tl.int64) * HEAD_DIM + dim[None, :]
    queries = tl.load(q + query, mask=is_there, other=0.0)
    last_position = first_position + num_tokens - 1
    largest = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES, DIMS], tl.float32)
    for tile in range(_first_tile(first_position, TILE, WINDOW), last_position // TILE + 1):
        tile_largest, tile_total, tile_weighted = _tile_partial(
            queries, position, table, table_stride, tile, last_position, pool, plane, planes_per_block, kv_head, scale,
            NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK, TILE, WINDOW, OPERAND,
        )  # fmt: skip
        largest, total, weighted = _merge(largest, total, weighted, tile_largest, tile_total, tile_weighted)
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + query, result.to(out.dtype.element_ty), mask=is_there)


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """What a matrix product's operands are: the tensor's own dtype. Triton's interpreter has no bfloat16 product; in float32 the same numbers are as exact."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def tile_tokens(dtype: torch.dtype) -> int:
    """Positions of a tile over a pool of ``dtype``."""
    return 64 if dtype.itemsize > 2 else 128


class PagedAttention:
    """The launches over one pool, for one model's shape.

    ``tile_tokens``: positions of a tile; ``tile_queries`` and ``chunk_queries``: rows of a program's matrix product, query heads of one KV head
    counted singly. All three are part of what decides the bits. ``num_programs`` bounds the programs that pieces are dealt out to, a KV head.
    """

    def __init__(
        self,
        pool_positions: Tensor,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size_tokens: int,
        scale: float,
        num_programs: int,
    ) -> None:
        group = num_heads // num_kv_heads
        is_wide = pool_positions.dtype.itemsize > 2
        self.tile_tokens = tile_tokens(pool_positions.dtype)
        self.tile_queries = max(16, triton.next_power_of_2(group))
        # float32 is there to be compared: its prompts take the shape that decoding has
        self.chunk_queries = self.tile_queries if is_wide else max(64, self.tile_queries)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._pool = pool_positions
        self._planes_per_block = 2 * num_layers
        self._scale = scale
        self._num_programs = num_programs
        self._heads = triton.next_power_of_2(group)
        self._dims = max(16, triton.next_power_of_2(head_dim))
        self._shape = {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "DIMS": self._dims,
            "TILE": self.tile_tokens,
        }
        self._block = block_size_tokens
        self._operand = operand_type(pool_positions.dtype)

    def attend_pieces(
        self,
        layer: int,
        window: int,
        q: Tensor,
        tables: Tensor,
        num_pieces: Tensor,
        pieces: Tensor,
        piece_tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        partials: tuple[Tensor, Tensor],
        out: Tensor,
    ) -> None:
        """Attend for the first ``len(slots)`` tokens of ``q [T, num_heads, head_dim]`` into ``out`` of the same shape.

        All counts are int32. A row's table is a column of ``tables [blocks, R]``. ``pieces [capacity, 4]`` of which the first ``num_pieces [1]`` count:
        first of ``piece_tokens``, how many of them, the row whose table stands for all, tile. Token t's partial of tile i goes to slot ``slots[t] + i`` of
        ``partials``: float32 ``[slots, num_heads, 2]`` and ``[slots, num_heads, head_dim]``.
        """
        totals, weighted = partials
        num_programs = max(1, min(self._num_programs, len(pieces)))
        _attend_pieces[(num_programs, self.num_kv_heads)](
            q, self._pool, tables, tables.stride(0), num_pieces, pieces, piece_tokens, positions, slots, totals, weighted,
            2 * layer, self._planes_per_block, self._scale, **self._shape, BLOCK=self._block, WINDOW=window, LANES=self.tile_queries, OPERAND=self._operand,
        )  # fmt: skip
        _merge_pieces[(len(slots), self.num_kv_heads)](
            positions, slots, totals, weighted, out, **self._shape, WINDOW=window, HEADS=self._heads, num_warps=2
        )

    def attend_chunks(self, layer: int, window: int, q: Tensor, tables: Tensor, chunks: Tensor, out: Tensor) -> None:
        """Attend for the tokens of int32 ``chunks [n, 4]``: first token, number of tokens (times the group at most ``chunk_queries``), first position, row."""
        _attend_chunks[(len(chunks), self.num_kv_heads)](
            q, self._pool, tables, tables.stride(0), chunks, out, 2 * layer, self._planes_per_block, self._scale,
            **self._shape, BLOCK=self._block, WINDOW=window, LANES=self.chunk_queries, OPERAND=self._operand, num_warps=4,
        )  # fmt: skip

    def new_partials(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """Memory for ``num_slots`` partials."""
        shape = (max(1, num_slots), self.num_heads)
        return (
            torch.empty((*shape, 2), dtype=torch.float32, device=self._pool.device),
            torch.empty((*shape, self.head_dim), dtype=torch.float32, device=self._pool.device),
        )


def attention_reference(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, scale: float, window: int) -> Tensor:
    """One row's queries ``[T, num_heads, head_dim]`` at ``positions [T]`` over its context ``[context, num_kv_heads, head_dim]``, in torch and float32."""
    group = q.shape[1] // keys.shape[1]
    wide_keys, wide_values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_keys) * scale
    distance = positions[:, None] - torch.arange(len(keys), device=q.device)[None]
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_values).to(q.dtype)
