"""The Triton kernels against their torch references, under Triton's interpreter; none of it has a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvd.executor.attention.backend import AttentionRows
from kvd.executor.attention.tiles import TileShape, plan_tiles
from kvd.executor.kernels.triton import attention as attention_kernels
from kvd.executor.kernels.triton import rotary
from kvd.executor.kernels.triton.activation import silu_mul, silu_mul_reference
from kvd.executor.kernels.triton.attention import PagedAttention, attention_reference, tile_tokens
from kvd.executor.kernels.triton.norm import add_and_norm, add_and_norm_reference
from kvd.executor.kernels.triton.rotary import rotate_and_write, rotate_and_write_reference
from kvd.executor.run_layout import RunLayout
from kvd.scheduler.shared_runs import RunTree

pytestmark = [pytest.mark.torch, pytest.mark.triton]

BLOCK = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(dtype, ours, reference):
    torch.testing.assert_close(ours.float(), reference.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "has_update"), [(64, True), (576, False), (72, True)])
def test_norm_and_residual(dtype, size, has_update):
    generator = torch.Generator().manual_seed(size)
    residual = torch.randn(3, size, generator=generator)
    update = torch.randn(3, size, generator=generator).to(dtype) if has_update else None
    weight = torch.randn(size, generator=generator).to(dtype)
    expected_residual = residual.clone()
    expected = add_and_norm_reference(expected_residual, update, weight, 1e-5)
    close(dtype, add_and_norm(residual, update, weight, 1e-5), expected)
    torch.testing.assert_close(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1536])
def test_activation(dtype, size):
    gate_up = (torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(size)) * 4).to(dtype)
    close(dtype, silu_mul(gate_up), silu_mul_reference(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 64), (2, 2, 24)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotation_and_writing(dtype, num_heads, num_kv_heads, head_dim, has_norm):
    generator = torch.Generator().manual_seed(head_dim)
    num_layers, num_blocks, layer = 3, 7, 1
    positions = torch.tensor([5, 17, 18, -1, 40], dtype=torch.int32)
    token_rows = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)
    tables = torch.tensor([[3, 0, 0], [1, 6, 0], [5, 4, 2]], dtype=torch.int32).T.contiguous()
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    norm = torch.randn(num_heads + num_kv_heads, head_dim, generator=generator).to(dtype) if has_norm else None
    angles = torch.rand(64, head_dim // 2, generator=generator) * 6
    pools = [torch.full((num_blocks * num_layers * 2 * BLOCK, num_kv_heads * head_dim), 7.0, dtype=dtype) for _ in range(2)]
    queries = [
        write(
            qkv, norm, 1e-6, positions, token_rows, tables, angles.cos(), angles.sin(), pool, layer,
            num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size_tokens=BLOCK,
        )
        for write, pool in zip((rotate_and_write, rotate_and_write_reference), pools, strict=True)
    ]  # fmt: skip
    close(dtype, queries[0][positions >= 0], queries[1][positions >= 0])
    close(dtype, pools[0], pools[1])
    assert ((pools[0] != 7).any(dim=1) == (pools[1] != 7).any(dim=1)).all(), "nothing else is written, least of all by padding"


class World:
    """Rows over a random pool whose unwritten places hold NaN."""

    def __init__(self, rng, dtype, *, num_heads, num_kv_heads, head_dim, contexts, num_tokens, prefix=0, num_layers=2):
        self.dtype, self.num_layers, self.num_kv_heads, self.head_dim = dtype, num_layers, num_kv_heads, head_dim
        order = np.lexsort((contexts, num_tokens))
        num_tokens, computed = np.array(num_tokens)[order], np.array(contexts)[order]
        blocks = -(-(computed + num_tokens) // BLOCK)
        shared = prefix // BLOCK
        ids = rng.permutation(int(blocks.sum()) + shared + 3)
        tables = np.zeros((len(blocks), int(blocks.max())), dtype=np.int32)
        for row, count in enumerate(blocks):
            tables[row, :count], ids = ids[:count], ids[count:]
        prefix_ids = ids[:shared]
        sharing = np.flatnonzero(computed >= prefix) if prefix else np.zeros(0, dtype=np.int64)
        tables[sharing, :shared] = prefix_ids
        starts = np.concatenate([[0], np.cumsum(num_tokens)])
        token_rows = np.repeat(np.arange(len(blocks)), num_tokens)
        positions = np.arange(starts[-1]) - (starts[:-1] - computed)[token_rows]
        has_run = len(sharing) > 1
        self.rows = AttentionRows(
            num_tokens, computed, starts, positions, token_rows, tables,
            run_start=np.zeros(int(has_run), dtype=np.int64), run_end=np.full(int(has_run), prefix, dtype=np.int64),
            run_offsets=np.array([0, len(sharing)][: 1 + has_run], dtype=np.int64), run_rows=sharing if has_run else sharing[:0],
        )  # fmt: skip
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
        num_blocks = int(blocks.sum()) + shared + 3
        is_written = torch.zeros((num_blocks, BLOCK), dtype=torch.bool)
        for row, end in enumerate(computed + num_tokens):
            position = np.arange(end)
            is_written[tables[row, position // BLOCK], position % BLOCK] = True
        pool = torch.randn(num_blocks, num_layers, 2, BLOCK, num_kv_heads, head_dim, generator=generator).to(dtype)
        self.pool = pool.masked_fill_(~is_written[:, None, None, :, None, None], float("nan"))
        self.q = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator).to(dtype)
        self.attention = PagedAttention(
            pool.view(-1, num_kv_heads * head_dim), num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            block_size_tokens=BLOCK, scale=head_dim**-0.5, num_programs=3,
        )  # fmt: skip

    def attend(self, window, rows=None):
        rows = self.rows if rows is None else rows
        attention = self.attention
        group = self.q.shape[1] // self.num_kv_heads
        plan = plan_tiles(rows, TileShape(attention.tile_tokens, attention.tile_queries, attention.chunk_queries, group), window)
        out = torch.full_like(self.q, float("nan"))
        tables = torch.from_numpy(rows.block_tables.T.copy())
        partials = attention.new_partials(plan.num_slots)
        for each in partials:
            each.fill_(float("nan"))
        if len(plan.slots):
            attention.attend_pieces(
                1, window, self.q, tables, torch.tensor([len(plan.pieces)], dtype=torch.int32), torch.from_numpy(plan.pieces),
                torch.from_numpy(plan.piece_tokens), torch.from_numpy(rows.positions.astype(np.int32)), torch.from_numpy(plan.slots), partials, out,
            )  # fmt: skip
        if len(plan.chunks):
            attention.attend_chunks(1, window, self.q, tables, torch.from_numpy(plan.chunks), out)
        return out, plan

    def expected(self, window):
        rows = self.rows
        parts = []
        for row in range(len(rows.num_tokens)):
            end = int(rows.num_computed[row] + rows.num_tokens[row])
            table = torch.from_numpy(rows.block_tables[row, : -(-end // BLOCK)]).long()
            keys, values = (self.pool[table, 1, kv].reshape(-1, self.num_kv_heads, self.head_dim)[:end] for kv in (0, 1))
            part = slice(int(rows.starts[row]), int(rows.starts[row + 1]))
            positions = torch.from_numpy(rows.positions[part])
            parts.append(attention_reference(self.q[part], keys, values, positions, scale=self.head_dim**-0.5, window=window))
        return torch.cat(parts)


SHAPES = [(4, 2, 32), (6, 2, 16), (8, 1, 24), (20, 1, 16)]


@pytest.mark.parametrize(
    ("dtype", "shape", "window"),
    [
        (torch.float32, SHAPES[0], 0),
        (torch.bfloat16, SHAPES[1], 70),
        (torch.float16, SHAPES[2], 0),
        (torch.bfloat16, SHAPES[3], 0),
        *(pytest.param(dtype, shape, window, marks=pytest.mark.full) for dtype in DTYPES for shape in SHAPES for window in (0, 70)),
    ],
)
def test_attention_over_random_rows(dtype, shape, window):
    num_heads, num_kv_heads, head_dim = shape
    rng = np.random.default_rng(num_heads + window)
    world = World(
        rng, dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        contexts=[0, 63, 300, 127, 126, 130, 10], num_tokens=[1, 1, 1, 1, 3, 20, 40],
    )  # fmt: skip
    ours, _ = world.attend(window)
    close(dtype, ours, world.expected(window))


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 0), (torch.bfloat16, 200)])
def test_a_shared_run_gives_the_bits_of_private_ones(dtype, window):
    rng = np.random.default_rng(window)
    contexts = [300, 320, 260, 271, 100]
    world = World(rng, dtype, num_heads=4, num_kv_heads=2, head_dim=32, contexts=contexts, num_tokens=[1, 1, 1, 2, 1], prefix=256)
    shared, plan = world.attend(window)
    rows = world.rows
    alone = AttentionRows(rows.num_tokens, rows.num_computed, rows.starts, rows.positions, rows.token_rows, rows.block_tables)
    private, plan_alone = world.attend(window, alone)
    assert len(plan.pieces) < len(plan_alone.pieces), "fewer tiles are read"
    assert torch.equal(shared, private)
    close(dtype, shared, world.expected(window))


def test_float32_prompts_have_the_bits_of_decoding():
    rng = np.random.default_rng(5)
    world = World(rng, torch.float32, num_heads=4, num_kv_heads=2, head_dim=32, contexts=[0], num_tokens=[140])
    chunk, plan = world.attend(0)
    assert len(plan.chunks)
    assert not len(plan.slots)
    rows = world.rows
    last = AttentionRows(
        np.ones(1, dtype=np.int64), np.array([139]), np.array([0, 1]), np.array([139]), np.zeros(1, dtype=np.int64), rows.block_tables
    )
    world.q = world.q[139:]
    one, _ = world.attend(0, last)
    assert torch.equal(one[0], chunk[139])


@pytest.mark.parametrize("kernel", [attention_kernels._attend_pieces, attention_kernels._attend_chunks, rotary._rotate_and_write])
def test_no_number_of_a_step_makes_another_kernel(kernel):
    """Triton compiles one more for an integer that is 1, or divisible by 16, unless it is told not to look: while serving, all streams would stand."""
    assert {"plane", "table_stride"} <= set(kernel.kwargs["do_not_specialize"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_told_in_the_kernels_own_tiles_cover_every_tile_that_rows_share(dtype):
    """Three rows share 12 blocks and two of them 20: with tiles of 128 positions the second is shared by two, though it begins within the first run."""
    tile = tile_tokens(dtype)
    stem, branch = list(range(12)), list(range(12, 20))
    tables = [[*stem, *branch, 30], [*stem, *branch, 31], [*stem, 32]]
    tree = RunTree(tile // BLOCK)
    for row, (table, num_matched) in enumerate(zip(tables, (0, 20, 12), strict=True)):
        tree.add(row, table, num_matched)
    computed = np.array([12 * BLOCK + 3, 20 * BLOCK + 1, 20 * BLOCK + 2])
    by_context = np.array([2, 0, 1])
    runs = RunLayout(3, BLOCK).lay_out(tree.current(), by_context)
    ones, order = np.ones(3, dtype=np.int64), np.arange(3)
    block_tables = np.array([[*tables[row], *[0] * (21 - len(tables[row]))] for row in by_context], dtype=np.int32)
    rows = AttentionRows(ones, computed, np.arange(4), computed, order, block_tables, *runs)
    plan = plan_tiles(rows, TileShape(tile, 16, 64, 1), 0)
    sharers = {piece[3]: piece[1] for piece in plan.pieces.tolist() if piece[1] > 1}
    assert sharers == {each: 3 if (each + 1) * tile <= 12 * BLOCK else 2 for each in range(20 * BLOCK // tile)}
    assert len(plan.pieces) == sum(computed // tile + 1) - sum(count - 1 for count in sharers.values())
