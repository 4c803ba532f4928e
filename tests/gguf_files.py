"""Writes tiny GGUF files with the ``gguf`` package, in every storage type that is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, quantize

# For the types that the package cannot quantise to: bytes of a block, and its float16 factors by where they lie, such that random
# bits elsewhere give values around zero of about 1/16.
_K_BLOCKS = {"Q4_K": (144, {0: 2.4e-4, 2: 18e-4}), "Q5_K": (176, {0: 1.2e-4, 2: 18.6e-4}), "Q6_K": (210, {208: 0.46e-4})}
_K_VALUES = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a tiny model; rows hold whole K-quant blocks."""

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 256
    feed_forward: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 96
    tied: bool = False


def random_quantised(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Stored bytes of a random matrix whose values are about 1/sqrt(columns)."""
    if kind not in _K_BLOCKS:
        values = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        return quantize(values, GGMLQuantizationType[kind])
    block_bytes, factors = _K_BLOCKS[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // _K_VALUES, block_bytes), dtype=np.uint8)
    for offset, factor in factors.items():
        blocks[..., offset : offset + 2] = (rng.uniform(0.8, 1.2, (*blocks.shape[:-1], 1)) * factor).astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    shape: Shape,
    kind: str,
    *,
    kinds: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    divisors: list[float] | None = None,
) -> Path:
    """A model with random weights: matrices stored as ``kind``, vectors as F32.

    ``kinds`` says otherwise for parts of names; ``metadata`` adds or replaces own keys of the architecture.
    """
    rng = np.random.default_rng(7)
    writer = GGUFWriter(path, shape.architecture)
    writer.add_name("tiny")
    pairs = {
        "block_count": shape.layers,
        "context_length": 512,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.feed_forward,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": shape.vocab,
        **(metadata or {}),
    }
    for key, value in pairs.items():
        _add(writer, key if key.startswith(("split.", "general.")) else f"{shape.architecture}.{key}", value)
    _add_vocabulary(writer, shape.vocab)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    for name, size in _matrices(shape):
        stored = next((other for part, other in (kinds or {}).items() if part in name), kind)
        writer.add_tensor(name, random_quantised(size, stored, rng), raw_dtype=GGMLQuantizationType[stored])
    for name, size in _vectors(shape):
        centre = 0.0 if name.endswith("bias") else 1.0
        writer.add_tensor(name, (centre + 0.2 * rng.standard_normal(size)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def yarn_metadata(factor: float, original: int) -> dict[str, Any]:
    return {
        "rope.scaling.type": RopeScalingType.YARN.value,
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _add_vocabulary(writer: GGUFWriter, vocab: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{token}" for token in range(vocab)])
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)


def _matrices(shape: Shape) -> list[tuple[str, tuple[int, int]]]:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    names = [("token_embd.weight", (shape.vocab, shape.hidden))]
    if not shape.tied:
        names.append(("output.weight", (shape.vocab, shape.hidden)))
    for layer in range(shape.layers):
        names += [
            (f"blk.{layer}.attn_q.weight", (query, shape.hidden)),
            (f"blk.{layer}.attn_k.weight", (key, shape.hidden)),
            (f"blk.{layer}.attn_v.weight", (key, shape.hidden)),
            (f"blk.{layer}.attn_output.weight", (shape.hidden, query)),
            (f"blk.{layer}.ffn_gate.weight", (shape.feed_forward, shape.hidden)),
            (f"blk.{layer}.ffn_up.weight", (shape.feed_forward, shape.hidden)),
            (f"blk.{layer}.ffn_down.weight", (shape.hidden, shape.feed_forward)),
        ]
    return names


def _vectors(shape: Shape) -> list[tuple[str, int]]:
    names = [("output_norm.weight", shape.hidden)]
    for layer in range(shape.layers):
        names += [(f"blk.{layer}.attn_norm.weight", shape.hidden), (f"blk.{layer}.ffn_norm.weight", shape.hidden)]
        if shape.architecture == "qwen2":
            sizes = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
            names += [(f"blk.{layer}.attn_{part}.bias", heads * shape.head_dim) for part, heads in sizes.items()]
        if shape.architecture == "qwen3":
            names += [(f"blk.{layer}.attn_{part}_norm.weight", shape.head_dim) for part in "qk"]
    return names
