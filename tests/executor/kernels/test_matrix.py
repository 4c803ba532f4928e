"""Packed matrices and their products, for every instruction set that this processor has, against torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.executor.kernels.cpu import native

pytestmark = pytest.mark.torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ISAS = native.status().available_isas


def test_the_native_kernels_are_built_here() -> None:
    """Development and CI have a compiler: silently falling back to torch would test nothing."""
    assert native.status().isa is not None, native.status().reason


@pytest.fixture(params=ISAS)
def cpu(request: pytest.FixtureRequest) -> Iterator:
    module = native.module()
    before = module.isa()
    module.set_isa(request.param)
    yield module
    module.set_isa(before)


@pytest.fixture(scope="module")
def pool():
    return native.module().Pool(3)


def packed(pool, fmt: str, weights: torch.Tensor):
    matrix = native.module().Matrix(fmt, *weights.shape)
    matrix.pack_rows(pool, 0, weights)
    return matrix


def product(pool, matrix, x: torch.Tensor, bias: torch.Tensor | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x), matrix.n), torch.nan) if into is None else into.clone()
    native.module().multiply(pool, matrix, x, out, bias, accumulate=into is not None)
    return out


def assert_near(got: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, added: torch.Tensor | float = 0.0) -> None:
    """Sums in float32 in any order are within the rounding of the sum of magnitudes."""
    expected = x.double() @ weights.double().T + added
    scale = x.double().abs() @ weights.double().abs().T + 1.0
    assert ((got.double() - expected).abs() / scale).max() < 4e-6


@pytest.mark.parametrize("fmt", DTYPES)
@settings(max_examples=25)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 200),
    num_rows=st.integers(1, 70),
    seed=st.integers(0, 2**31),
    with_bias=st.booleans(),
    accumulate=st.booleans(),
)
@pytest.mark.parametrize("isa", ISAS)
def test_products_are_torchs(pool, isa: str, fmt: str, n: int, k: int, num_rows: int, seed: int, with_bias: bool, accumulate: bool) -> None:
    module = native.module()
    before = module.isa()
    module.set_isa(isa)
    try:
        random = torch.Generator().manual_seed(seed)
        weights = torch.randn(n, k, generator=random).to(DTYPES[fmt])
        x = torch.randn(num_rows, k, generator=random).to(DTYPES[fmt])
        bias = torch.randn(n, generator=random) if with_bias else None
        into = torch.randn(num_rows, n, generator=random) if accumulate else None
        got = product(pool, packed(pool, fmt, weights), x, bias, into)
        assert_near(got, x, weights, (bias if with_bias else 0.0) + (into if accumulate else 0.0))
    finally:
        module.set_isa(before)


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(576, 576), (130, 77), (64, 1536), (1, 3)])
def test_a_row_is_the_same_whatever_stands_beside_it(cpu, pool, fmt: str, n: int, k: int) -> None:
    """Bit for bit: any number of rows, any place among them, any number of threads."""
    random = torch.Generator().manual_seed(n + k)
    matrix = packed(pool, fmt, torch.randn(n, k, generator=random).to(DTYPES[fmt]))
    num_rows = 600 if cpu.isa() != "portable" else 60
    x = torch.randn(num_rows, k, generator=random).to(DTYPES[fmt])
    bias = torch.randn(n, generator=random)
    whole = product(pool, matrix, x, bias)
    alone = cpu.Pool(1)
    for size in (1, 2, 3, 4, 5, 6, 7, 11, 16, 33, 49, 59, 97, 200, 517):
        if size < num_rows:
            first = int(torch.randint(num_rows - size, (1,), generator=random))
            for threads in (pool, alone):
                assert torch.equal(product(threads, matrix, x[first : first + size].contiguous(), bias), whole[first : first + size]), size


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [1, 65, 9 * 64, 40 * 64])
def test_threads_compute_every_panel_once(n: int, num_threads: int) -> None:
    """Fewer threads than panels and more; a thread that comes late has its panels taken over by others. What is computed twice is added twice."""
    threads = native.module().Pool(num_threads)
    matrix = packed(threads, "f32", torch.ones(n, 8))
    for num_rows in (1, 5, 100):
        x, into = torch.ones(num_rows, 8), torch.arange(num_rows * n, dtype=torch.float32).reshape(num_rows, n)
        for _ in range(20):
            assert torch.equal(product(threads, matrix, x, into=into), into + 8), num_rows


def test_negative_zeros_infinities_and_nans_stay_in_their_rows(cpu, pool) -> None:
    weights = torch.randn(70, 33)
    x = torch.randn(9, 33)
    x[2, 5], x[4, 6], x[6, 7] = torch.inf, torch.nan, -torch.inf
    for fmt, dtype in DTYPES.items():
        out = product(pool, packed(pool, fmt, weights.to(dtype)), x.to(dtype))
        finite = [row for row in range(9) if out[row].isfinite().all()]
        assert finite == [0, 1, 3, 5, 7, 8]
        assert not out[4].isfinite().any()


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_rows_are_packed_in_any_portions_and_come_back(pool, fmt: str, source: str) -> None:
    weights = torch.randn(150, 37).to(DTYPES[source])
    matrix = native.module().Matrix(fmt, 150, 37)
    for first, end in ((90, 150), (0, 1), (1, 70), (70, 90)):
        matrix.pack_rows(pool, first, weights[first:end].contiguous())
    row = np.empty(37, np.float32)
    for index in (0, 1, 63, 64, 69, 70, 89, 90, 149):
        matrix.unpack_row(index, row)
        assert np.array_equal(row, weights[index].to(DTYPES[fmt]).float().numpy())
    x = torch.randn(4, 37).to(DTYPES[fmt])
    assert torch.equal(product(pool, matrix, x), product(pool, packed(pool, fmt, weights), x))


def test_bits_of_bfloat16_may_come_from_numpy(pool) -> None:
    weights, x = torch.randn(10, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    matrix = native.module().Matrix("bf16", 10, 8)
    matrix.pack_rows(pool, 0, weights.view(torch.uint16).numpy())
    assert torch.equal(product(pool, matrix, x), product(pool, packed(pool, "bf16", weights), x))


def test_a_matrix_outlives_the_others(pool) -> None:
    weights = [torch.randn(64, 64) for _ in range(5)]
    matrices = [packed(pool, "f32", value) for value in weights]
    kept = matrices[3]
    del matrices
    assert_near(product(pool, kept, torch.eye(64)), torch.eye(64), weights[3])


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="the address sanitizer keeps what was freed")
def test_the_memory_of_a_matrix_is_given_back() -> None:
    def address_space() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    before = address_space()
    matrix = native.module().Matrix("f32", 20_480, 1024)
    assert address_space() - before >= matrix.bytes == 80 << 20
    del matrix
    assert address_space() - before < 8 << 20


def test_arrays_that_would_be_copied_are_refused(pool) -> None:
    """The kernels would fill the copy, and the caller's array would stay as it is."""
    cpu = native.module()
    matrix, x = packed(pool, "f32", torch.randn(10, 8)), torch.randn(3, 8)
    for out in (torch.empty(10, 3).T, torch.empty(3, 10).double()):
        with pytest.raises(TypeError):
            cpu.multiply(pool, matrix, x, out)
    with pytest.raises(TypeError):
        cpu.multiply(pool, matrix, torch.randn(8, 3).T, torch.empty(3, 10))
    with pytest.raises(TypeError):
        matrix.pack_rows(pool, 0, torch.randn(8, 10).T)
    with pytest.raises(TypeError):
        matrix.unpack_row(0, np.empty(16, np.float32)[::2])
    with pytest.raises(TypeError):
        cpu.largest(pool, x, np.empty(3, np.int32), np.empty(3, bool))


