"""The native small operations against torch in float64, over odd sizes, on every instruction set that is here."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.rope import rotate  # noqa: E402
from kvd.executor.sampling.noise import gumbel, stream_keys  # noqa: E402

ISAS = native.module().available_isas() if native.status().isa else []
DTYPES = {torch.float32: 4e-7, torch.bfloat16: 2**-8}
"""Largest error, relative to the value."""


@pytest.fixture(params=ISAS)
def isa(request):
    module = native.module()
    best = module.isa()
    module.set_isa(request.param)
    yield request.param
    module.set_isa(best)


def empty(rows, size, dtype):
    return torch.empty((rows, size), dtype=dtype)


def as_bytes(tensor):
    return tensor.view(torch.uint8).numpy()


def assert_near(ours, exact, dtype):
    torch.testing.assert_close(ours.double(), exact, rtol=DTYPES[dtype], atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 1), (7, 19), (70, 1030), (33, 64)])
def test_rms_norm(isa, dtype, rows, size):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, size, generator=generator) * 3, torch.randn(size, generator=generator)
    out = empty(rows, size, dtype)
    native.module().rms_norm(native.pool(2), x, weight, 1e-5, as_bytes(out))
    wide = x.double()
    exact = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), exact, rtol=max(DTYPES[dtype], 1e-6), atol=1e-30)
    alone = empty(1, size, dtype)
    native.module().rms_norm(native.pool(2), x[-1:].contiguous(), weight, 1e-5, as_bytes(alone))
    assert torch.equal(alone[0], out[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (5, 3), (40, 1000)])
def test_silu_times_up(isa, dtype, rows, size):
    generator = torch.Generator().manual_seed(size)
    gate_up = torch.randn(rows, 2 * size, generator=generator) * 8
    gate_up[0, :3] = torch.tensor([-80.0, 80.0, 0.0])
    out = empty(rows, size, dtype)
    native.module().silu_mul(native.pool(2), gate_up, as_bytes(out))
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=max(DTYPES[dtype], 2e-6), atol=1e-30)
    alone = empty(1, size, dtype)
    native.module().silu_mul(native.pool(2), gate_up[-1:].contiguous(), as_bytes(alone))
    assert torch.equal(alone[0], out[-1])


def test_what_is_not_finite_stays_so(isa):
    for value in (float("nan"), float("inf"), float("-inf")):
        gate_up = torch.ones(1, 40)
        gate_up[0, 5] = gate_up[0, 33] = value
        out = empty(1, 20, torch.float32)
        native.module().silu_mul(native.pool(2), gate_up, as_bytes(out))
        spoilt = {13} if value == float("-inf") else {5, 13}  # silu(-inf) may be 0
        assert {5, 13} >= {index for index in range(20) if not torch.isfinite(out[0, index])} >= spoilt
        narrow = empty(1, 40, torch.bfloat16)
        native.module().rms_norm(native.pool(2), gate_up, torch.ones(40), 1e-5, as_bytes(narrow))
        assert not torch.isfinite(narrow).all()


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128])
def test_norm_and_rotation_of_heads(isa, head_dim, with_norm):
    generator = torch.Generator().manual_seed(head_dim)
    tokens, heads, rotated = 9, 7, 5
    x = torch.randn(tokens, heads, head_dim, generator=generator)
    weights = torch.randn(rotated, head_dim, generator=generator) if with_norm else None
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    angles = torch.rand(50, head_dim // 2, generator=generator) * 6
    cosines, sines = angles.cos(), angles.sin()
    expected = x.double()
    turned = expected[:, :rotated]
    if weights is not None:
        turned = weights.double() * turned / (turned.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    turned = rotate(turned, cosines.double()[positions][:, None], sines.double()[positions][:, None])
    native.module().norm_and_rotate(native.pool(2), x.numpy(), rotated, weights, 1e-6, positions.numpy(), cosines, sines)
    torch.testing.assert_close(x[:, :rotated].double(), turned, rtol=1e-5, atol=2e-6)
    assert torch.equal(x[:, rotated:].double(), expected[:, rotated:])


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 1024), (5, 4099), (40, 1500)])
def test_the_first_of_the_largest(isa, rows, size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-9, 9, (rows, size), generator=generator).float()
    x[0] = -7.0
    if rows > 2:
        x[1, size // 2] = float("nan")
        x[2, -1] = float("-inf")
    places, finite = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=bool)
    native.module().largest(native.pool(2), x.numpy(), places, finite)
    assert finite.tolist() == torch.isfinite(x).all(-1).tolist()
    expected = [int((row == row.max()).nonzero()[0]) for row in x[torch.from_numpy(finite)]]
    assert places[finite].tolist() == expected


def test_draws_are_those_of_torch(isa):
    """Both compute the same noise from the same integers; only where two scores lie within a rounding error may they part."""
    rows, vocab_size = 40, 3001
    keys = stream_keys(np.arange(rows, dtype=np.uint64) * 77, np.zeros(rows, dtype=np.int64), np.arange(rows))
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    logits[:, :2000] = float("-inf")  # banned
    temperatures = torch.linspace(0.3, 2.0, rows)
    scores = logits / temperatures[:, None] + gumbel(keys, torch.arange(vocab_size))
    places = np.empty(rows, dtype=np.int64)
    native.module().draw(native.pool(2), logits.numpy(), temperatures.numpy(), keys, places)
    best = scores.amax(-1)
    assert torch.all(best - scores[torch.arange(rows), torch.from_numpy(places)] < 1e-4)
    assert (torch.from_numpy(places) == scores.argmax(-1)).float().mean() > 0.9
    alone = np.empty(1, dtype=np.int64)
    native.module().draw(native.pool(2), logits[7:8].numpy(), temperatures[7:8].numpy(), keys[7:8], alone)
    assert alone[0] == places[7]
