"""Noise is a fixed function of (seed, choice, position, token id): checked against plain integers and against its distribution."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import math  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvd.executor.sampling.noise import gumbel, stream_keys  # noqa: E402

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(bits):
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
    return bits ^ bits >> 31


def plain_key(seed, choice, position):
    state = mix((seed + GAMMA) & MASK) ^ choice
    state = mix((state + GAMMA) & MASK) ^ position
    return mix((state + GAMMA) & MASK)


def plain_gumbel(key, token_id):
    bits = mix((key + (token_id + 1) * GAMMA) & MASK) >> 32
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24)))


CASES = [(0, 0, 0), (1, 0, 7), (2**64 - 1, 15, 8191), (2**63, 3, 1), (0xDEADBEEF, 1, 123456)]


def keys_of(cases):
    seeds, choices, positions = zip(*cases, strict=True)
    return stream_keys(np.array(seeds, dtype=np.uint64), np.array(choices), np.array(positions))


def test_mixing_is_splitmix64():
    # the first outputs of the generator's published reference implementation for state 0
    assert [mix((GAMMA * n) & MASK) for n in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_noise_equals_plain_integers():
    keys = keys_of(CASES)
    assert keys.tolist() == [plain_key(*case) for case in CASES]
    ids = torch.tensor([0, 1, 2, 255, 49151, 151935, 2**31])
    expected = torch.tensor([[plain_gumbel(key, token_id) for token_id in ids.tolist()] for key in keys.tolist()])
    torch.testing.assert_close(gumbel(keys, ids), expected, rtol=1e-5, atol=1e-5)


def test_gathered_ids_get_the_noise_of_the_whole_vocabulary():
    keys = keys_of(CASES)
    everything = gumbel(keys, torch.arange(5000))
    ids = torch.randint(0, 5000, (len(CASES), 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(keys, ids), everything.gather(1, ids))
    assert torch.equal(gumbel(keys[2:3], torch.arange(5000)), everything[2:3])


@pytest.mark.parametrize("varied", ["seed", "choice", "position", "token"])
def test_noise_is_gumbel_distributed_along_every_argument(varied):
    count = 200_000
    ramp, zeros = np.arange(count), np.zeros(count, dtype=np.int64)
    parts = {"seed": zeros, "choice": zeros, "position": zeros, "token": zeros} | {varied: ramp}
    keys = stream_keys(parts["seed"].astype(np.uint64), parts["choice"], parts["position"])
    noise = gumbel(keys[:1], torch.from_numpy(ramp))[0] if varied == "token" else gumbel(keys, torch.zeros(1, dtype=torch.int64))[:, 0]
    # the distribution function is uniform on its own values
    uniform = torch.exp(-torch.exp(-noise.double()))
    observed = torch.histc(uniform, bins=100, min=0.0, max=1.0)
    chi_square = float(((observed - count / 100) ** 2 / (count / 100)).sum())
    assert chi_square < 160  # 99 degrees of freedom: passed by chance all but once in ten thousand
    assert abs(float(torch.corrcoef(torch.stack([uniform[:-1], uniform[1:]]))[0, 1])) < 0.01
    assert torch.isfinite(noise).all()
