"""Rotary position embedding (Su et al. 2021) and its scaled forms, for heads whose halves are the pairs' two coordinates.

Frequencies are computed in float32 with the formulas of each method's reference implementation, so that the angles agree with it bit by bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvd.executor.models.spec import ModelError, RopeSpec, RopeType


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians a position for each pair of coordinates: float32 ``[head_dim / 2]`` on the CPU.

    Linear: kaiokendev 2023. Llama 3: Llama 3.1's smoothed bands. YaRN: Peng et al. 2023. Dynamic NTK: bloc97 and emozilla 2023,
    LongRoPE: Ding et al. 2024, both fixed at ``rope.fixed_length_tokens``.

    Raises:
        ModelError: the rope depends on the sequence's length and ``fit_length`` has not fixed it.
    """
    if rope.depends_on_length and rope.fixed_length_tokens <= 0:
        raise ModelError(f"rope type {rope.type} depends on the sequence's length: fix it at max_model_len first")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    match rope.type:
        case RopeType.DEFAULT:
            return 1.0 / rope.theta**exponents
        case RopeType.LINEAR:
            return 1.0 / rope.theta**exponents / rope.factor
        case RopeType.LLAMA3:
            return _llama3(1.0 / rope.theta**exponents, rope)
        case RopeType.DIVISORS:
            return 1.0 / rope.theta**exponents / torch.tensor(rope.divisors, dtype=torch.float32)
        case RopeType.YARN:
            return _yarn(rope.theta**exponents, rope, head_dim)
        case RopeType.DYNAMIC:
            length = max(rope.fixed_length_tokens, rope.original_max_positions)
            stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
            return 1.0 / (rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents
        case RopeType.LONGROPE:
            factors = rope.long_factors if rope.fixed_length_tokens > rope.original_max_positions else rope.short_factors
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = rope.original_max_positions / rope.low_freq_factor, rope.original_max_positions / rope.high_freq_factor
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, scaled)


def _yarn(periods: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - extrapolated) + 1.0 / periods * extrapolated


def rotation(frequencies: Tensor, positions: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``positions [T]``, each ``[T, 1, head_dim / 2]`` in ``dtype``; the angles are float32."""
    angles = (positions.to(torch.float32)[:, None] * frequencies)[:, None, :]
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn every head of ``heads [T, H, D]`` by its position's angles."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
