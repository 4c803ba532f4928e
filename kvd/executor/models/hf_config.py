"""Reads a Hugging Face directory's ``config.json`` into a ModelSpec. What the decoder does not compute is refused, never ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd.executor.models.spec import (
    SUPPORTED,
    Architecture,
    ModelError,
    ModelSpec,
    RopeSpec,
    RopeType,
    UnsupportedModelError,
    check_shape,
    read_json,
)
from kvd.executor.models.weight_files import weight_files

_CLASSES = {
    Architecture.LLAMA: "LlamaForCausalLM",
    Architecture.MISTRAL: "MistralForCausalLM",
    Architecture.QWEN2: "Qwen2ForCausalLM",
    Architecture.QWEN3: "Qwen3ForCausalLM",
}

_REFUSED_IF_SET = {
    "attention_bias": "a bias on the attention's output projection",
    "mlp_bias": "biases in the feed-forward layers",
    "quantization_config": "weights quantised by other means than GGUF",
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "dual_chunk_attention_config": "dual chunk attention",
    "use_mrope": "multi-axis rope",
    "final_logit_softcapping": "capped logits",
    "attn_logit_softcapping": "capped attention",
}

_MAX_FACTOR = 1_000_000
_MAX_LAYERS = 4096
"""Many times what any model has. The weights, which tell how many there are, are not read here."""
_TOKEN_IDS = range(-1, 2**31)
"""-1: files that have no such token."""

_ROPE_KEYS = {
    RopeType.DEFAULT: frozenset[str](),
    RopeType.LINEAR: frozenset({"factor"}),
    RopeType.LLAMA3: frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    RopeType.YARN: frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    RopeType.DYNAMIC: frozenset({"factor"}),
    RopeType.LONGROPE: frozenset({"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}),
}


def inspect_directory(path: Path) -> ModelSpec:
    """Describe a Hugging Face directory.

    Raises:
        UnsupportedModelError: see ``inspect_model``.
        ModelError: config.json is missing or damaged, or there are no weights.
    """
    origin = path / "config.json"
    if not origin.exists():
        files = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
        hint = (
            f"name one of its GGUF files: {files}"
            if files
            else "a model is a GGUF file or a Hugging Face directory with safetensors weights"
        )
        raise ModelError(f"{path}: no config.json; {hint}")
    config = read_json(origin)
    generation = path / "generation_config.json"
    eos = _eos_ids(config, origin) + (_eos_ids(read_json(generation), generation) if generation.exists() else ())
    weight_files(path)
    return spec_from_config(config, name=path.resolve().name, origin=str(origin), eos_token_ids=tuple(dict.fromkeys(eos)))


def spec_from_config(config: Mapping[str, Any], *, name: str, origin: str, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    """Turn the contents of config.json into a spec; ``origin`` names the file in messages.

    Raises:
        UnsupportedModelError: an architecture or a feature that is not supported.
        ModelError: a key is missing or has a wrong type.
    """
    architecture = _architecture(config, origin)
    _refuse_features(config, origin)
    hidden_size = _integer(config, "hidden_size", origin)
    num_heads = _integer(config, "num_attention_heads", origin)
    num_layers = _integer(config, "num_hidden_layers", origin)
    if num_layers > _MAX_LAYERS:  # before anything is made for each layer
        raise ModelError(f"{origin}: num_hidden_layers is {num_layers}, must be at most {_MAX_LAYERS}")
    positions = _integer(config, "max_position_embeddings", origin)
    head_dim = _head_dim(config, architecture, hidden_size, num_heads, origin)
    rope = _rope(config, positions, origin)
    spec = ModelSpec(
        architecture=architecture,
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size", origin),
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", origin, default=num_heads),
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size", origin),
        max_positions=reachable_positions(rope, positions),
        rms_norm_eps=_number(config, "rms_norm_eps", origin, default=1e-6),
        rope=rope,
        windows=_windows(config, architecture, num_layers, origin),
        qkv_bias=architecture is Architecture.QWEN2,
        qk_norm=architecture is Architecture.QWEN3,
        tied_head=config.get("tie_word_embeddings") is True,
        eos_token_ids=eos_token_ids,
        weights_format="safetensors",
        weights_dtype=_weights_dtype(config),
    )
    return check_shape(spec, origin)


def reachable_positions(rope: RopeSpec, stated: int) -> int:
    """Positions that the scaled rope reaches: files state the length before scaling for some types and the one after it for others."""
    match rope.type:
        case RopeType.LINEAR | RopeType.DYNAMIC:
            return int(stated * rope.factor)
        case RopeType.YARN:
            return max(stated, int(rope.original_max_positions * rope.factor))
        case _:
            return stated


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _architecture(config: Mapping[str, Any], origin: str) -> Architecture:
    model_type = config.get("model_type")
    classes = config.get("architectures")
    architecture = next((known for known in Architecture if known.value == model_type), None)
    if architecture is not None and (not classes or classes == [_CLASSES[architecture]]):
        return architecture
    shown = f"{model_type!r} ({', '.join(map(str, classes))})" if isinstance(classes, list) else repr(model_type)
    raise UnsupportedModelError(f"{origin}: architecture {shown} is not supported; supported: {SUPPORTED}")


def _refuse_features(config: Mapping[str, Any], origin: str) -> None:
    for key, feature in _REFUSED_IF_SET.items():
        if config.get(key):
            raise UnsupportedModelError(f"{origin}: {key} ({feature}) is not supported; supported: {SUPPORTED}, without it")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{origin}: hidden_act {activation!r} is not supported; supported: silu")


def _head_dim(config: Mapping[str, Any], architecture: Architecture, hidden_size: int, num_heads: int, origin: str) -> int:
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim", origin)
    if architecture is Architecture.QWEN3:
        return 128
    if num_heads <= 0 or hidden_size % num_heads:
        raise ModelError(
            f"{origin}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, and head_dim is not given"
        )
    return hidden_size // num_heads


def _windows(config: Mapping[str, Any], architecture: Architecture, num_layers: int, origin: str) -> tuple[int, ...]:
    window = _integer(config, "sliding_window", origin, default=0)
    qwen = architecture in (Architecture.QWEN2, Architecture.QWEN3)
    if qwen and not config.get("use_sliding_window", False):
        window = 0
    if window and architecture is Architecture.LLAMA:
        raise UnsupportedModelError(f"{origin}: sliding_window is not supported for llama; supported with it: mistral, qwen2, qwen3")
    if architecture is Architecture.MISTRAL and "sliding_window" not in config:
        window = 4096
    types = config.get("layer_types")
    if types is None:
        first = _integer(config, "max_window_layers", origin, default=28) if qwen else 0
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"{origin}: layer_types must name a type for each of the {num_layers} layers")
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"{origin}: layer type {unknown[0]!r} is not supported; supported: full_attention, sliding_attention")
    if "sliding_attention" in types and not window:
        raise ModelError(f"{origin}: layer_types has sliding_attention, but no sliding_window is in use")
    if window and not qwen and "full_attention" in types:
        raise UnsupportedModelError(f"{origin}: mixed layer_types are not supported for {architecture}; supported: qwen2, qwen3")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _rope(config: Mapping[str, Any], positions: int, origin: str) -> RopeSpec:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{origin}: rope_parameters must be an object")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError(f"{origin}: rope_parameters that differ by layer type are not supported")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"{origin}: partial_rotary_factor {partial} is not supported; supported: 1")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    known = ", ".join(sorted(_ROPE_KEYS))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise UnsupportedModelError(f"{origin}: rope type {kind!r} is not supported; supported: {known}")
    rope_type = RopeType(kind)
    allowed = _ROPE_KEYS[rope_type] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = sorted(key for key in parameters if key not in allowed)
    if unknown:
        raise UnsupportedModelError(f"{origin}: rope parameter {unknown[0]!r} is not supported for rope type {kind!r}")
    theta = _number(parameters, "rope_theta", origin, default=_number(config, "rope_theta", origin, default=10_000.0))
    if not theta > 1:
        raise ModelError(f"{origin}: rope_theta is {theta}, must be more than 1")
    return _scaled_rope(rope_type, theta, {**parameters, **_outer_original(config, rope_type)}, positions, origin)


def _outer_original(config: Mapping[str, Any], rope_type: RopeType) -> dict[str, Any]:
    """Some files keep the original length outside the rope's own object; then it has priority there as well as here."""
    key = "original_max_position_embeddings"
    return {key: config[key]} if config.get(key) is not None and key in _ROPE_KEYS[rope_type] else {}


