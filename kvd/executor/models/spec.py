"""What a model is, as plain data read from its description alone; nothing here needs torch or reads weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

DEFAULT_MAX_MODEL_LEN = 8192
"""Positions of a sequence where the configuration names none and the model has more."""


class ModelError(Exception):
    """The model cannot be served as it is on disk; the message names the file and what is wrong with it."""


class UnsupportedModelError(ModelError):
    """An architecture or a feature that the decoder does not compute; the message lists what it does."""


class WeightsError(ModelError):
    """Weights that do not fit their description: a tensor is missing, unexpected, of a wrong shape or cut short."""


class Architecture(StrEnum):
    """The families that the decoder computes."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


SUPPORTED = "Llama 2 and 3.x, SmolLM2 (llama), Mistral (mistral), Qwen2 and Qwen2.5 (qwen2), Qwen3 (qwen3)"


class RopeType(StrEnum):
    """How rotary frequencies are scaled. ``DIVISORS`` is Llama 3's scaling as GGUF files carry it: one divisor a frequency."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    DYNAMIC = "dynamic"
    LONGROPE = "longrope"
    DIVISORS = "divisors"


LENGTH_DEPENDENT_ROPES = frozenset({RopeType.DYNAMIC, RopeType.LONGROPE})
"""Their angles depend on the sequence's final length, so that they are fixed at ``max_model_len`` before anything is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding over the whole head (rope.py turns it into frequencies).

    ``attention_factor`` multiplies cosines and sines (YaRN, LongRoPE). ``fixed_length_tokens`` is set, by ``fit_length``, for the
    length-dependent types alone.
    """

    type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0
    attention_factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()
    fixed_length_tokens: int = 0

    @property
    def depends_on_length(self) -> bool:
        return self.type in LENGTH_DEPENDENT_ROPES


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that shapes the decoder's computation, and what the daemon shows of the model.

    ``windows`` has one entry a layer: the number of positions a query sees, its own included; 0 means all before it.
    """

    architecture: Architecture
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]
    qkv_bias: bool
    qk_norm: bool
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    weights_format: str
    """``safetensors`` or ``gguf``."""
    weights_dtype: str
    """Torch's name of the dtype that most weights are stored in (``float32``, ``float16``, ``bfloat16``); quantised weights count as ``bfloat16``."""
    quantisation: str = ""
    """Storage types of quantised weights, e.g. ``Q4_1+Q8_0``; empty for plain floats."""

    @property
    def attention_scale(self) -> float:
        """What query-key products are multiplied by before the softmax."""
        return float(self.head_dim**-0.5)


def fit_length(spec: ModelSpec, max_model_len: int) -> tuple[ModelSpec, int]:
    """Settle the positions a sequence may have, and fix a length-dependent rope at them.

    ``max_model_len`` 0 means the model's own, at most ``DEFAULT_MAX_MODEL_LEN``. Returns the spec to load and the settled length.

    Raises:
        ModelError: more positions than the model has.
    """
    if max_model_len < 0 or max_model_len > spec.max_positions:
        raise ModelError(f"max_model_len {max_model_len}: model {spec.name} has {spec.max_positions} positions")
    length = max_model_len or min(spec.max_positions, DEFAULT_MAX_MODEL_LEN)
    if not spec.rope.depends_on_length:
        return spec, length
    return replace(spec, rope=replace(spec.rope, fixed_length_tokens=length)), length


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model.

    Raises:
        ModelError: unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def check_shape(spec: ModelSpec, origin: str) -> ModelSpec:
    """The spec itself, if its numbers are those of a decoder.

    Raises:
        ModelError: a size is not positive or the sizes do not fit each other; ``origin`` names the file.
    """
    for name in (
        "num_layers",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "max_positions",
        "rms_norm_eps",
    ):
        if not getattr(spec, name) > 0:
            raise ModelError(f"{origin}: {name} is {getattr(spec, name)!r}, must be positive")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{origin}: {spec.num_heads} attention heads are not a multiple of {spec.num_kv_heads} key-value heads")
    if spec.head_dim % 2:
        raise ModelError(f"{origin}: head_dim {spec.head_dim} is odd; rotary embedding needs pairs")
    rope = spec.rope
    for label, values in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors), ("rope_freqs", rope.divisors)):
        if values and len(values) != spec.head_dim // 2:
            raise ModelError(f"{origin}: rope {label} has {len(values)} entries, head_dim {spec.head_dim} needs {spec.head_dim // 2}")
    return spec
