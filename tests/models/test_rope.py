"""Rotary frequencies of real and random settings against transformers' own, bit by bit; the turn against complex multiplication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvd.executor.models.hf_config import spec_from_config
from kvd.executor.models.rope import inverse_frequencies, rotate, rotation
from kvd.executor.models.spec import fit_length

pytestmark = [pytest.mark.torch, pytest.mark.oracle]

REAL = {
    "llama-3.1-8b": (
        128,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama-3.2-1b": (
        64,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen-2.5-yarn": (
        128,
        32768,
        {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "smollm2": (64, 8192, {"rope_type": "default", "rope_theta": 100000.0}),
    "vicuna-16k": (128, 4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
}


def described(head_dim: int, positions: int, parameters: dict[str, Any]) -> tuple[Any, LlamaConfig]:
    """The same settings as our spec and as transformers' config."""
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=positions,
        rope_parameters=dict(parameters),
    )
    spec = spec_from_config(config.to_dict() | {"architectures": None}, name="m", origin="config.json", eos_token_ids=())
    return spec, config


@pytest.mark.parametrize("name", REAL)
def test_angles_of_real_models_are_those_of_transformers(name: str) -> None:
    spec, config = described(*REAL[name])
    frequencies = inverse_frequencies(spec.rope, spec.head_dim)
    theirs = LlamaRotaryEmbedding(config)
    assert torch.equal(frequencies, theirs.inv_freq)
    positions = torch.tensor([0, 1, 77, 4095, 8191, spec.max_positions - 1])
    for dtype in (torch.float32, torch.bfloat16):
        cosines, sines = rotation(frequencies, positions, spec.rope.attention_factor, dtype)
        expected = theirs(torch.empty(0, dtype=dtype), positions[None])
        assert torch.equal(torch.cat([cosines, cosines], dim=-1)[:, 0], expected[0][0])
        assert torch.equal(torch.cat([sines, sines], dim=-1)[:, 0], expected[1][0])


FACTORS = st.floats(1.0, 64.0)
SCALED = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTORS}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": FACTORS,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
            "original_max_position_embeddings": st.integers(64, 16384),
        }
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": FACTORS, "original_max_position_embeddings": st.integers(256, 65536)},
        optional={
            "beta_fast": st.floats(16.0, 64.0),
            "beta_slow": st.floats(0.5, 2.0),
            "attention_factor": st.floats(0.1, 2.0),
            "truncate": st.booleans(),
            "mscale": st.floats(0.1, 2.0),
            "mscale_all_dim": st.floats(0.1, 2.0),
        },
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("longrope"),
            "short_factor": st.lists(st.floats(1.0, 4.0), min_size=32, max_size=32),
            "long_factor": st.lists(st.floats(1.0, 64.0), min_size=32, max_size=32),
            "original_max_position_embeddings": st.integers(64, 16384),
        },
        optional={"factor": FACTORS, "attention_factor": st.floats(0.5, 2.0)},
    ),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": FACTORS}),
)


@settings(deadline=None)
@given(SCALED, st.floats(1000.0, 1e7), st.integers(1, 65536))
def test_random_scalings_are_those_of_transformers(parameters: dict[str, Any], theta: float, length: int) -> None:
    spec, config = described(64, 65536, {**parameters, "rope_theta": theta})
    spec, length = fit_length(spec, length)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
    torch.testing.assert_close(inverse_frequencies(spec.rope, 64), frequencies, rtol=1e-6, atol=0)
    assert spec.rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_a_turn_is_a_complex_multiplication() -> None:
    torch.manual_seed(0)
    heads, positions = torch.randn(5, 3, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 500, 9000])
    frequencies = torch.rand(8)
    turned = rotate(heads, *rotation(frequencies, positions, 1.0, torch.float64))
    angles = (positions[:, None].float() * frequencies)[:, None, :].double()
    expected = torch.complex(heads[..., :8], heads[..., 8:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], dim=-1), atol=1e-6, rtol=0)


def test_products_of_turned_heads_depend_on_the_distance_alone() -> None:
    spec, _ = described(*REAL["smollm2"])
    frequencies = inverse_frequencies(spec.rope, spec.head_dim)
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 64).double(), torch.randn(1, 1, 64).double()

    def product(query_position: int, key_position: int) -> float:
        turns = [rotation(frequencies, torch.tensor([position]), 1.0, torch.float64) for position in (query_position, key_position)]
        return float((rotate(query, *turns[0]) * rotate(key, *turns[1])).sum())

    assert product(40, 7) == pytest.approx(product(133, 100), abs=1e-3)
    assert product(40, 7) != pytest.approx(product(41, 7), abs=1e-3)