def _scaled_rope(rope_type: RopeType, theta: float, parameters: Mapping[str, Any], positions: int, origin: str) -> RopeSpec:
    if rope_type is RopeType.DEFAULT:
        return RopeSpec(theta=theta)
    original = _integer(parameters, "original_max_position_embeddings", origin, default=positions)
    if original <= 0:
        raise ModelError(f"{origin}: original_max_position_embeddings must be positive")
    by_ratio = positions / original if rope_type in (RopeType.YARN, RopeType.LONGROPE) else None
    factor = _number(parameters, "factor", origin, default=by_ratio)
    if not 1 <= factor <= _MAX_FACTOR:
        raise ModelError(f"{origin}: rope factor {factor} must be at least 1 and at most {_MAX_FACTOR}")
    match rope_type:
        case RopeType.LLAMA3:
            low, high = _number(parameters, "low_freq_factor", origin), _number(parameters, "high_freq_factor", origin)
            if not 0 < low < high:
                raise ModelError(f"{origin}: rope needs 0 < low_freq_factor < high_freq_factor, has {low} and {high}")
            return RopeSpec(
                type=rope_type, theta=theta, factor=factor, original_max_positions=original, low_freq_factor=low, high_freq_factor=high
            )
        case RopeType.YARN:
            return _yarn(theta, factor, original, parameters, origin)
        case RopeType.LONGROPE:
            scaled = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return RopeSpec(
                type=rope_type,
                theta=theta,
                factor=factor,
                original_max_positions=original,
                attention_factor=_number(parameters, "attention_factor", origin, default=scaled),
                short_factors=_numbers(parameters, "short_factor", origin),
                long_factors=_numbers(parameters, "long_factor", origin),
            )
        case RopeType.DYNAMIC:
            return RopeSpec(type=rope_type, theta=theta, factor=factor, original_max_positions=positions)
        case _:
            return RopeSpec(type=rope_type, theta=theta, factor=factor)


