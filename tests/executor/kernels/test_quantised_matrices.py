"""Quantised matrices: the file's own values, products as exact as float32 sums are, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from gguf_files import random_quantised
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.executor.kernels.cpu import native

pytestmark = pytest.mark.torch

if native.status().isa is None:
    pytest.skip(native.status().reason, allow_module_level=True)

BLOCKS = {"Q8_0": 32, "Q4_0": 32, "Q4_1": 32, "Q4_K": 256, "Q6_K": 256}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ISAS = native.status().available_isas
MANY_ROWS = (1, 2, 3, 4, 6, 7, 16, 17, 40)


@pytest.fixture(scope="module")
def pool() -> Any:
    return native.module().Pool(3)


@contextmanager
def using(isa: str) -> Iterator[None]:
    before = native.module().isa()
    native.module().set_isa(isa)
    try:
        yield
    finally:
        native.module().set_isa(before)


def quantised(pool: Any, kind: str, n: int, k: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """A random matrix as stored, packed, and as the gguf package dequantises it."""
    stored = random_quantised((n, k), kind, np.random.default_rng(seed))
    matrix = native.module().Matrix(kind.lower(), n, k)
    matrix.pack_rows(pool, 0, stored)
    return matrix, torch.from_numpy(dequantize(stored, GGMLQuantizationType[kind]))


def product(pool: Any, matrix: Any, x: torch.Tensor, bias: torch.Tensor | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x), matrix.n), torch.nan) if into is None else into.clone()
    native.module().multiply(pool, matrix, x, out, bias, accumulate=into is not None)
    return out


def worst_error(got: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, added: torch.Tensor | float = 0.0) -> float:
    """Against the product in float64 of the dequantised values, relative to the sum of magnitudes."""
    expected = x.double() @ weights.double().T + added
    scale = x.double().abs() @ weights.double().abs().T + torch.as_tensor(added).abs()
    return float(((got.double() - expected).abs() / scale).max())


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=12)
@given(
    n=st.integers(1, 150),
    blocks=st.integers(1, 5),
    num_rows=st.integers(1, 45),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**31),
    with_bias=st.booleans(),
    accumulate=st.booleans(),
)
def test_products_are_those_of_the_dequantised_values(
    pool: Any, isa: str, kind: str, n: int, blocks: int, num_rows: int, dtype: str, seed: int, with_bias: bool, accumulate: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    matrix, weights = quantised(pool, kind, n, blocks * BLOCKS[kind], seed)
    x = torch.randn(num_rows, matrix.k, generator=random).to(DTYPES[dtype])
    bias = torch.randn(n, generator=random) if with_bias else None
    into = torch.randn(num_rows, n, generator=random) if accumulate else None
    with using(isa):
        got = product(pool, matrix, x, bias, into)
    assert worst_error(got, x, weights, (bias if with_bias else 0.0) + (into if accumulate else 0.0)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_is_the_same_whatever_stands_beside_it(pool: Any, isa: str, kind: str, dtype: str) -> None:
    """Bit for bit: any number of rows, any place among them, any number of threads."""
    matrix, _ = quantised(pool, kind, 130, 768)
    x = torch.randn(max(MANY_ROWS), 768, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    with using(isa):
        alone = torch.cat([product(pool, matrix, row[None]) for row in x])
        for num_rows in MANY_ROWS:
            assert torch.equal(product(pool, matrix, x[-num_rows:]), alone[-num_rows:]), num_rows
        assert torch.equal(product(native.module().Pool(1), matrix, x), alone)


@cache
def large(kind: str) -> tuple[Any, torch.Tensor]:
    """So many panels that one thread does not divide them by rows."""
    return quantised(native.module().Pool(1), kind, 1024, 768)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("isa", ISAS)
def test_prompts_have_the_same_rows_as_single_tokens(isa: str, kind: str, dtype: str) -> None:
    """Beyond what the kernels keep in scratch memory at once: two runs of rows (of 256), two runs of k (of 512)."""
    matrix, weights = large(kind)
    x = torch.randn(300, 768, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    alone = native.module().Pool(1)
    with using(isa):
        got = product(alone, matrix, x)
        for row in (0, 255, 256, 299):
            assert torch.equal(product(alone, matrix, x[row : row + 1])[0], got[row]), row
    assert worst_error(got[252:260], x[252:260], weights) < 1e-6


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_come_back_as_they_were_stored(pool: Any, kind: str) -> None:
    """The very values of ggml's dequantisation, in whatever runs the rows were packed."""
    stored = random_quantised((200, 512), kind, np.random.default_rng(3))
    expected = dequantize(stored, GGMLQuantizationType[kind])
    matrix = native.module().Matrix(kind.lower(), 200, 512)
    for first, last in ((150, 200), (0, 7), (7, 150)):
        matrix.pack_rows(pool, first, np.ascontiguousarray(stored[first:last]))
    out = np.empty(512, dtype=np.float32)
    for row in range(200):
        matrix.unpack_row(row, out)
        assert np.array_equal(out, expected[row]), row


def test_every_code_of_every_format_is_multiplied(pool: Any) -> None:
    """Codes at the ends of their range, scales of either sign; Q8_0 has one code more below zero than above."""
    for kind, block in BLOCKS.items():
        stored = random_quantised((64, 4 * block), kind, np.random.default_rng(9))
        rng = np.random.default_rng(10)
        if kind == "Q8_0":
            codes = np.resize(np.arange(256, dtype=np.uint8), (64, 4, 32))
            stored.reshape(64, 4, 34)[..., 2:] = rng.permuted(codes, axis=0)
        scales = stored.reshape(64, 4, -1)[..., 208:210] if kind == "Q6_K" else stored.reshape(64, 4, -1)[..., :2]
        scales[..., 1] |= np.where(rng.random((64, 4)) < 0.5, 0x80, 0).astype(np.uint8)
        weights = torch.from_numpy(dequantize(stored, GGMLQuantizationType[kind]))
        matrix = native.module().Matrix(kind.lower(), 64, 4 * block)
        matrix.pack_rows(pool, 0, stored)
        eye = torch.eye(4 * block)
        for isa in ISAS:
            for dtype in DTYPES.values():
                with using(isa):
                    got = product(pool, matrix, eye.to(dtype))
                torch.testing.assert_close(got.T, weights, atol=1e-7, rtol=1e-6)


def test_instruction_sets_agree(pool: Any) -> None:
    for kind in BLOCKS:
        matrix, weights = quantised(pool, kind, 96, 1536)
        x = torch.randn(5, 1536, generator=torch.Generator().manual_seed(4)).bfloat16()
        scale = x.abs().float() @ weights.abs().T
        results = []
        for isa in ISAS:
            with using(isa):
                results.append(product(pool, matrix, x))
        for other in results[1:]:
            assert float(((other - results[0]).abs() / scale).max()) < 1e-6


@pytest.mark.parametrize(("kind", "growth"), [("Q8_0", 1.0), ("Q4_0", 1.0), ("Q4_1", 1.0), ("Q4_K", 148 / 144), ("Q6_K", 1.0)])
def test_memory_is_that_of_the_file(kind: str, growth: float) -> None:
    stored = random_quantised((128, 512), kind, np.random.default_rng(0))
    assert native.module().Matrix(kind.lower(), 128, 512).bytes == stored.nbytes * growth


def test_rows_that_do_not_fill_blocks_are_refused() -> None:
    for kind, block in BLOCKS.items():
        with pytest.raises(ValueError, match=f"do not fill blocks of {block}"):
            native.module().Matrix(kind.lower(), 64, block + 16)
