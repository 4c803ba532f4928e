"""Reads a GGUF file's metadata into a ModelSpec (format: the GGUF specification of ggml). What the decoder does not compute is refused."""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from kvd.executor.models.gguf_file import GgufFile, open_gguf
from kvd.executor.models.hf_config import reachable_positions, yarn_attention_factor
from kvd.executor.models.spec import (
    SUPPORTED,
    Architecture,
    ModelError,
    ModelSpec,
    RopeSpec,
    RopeType,
    UnsupportedModelError,
    WeightsError,
    check_shape,
)

ROPE_DIVISORS = "rope_freqs.weight"
"""Tensor with one divisor a rotary frequency: Llama 3's scaling, worked out by the converter."""

_ARCHITECTURES = (Architecture.LLAMA, Architecture.QWEN2, Architecture.QWEN3)
"""Mistral has no name of its own here: its files say llama."""

_REFUSED_IF_SET = {
    "expert_count": "mixture of experts",
    "attention.sliding_window": "sliding windows in GGUF files (their layer pattern is not stated); use the Hugging Face directory",
    "attention.max_alibi_bias": "ALiBi",
    "attention.clamp_kqv": "clamped queries, keys and values",
    "attn_logit_softcapping": "capped attention",
    "final_logit_softcapping": "capped logits",
    "logit_scale": "scaled logits",
    "embedding_scale": "scaled embeddings",
    "residual_scale": "scaled residuals",
    "attention.scale": "an attention scale of its own",
    "attention.temperature_scale": "attention temperature",
    "use_parallel_residual": "parallel residuals",
    "rope.scaling.yarn_log_multiplier": "YaRN's logarithmic multiplier",
    "rope.dimension_sections": "multi-axis rope",
}


