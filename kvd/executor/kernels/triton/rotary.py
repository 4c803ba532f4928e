"""What lies between the query-key-value product and attention: norm of each head, rotation, and K and V written into the paged pool."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["plane", "table_stride"])
def _rotate_and_write(
    qkv,
    head_norm,
    positions,
    token_rows,
    tables,
    table_stride,
    cosines,
    sines,
    q_out,
    pool,
    plane,
    planes_per_block,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One program a token; its heads as they lie in the product: queries, keys, values. A head is two halves, the pairs' coordinates."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    half: tl.constexpr = HEAD_DIM // 2
    num_rotated: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    num_all: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    head = tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    is_there = (head < num_all)[:, None] & (column < half)[None, :]
    is_rotated = (head < num_rotated)[:, None] & (column < half)[None, :]
    within = head[:, None] * HEAD_DIM + column[None, :]
    source = qkv + token * num_all * HEAD_DIM + within
    first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM + eps)[:, None]
        normal_first = (first * scale).to(qkv.dtype.element_ty).to(tl.float32)
        normal_second = (second * scale).to(qkv.dtype.element_ty).to(tl.float32)
        first = tl.where(is_rotated, normal_first * tl.load(head_norm + within, mask=is_rotated, other=0.0).to(tl.float32), first)
        second = tl.where(is_rotated, normal_second * tl.load(head_norm + within + half, mask=is_rotated, other=0.0).to(tl.float32), second)
    angle = tl.maximum(position, 0).to(tl.int64) * half + column
    cosine = tl.where(is_rotated, tl.load(cosines + angle, mask=column < half, other=0.0)[None, :], 1.0)
    sine = tl.where(is_rotated, tl.load(sines + angle, mask=column < half, other=0.0)[None, :], 0.0)
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    is_query = (head < NUM_HEADS)[:, None] & is_there
    queries = q_out + token * NUM_HEADS * HEAD_DIM + within
    tl.store(queries, turned_first.to(q_out.dtype.element_ty), mask=is_query)
    tl.store(queries + half, turned_second.to(q_out.dtype.element_ty), mask=is_query)
    row = tl.load(token_rows + token)
    block = tl.load(tables + position // BLOCK * table_stride + row, mask=position >= 0, other=0).to(tl.int64)
    is_value = (head >= num_rotated).to(tl.int64)
    kv_head = head - NUM_HEADS - is_value * NUM_KV_HEADS
    place = (block * planes_per_block + plane + is_value) * BLOCK + position % BLOCK
    kept = pool + ((place * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + column[None, :]
    is_kept = (head >= NUM_HEADS)[:, None] & is_there & (position >= 0)
    tl.store(kept, turned_first.to(pool.dtype.element_ty), mask=is_kept)
    tl.store(kept + half, turned_second.to(pool.dtype.element_ty), mask=is_kept)


def rotate_and_write(
    qkv: Tensor,
    head_norm: Tensor | None,
    eps: float,
    positions: Tensor,
    token_rows: Tensor,
    tables: Tensor,
    cosines: Tensor,
    sines: Tensor,
    pool_positions: Tensor,
    layer: int,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    block_size_tokens: int,
) -> Tensor:
    """Normalise (with ``head_norm``), rotate and keep; returns the queries ``[T, num_heads, head_dim]``.

    ``qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]``; ``head_norm [num_heads + num_kv_heads, head_dim]`` or None; ``positions`` and
    ``token_rows`` int32 ``[T]``; ``tables`` int32 ``[blocks, R]``, a row's table a column; ``cosines, sines`` float32 ``[max_positions, head_dim / 2]``;
    ``pool_positions`` is ``KvPool.positions``. A token at position -1 is padding: nothing of it is kept. All contiguous.
    """
    num_tokens = qkv.shape[0]
    num_all_heads = num_heads + 2 * num_kv_heads
    head_dim = qkv.shape[1] // num_all_heads
    queries = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rotate_and_write[(num_tokens,)](
        qkv,
        qkv if head_norm is None else head_norm,
        positions,
        token_rows,
        tables,
        tables.stride(0),
        cosines,
        sines,
        queries,
        pool_positions,
        2 * layer,
        2 * num_layers,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=block_size_tokens,
        HEADS=triton.next_power_of_2(num_all_heads),
        HALF=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=head_norm is not None,
    )
    return queries


def rotate_and_write_reference(
    qkv: Tensor,
    head_norm: Tensor | None,
    eps: float,
    positions: Tensor,
    token_rows: Tensor,
    tables: Tensor,
    cosines: Tensor,
    sines: Tensor,
    pool_positions: Tensor,
    layer: int,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    block_size_tokens: int,
) -> Tensor:
    """The same in torch's own operations."""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    rotated, values = heads[:, : num_heads + num_kv_heads].float(), heads[:, num_heads + num_kv_heads :]
    if head_norm is not None:
        rotated = rotated * torch.rsqrt(rotated.pow(2).mean(-1, keepdim=True) + eps)
        rotated = rotated.to(qkv.dtype).float() * head_norm.float()
    cosine, sine = cosines[positions.clamp(min=0)][:, None], sines[positions.clamp(min=0)][:, None]
    first, second = rotated.chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(qkv.dtype)
    kept = positions >= 0
    at, rows = positions[kept].long(), token_rows[kept].long()
    places = (tables[at // block_size_tokens, rows].long() * 2 * num_layers + 2 * layer) * block_size_tokens + at % block_size_tokens
    pool_positions[places] = rotated[kept, num_heads:].flatten(1).to(pool_positions.dtype)
    pool_positions[places + block_size_tokens] = values[kept].flatten(1).to(pool_positions.dtype)
    return rotated[:, :num_heads].contiguous()