def _yarn(theta: float, factor: float, original: int, parameters: Mapping[str, Any], origin: str) -> RopeSpec:
    mscale, mscale_all = (_number(parameters, key, origin, default=0.0) for key in ("mscale", "mscale_all_dim"))
    inferred = (
        yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all)
        if mscale and mscale_all
        else yarn_attention_factor(factor)
    )
    return RopeSpec(
        type=RopeType.YARN,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        attention_factor=_number(parameters, "attention_factor", origin, default=inferred),
        beta_fast=_number(parameters, "beta_fast", origin, default=32.0) or 32.0,
        beta_slow=_number(parameters, "beta_slow", origin, default=1.0) or 1.0,
        truncate=parameters.get("truncate", True) is not False,
    )


def _eos_ids(config: Mapping[str, Any], origin: Path) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item in _TOKEN_IDS for item in values):
        raise ModelError(f"{origin}: eos_token_id must be the id of a token or a list of ids, is {value!r}")
    return tuple(item for item in values if item >= 0)


def _weights_dtype(config: Mapping[str, Any]) -> str:
    stated = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return stated if stated in ("float32", "float16", "bfloat16") else "float32"


def _integer(config: Mapping[str, Any], key: str, origin: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{origin}: {key} must be an integer, is {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, origin: str, *, default: float | None = None) -> float:
    value = config.get(key)
    if value is None and default is not None:
        return default
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ModelError(f"{origin}: {key} must be a number, is {value!r}")
    return number


def _numbers(config: Mapping[str, Any], key: str, origin: str) -> tuple[float, ...]:
    value = config.get(key)
    if not isinstance(value, list) or not value:
        raise ModelError(f"{origin}: rope {key} must be a list of numbers")
    return tuple(_number({key: item}, key, origin) for item in value)