def inspect_gguf(path: Path) -> ModelSpec:
    """Describe a GGUF file.

    Raises:
        UnsupportedModelError: see ``inspect_model``.
        ModelError: the metadata is incomplete or damaged.
    """
    file = open_gguf(path)
    metadata = _Metadata(file)
    architecture = _architecture(metadata)
    _refuse_features(metadata)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError(f"{path}: tensor token_embd.weight is missing or not a matrix")
    num_layers, hidden_size = metadata.own_integer("block_count"), metadata.own_size("embedding_length")
    if not 0 < num_layers <= len(file.tensors):  # before anything is made for each layer
        raise ModelError(f"{path}: num_layers is {num_layers}, but the file has {len(file.tensors)} tensors")
    num_heads, positions = metadata.own_size("attention.head_count"), metadata.own_size("context_length")
    head_dim = metadata.own_size("attention.key_length", default=hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.own_integer(key, default=head_dim) != head_dim:
            raise UnsupportedModelError(f"{path}: {key} differs from the head dimension {head_dim}, which is not supported")
    rope = _rope(metadata, positions, _divisors(file))
    storage = Counter[str]()
    for tensor in file.tensors.values():
        storage[tensor.storage] += math.prod(tensor.shape)
    spec = ModelSpec(
        architecture=architecture,
        name=str(metadata.get("general.name") or path.stem),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=metadata.own_size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=metadata.own_size("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_positions=reachable_positions(rope, positions),
        rms_norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        windows=(0,) * num_layers,
        qkv_bias=architecture is Architecture.QWEN2,
        qk_norm=architecture is Architecture.QWEN3,
        tied_head="output.weight" not in file.tensors,
        eos_token_ids=_eos_ids(metadata),
        weights_format="gguf",
        weights_dtype=_weights_dtype(storage),
        quantisation="+".join(name for name, _ in storage.most_common() if name.startswith("Q")),
    )
    return check_shape(spec, str(path))


class _Metadata:
    """Typed access to the file's key-value pairs; ``own`` keys stand under the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.origin = file.origin
        self.get = file.metadata.get
        self.architecture = str(self.get("general.architecture"))

    def own(self, key: str) -> Any:
        return self.get(f"{self.architecture}.{key}")

    def integer(self, key: str, *, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self.origin}: {key} differs by layer, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.origin}: metadata {key} must be an integer, is {value!r}")
        return value

    def own_integer(self, key: str, *, default: int | None = None) -> int:
        return self.integer(f"{self.architecture}.{key}", default=default)

    def own_size(self, key: str, *, default: int | None = None) -> int:
        value = self.own_integer(key, default=default)
        if value <= 0:
            raise ModelError(f"{self.origin}: metadata {self.architecture}.{key} is {value}, must be positive")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.own(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.origin}: metadata {self.architecture}.{key} must be a number, is {value!r}")
        return float(value)


def _architecture(metadata: _Metadata) -> Architecture:
    if metadata.architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(f"{metadata.origin}: architecture {metadata.architecture!r} is not supported; supported: {SUPPORTED}")
    return Architecture(metadata.architecture)


def _refuse_features(metadata: _Metadata) -> None:
    for key, feature in _REFUSED_IF_SET.items():
        if metadata.own(key):
            raise UnsupportedModelError(
                f"{metadata.origin}: {metadata.architecture}.{key} ({feature}) is not supported; supported: {SUPPORTED}, without it"
            )
    if metadata.own("attention.causal") is False:
        raise UnsupportedModelError(f"{metadata.origin}: attention that is not causal is not supported")


def _rope(metadata: _Metadata, positions: int, divisors: tuple[float, ...]) -> RopeSpec:
    theta = metadata.number("rope.freq_base", default=10_000.0)
    if not theta > 1:
        raise ModelError(f"{metadata.origin}: metadata {metadata.architecture}.rope.freq_base is {theta}, must be more than 1")
    # Files that state a factor and no type mean linear scaling; the oldest keep the factor under another key.
    kind = metadata.own("rope.scaling.type") or "linear"
    factor = metadata.number("rope.scaling.factor", default=0.0) or metadata.number("rope.scale_linear", default=0.0) or 1.0
    attention = metadata.number("rope.scaling.attn_factor", default=1.0)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.origin}: rope scaling {kind!r} is not supported in GGUF files; supported: none, linear, yarn"
        )
    if not factor >= 1:
        raise ModelError(f"{metadata.origin}: rope scaling factor {factor} must be at least 1")
    plain = kind == "none" or (kind == "linear" and factor == 1)
    if divisors:
        if not plain:
            raise UnsupportedModelError(f"{metadata.origin}: tensor {ROPE_DIVISORS} together with rope scaling {kind!r} is not supported")
        return RopeSpec(type=RopeType.DIVISORS, theta=theta, divisors=divisors, attention_factor=attention)
    if plain:
        return RopeSpec(theta=theta, attention_factor=attention)
    if kind == "linear":
        return RopeSpec(type=RopeType.LINEAR, theta=theta, factor=factor, attention_factor=attention)
    if metadata.number("rope.scaling.yarn_ext_factor", default=1.0) != 1:
        raise UnsupportedModelError(f"{metadata.origin}: a YaRN extrapolation factor other than 1 is not supported")
    attention *= metadata.number("rope.scaling.yarn_attn_factor", default=1.0) * yarn_attention_factor(factor)
    return RopeSpec(
        type=RopeType.YARN,
        theta=theta,
        factor=factor,
        original_max_positions=metadata.own_size("rope.scaling.original_context_length", default=positions),
        attention_factor=attention,
        beta_fast=metadata.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=metadata.number("rope.scaling.yarn_beta_slow", default=1.0),
    )


def _divisors(file: GgufFile) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return ()
    if tensor.storage != "F32":
        raise UnsupportedModelError(f"{file.origin}: tensor {ROPE_DIVISORS} is stored as {tensor.storage}; supported: F32")
    return struct.unpack_from(f"<{math.prod(tensor.shape)}f", file.map, tensor.offset_bytes)


def _eos_ids(metadata: _Metadata) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(value for value in found if isinstance(value, int)))


def _weights_dtype(storage: Counter[str]) -> str:
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return plain.get(storage.most_common(1)[0][0], "bfloat16")
