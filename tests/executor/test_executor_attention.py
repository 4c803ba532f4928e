"""Attention over the paged pool against dense attention, one row at a time, in float64."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

from dataclasses import dataclass  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvd.executor.attention import reference  # noqa: E402
from kvd.executor.attention.backend import AttentionRows  # noqa: E402
from kvd.executor.attention.reference import ReferenceAttention  # noqa: E402
from kvd.executor.kv_pool import KvPool  # noqa: E402

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Spec:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    windows: tuple[int, ...] = (0, 7, 0)

    @property
    def num_layers(self):
        return len(self.windows)

    @property
    def attention_scale(self):
        return 0.3


def layout(shapes, block_size, num_blocks, rng):
    """``shapes`` of (num_computed, num_tokens), sorted; every row has blocks of its own at random places."""
    shapes = sorted(shapes, key=lambda shape: (shape[1], shape[0]))
    num_computed, num_tokens = (np.array(column, dtype=np.int64) for column in zip(*shapes, strict=True))
    needed = -(-(num_computed + num_tokens) // block_size)
    ids = rng.permutation(num_blocks)[: needed.sum()]
    tables = np.full((len(shapes), needed.max() + 2), num_blocks + 1000, dtype=np.int32)  # what lies beyond must not be looked at
    for row, (first, count) in enumerate(zip(np.cumsum(needed) - needed, needed, strict=True)):
        tables[row, :count] = ids[first : first + count]
    starts = np.concatenate([[0], np.cumsum(num_tokens)])
    token_rows = np.repeat(np.arange(len(shapes)), num_tokens)
    positions = num_computed[token_rows] + np.arange(starts[-1]) - starts[token_rows]
    return AttentionRows(num_tokens, num_computed, starts, positions, token_rows, tables)


def dense(spec, layer, q, keys, values, num_computed):
    """``q [T, Hq, D]`` at positions from ``num_computed`` on; ``keys``, ``values [S, Hkv, D]``."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * spec.attention_scale
    distance = torch.arange(num_computed, num_computed + len(q))[:, None] - torch.arange(len(keys))[None]
    window = spec.windows[layer]
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    return torch.einsum("hts,shd->thd", torch.softmax(scores.masked_fill(hidden, float("-inf")), -1), values)


def check(spec, shapes, block_size, dtype, seed, num_blocks=160):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    rows = layout(shapes, block_size, num_blocks, rng)
    pool = KvPool(spec, num_blocks, block_size, dtype, "cpu")
    # the rest of the pool is poison: a foreign block must not reach a row even with weight zero
    pool.positions.fill_(float("nan"))
    step = ReferenceAttention(spec, pool).plan(rows)
    for layer in range(spec.num_layers):
        contexts = []
        for row, (before, todo) in enumerate(zip(rows.num_computed, rows.num_tokens, strict=True)):
            kv = torch.randn(before + todo, 2, spec.num_kv_heads * spec.head_dim).to(dtype)
            contexts.append(kv.view(-1, 2, spec.num_kv_heads, spec.head_dim))
            for block_index, block in enumerate(rows.block_tables[row][: -(-(before + todo) // block_size)]):
                plane = (int(block) * spec.num_layers + layer) * 2
                pool.planes[plane : plane + 2] = 0
                cached = kv[:before][block_index * block_size : (block_index + 1) * block_size]
                for side in range(2):
                    at = (plane + side) * block_size
                    pool.positions[at : at + len(cached)] = cached[:, side]
        new = torch.cat([context[before:] for context, before in zip(contexts, rows.num_computed, strict=True)])
        fused = torch.randn(rows.starts[-1], spec.num_heads + 1, spec.head_dim).to(dtype)
        q = fused[:, : spec.num_heads]  # a view, as the decoder's may be
        out = step(layer, q, new[:, 0], new[:, 1])
        assert out.dtype == dtype
        for row, context in enumerate(contexts):
            part = slice(rows.starts[row], rows.starts[row + 1])
            expected = dense(spec, layer, q[part], context[:, 0], context[:, 1], int(rows.num_computed[row]))
            error = (out[part].double() - expected).abs().max()
            assert error < TOLERANCE[dtype], (layer, row, float(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures_of_rows(seed, dtype):
    rng = np.random.default_rng(seed + 100)
    shapes = [(int(rng.integers(0, 60)), 1) for _ in range(rng.integers(1, 8))]
    shapes += [(int(rng.integers(0, 40)), int(rng.integers(2, 30))) for _ in range(rng.integers(0, 4))]
    shapes += [(int(rng.integers(0, 40)), 4) for _ in range(rng.integers(0, 4))]
    num_kv_heads = int(rng.choice([1, 2, 3, 6]))
    windows = tuple(int(rng.choice([0, 1, 5, 16, 33])) for _ in range(3))
    check(Spec(num_kv_heads=num_kv_heads, windows=windows), shapes, int(rng.choice([1, 4, 16])), dtype, seed, num_blocks=600)


@pytest.mark.parametrize("shapes", [[(0, 1)], [(0, 300)], [(17, 129), (40, 129)], [(256, 128), (0, 1), (300, 1)]])
def test_tiles_of_a_long_chunk_meet_at_their_edges(shapes):
    check(Spec(windows=(0, 130)), shapes, 16, torch.float32, 5)


def test_every_row_alone_when_memory_allows_no_group(monkeypatch):
    monkeypatch.setattr(reference, "MAX_GATHER_BYTES", 1)
    check(Spec(), [(10, 1), (11, 1), (30, 1), (5, 4), (6, 4)], 4, torch.float32, 6)


def test_groups_are_bounded_in_padding_and_memory():
    spec = Spec(windows=(0,))
    pool = KvPool(spec, 4096, 16, torch.float32, "cpu")
    backend = ReferenceAttention(spec, pool)
    rng = np.random.default_rng(0)
    rows = layout([(int(context), 1) for context in rng.integers(0, 2000, 60)], 16, 4096, rng)
    (groups,) = backend.plan(rows)._plans
    assert [group.first_token for group in groups[1:]] == [group.last_token for group in groups[:-1]]
    assert (groups[0].first_token, groups[-1].last_token) == (0, 60)
    assert len(groups) < 20
    for group in groups:
        padded = len(group.planes) // 2 * 16
        real = int((rows.num_computed[group.first_token : group.last_token] + 1).sum())
        assert padded <= 1.25 * real + 80 * group.num_rows
        assert group.num_rows == 1 or padded * 2 * 2 * 16 * 4 <= reference.MAX_GATHER_BYTES


def test_the_same_rows_give_the_same_bits_in_other_blocks():
    spec = Spec(windows=(0,))
    outputs = []
    for seed in (1, 2):
        pool = KvPool(spec, 64, 4, torch.bfloat16, "cpu")
        backend = ReferenceAttention(spec, pool)
        torch.manual_seed(0)
        rng = np.random.default_rng(seed)
        rows = layout([(0, 21), (0, 34)], 4, 64, rng)
        q, kv = torch.randn(55, 6, 16).bfloat16(), torch.randn(55, 2, 2, 16).bfloat16()
        outputs.append(backend.plan(rows)(0, q, kv[:, 0], kv[:, 1]))
    assert torch.equal(outputs[0], outputs[1])
