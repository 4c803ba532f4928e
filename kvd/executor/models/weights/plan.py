"""Where each tensor of a weight file belongs: the names of both formats, the shapes expected, the slices of fused matrices filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvd.executor.models.decoder import DecoderWeights, LayerWeights
from kvd.executor.models.spec import Architecture, ModelSpec, WeightsError


@dataclass(frozen=True, slots=True)
class Assignment:
    """One tensor of the file and the slice that it fills.

    ``shape`` is what the file must have. A vector fills its target by broadcast. With ``interleaved`` the rows of each head alternate
    between the two halves (the order of rotary pairs in GGUF's llama) and are put back.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class NameTable:
    """A format's names of the parts."""

    embedding: str
    final_norm: str
    head: str
    layer: str
    attention_norm: str
    query: str
    key: str
    value: str
    query_norm: str
    key_norm: str
    output: str
    feed_forward_norm: str
    gate: str
    up: str
    down: str


HF_NAMES = NameTable(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    output="self_attn.o_proj",
    feed_forward_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

GGUF_NAMES = NameTable(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    output="attn_output",
    feed_forward_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


def assign(spec: ModelSpec, weights: DecoderWeights) -> list[Assignment]:
    """Every tensor the weight file must hold, in the order of the computation."""
    names = GGUF_NAMES if spec.weights_format == "gguf" else HF_NAMES
    plan = [_matrix(names.embedding, weights.embedding)]
    for index, layer in enumerate(weights.layers):
        plan += _layer(spec, names, names.layer.format(index), layer)
    plan.append(_matrix(names.final_norm, weights.final_norm))
    if not spec.tied_head:
        plan.append(_matrix(names.head, weights.head))
    return plan


def _matrix(name: str, target: Tensor, *, interleaved: bool = False) -> Assignment:
    return Assignment(f"{name}.weight", tuple(target.shape), target, interleaved)


def _layer(spec: ModelSpec, names: NameTable, prefix: str, layer: LayerWeights) -> Iterator[Assignment]:
    interleaved = spec.weights_format == "gguf" and spec.architecture is Architecture.LLAMA
    sizes = tuple(heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
    parts = (names.query, names.key, names.value)
    yield _matrix(prefix + names.attention_norm, layer.attention_norm)
    for part, rows in zip(parts, layer.qkv.split(sizes), strict=True):
        yield _matrix(prefix + part, rows, interleaved=interleaved and part != names.value)
    if layer.qkv_bias is not None:
        for part, rows in zip(parts, layer.qkv_bias.split(sizes), strict=True):
            yield Assignment(f"{prefix}{part}.bias", tuple(rows.shape), rows)
    if layer.qk_norm is not None:
        heads = layer.qk_norm.split((spec.num_heads, spec.num_kv_heads))
        for part, rows in zip((names.query_norm, names.key_norm), heads, strict=True):
            yield Assignment(f"{prefix}{part}.weight", (spec.head_dim,), rows)
    yield _matrix(prefix + names.output, layer.output)
    yield _matrix(prefix + names.feed_forward_norm, layer.feed_forward_norm)
    for part, rows in zip((names.gate, names.up), layer.gate_up.split(spec.intermediate_size), strict=True):
        yield _matrix(prefix + part, rows)
    yield _matrix(prefix + names.down, layer.down)


def check_names(plan: list[Assignment], shapes: Mapping[str, tuple[int, ...]], ignored: frozenset[str], origin: str) -> None:
    """Compare the file's tensors with the plan before any is read.

    Raises:
        WeightsError: a tensor is missing, unexpected or of another shape; the message names it.
    """
    for item in plan:
        if item.name not in shapes:
            raise WeightsError(f"{origin}: tensor {item.name} is missing")
        if shapes[item.name] != item.shape:
            raise WeightsError(f"{origin}: tensor {item.name} has shape {list(shapes[item.name])}, expected {list(item.shape)}")
    unexpected = sorted(shapes.keys() - {item.name for item in plan} - ignored)
    if unexpected:
        more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
        raise WeightsError(f"{origin}: tensor {unexpected[0]}{more} is unexpected: the model description does not account for it")