def test_wrong_shapes_are_refused(pool) -> None:
    cpu = native.module()
    matrix = packed(pool, "bf16", torch.randn(10, 8))
    out = torch.empty(3, 10)
    with pytest.raises(ValueError, match="x is"):
        cpu.multiply(pool, matrix, torch.randn(3, 9).bfloat16(), out)
    with pytest.raises(ValueError, match="out is"):
        cpu.multiply(pool, matrix, torch.randn(4, 8).bfloat16(), out)
    with pytest.raises(ValueError, match="rows of this type"):
        cpu.multiply(pool, matrix, torch.randn(3, 8), out)
    with pytest.raises(ValueError, match="bias is"):
        cpu.multiply(pool, matrix, torch.randn(3, 8).bfloat16(), out, torch.randn(9))
    with pytest.raises(ValueError, match="outside"):
        matrix.pack_rows(pool, 5, torch.randn(6, 8))
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        matrix.pack_rows(pool, 0, torch.randn(6, 8).double())
    with pytest.raises(ValueError, match="at least one"):
        cpu.Matrix("f32", 0, 4)
    with pytest.raises(ValueError, match="format"):
        cpu.Matrix("q3", 1, 4)
    with pytest.raises(ValueError, match="threads"):
        cpu.Pool(0)
    with pytest.raises(ValueError, match="instruction set"):
        cpu.set_isa("sse")
