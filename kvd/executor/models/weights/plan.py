"""Where each tensor of a weight file belongs: the names of both formats, the shapes expected, the slices of fused matrices filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvd.executor.models.spec import Architecture, ModelSpec, WeightsError


@dataclass(frozen=True, slots=True)
class Assignment:
    """One tensor of the file and the slice of the decoder's weights that it fills.

    ``shape`` is what the file must have. ``part`` is a field of ``LayerWeights``, or without a ``layer`` of ``DecoderWeights``; the tensor fills
    its rows (elements, of a vector) from ``first_row`` on. A head's norm fills ``num_rows`` rows, each with the same. With ``interleaved`` the rows of
    each head alternate between the two halves (the order of rotary pairs in GGUF's llama) and are put back.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    part: str
    first_row: int
    num_rows: int
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


def assign(spec: ModelSpec) -> list[Assignment]:
    """Every tensor the weight file must hold, in the order of the computation."""
    names = GGUF_NAMES if spec.weights_format == "gguf" else HF_NAMES
    table = (spec.vocab_size, spec.hidden_size)
    plan = [_whole(names.embedding, table, None, "embedding")]
    for layer in range(spec.num_layers):
        plan += _layer(spec, names, names.layer.format(layer), layer)
    plan.append(_whole(names.final_norm, (spec.hidden_size,), None, "final_norm"))
    if not spec.tied_head:
        plan.append(_whole(names.head, table, None, "head"))
    return plan


def _whole(name: str, shape: tuple[int, ...], layer: int | None, part: str) -> Assignment:
    return Assignment(f"{name}.weight", shape, layer, part, 0, shape[0])


def _layer(spec: ModelSpec, names: NameTable, prefix: str, layer: int) -> Iterator[Assignment]:
    hidden, context = spec.hidden_size, spec.num_heads * spec.head_dim
    interleaved = spec.weights_format == "gguf" and spec.architecture is Architecture.LLAMA
    projections = (
        (names.query, 0, spec.num_heads, interleaved),
        (names.key, spec.num_heads, spec.num_kv_heads, interleaved),
        (names.value, spec.num_heads + spec.num_kv_heads, spec.num_kv_heads, False),
    )
    yield _whole(prefix + names.attention_norm, (hidden,), layer, "attention_norm")
    for name, first, heads, turned in projections:
        rows = heads * spec.head_dim
        yield Assignment(f"{prefix}{name}.weight", (rows, hidden), layer, "qkv", first * spec.head_dim, rows, turned)
    if spec.qkv_bias:
        for name, first, heads, _ in projections:
            rows = heads * spec.head_dim
            yield Assignment(f"{prefix}{name}.bias", (rows,), layer, "qkv_bias", first * spec.head_dim, rows)
    if spec.qk_norm:
        for name, (_, first, heads, _) in zip((names.query_norm, names.key_norm), projections, strict=False):
            yield Assignment(f"{prefix}{name}.weight", (spec.head_dim,), layer, "qk_norm", first, heads)
    yield _whole(prefix + names.output, (hidden, context), layer, "output")
    yield _whole(prefix + names.feed_forward_norm, (hidden,), layer, "feed_forward_norm")
    inner = spec.intermediate_size
    for first, name in ((0, names.gate), (inner, names.up)):
        yield Assignment(f"{prefix}{name}.weight", (inner, hidden), layer, "gate_up", first, inner)
    yield _whole(prefix + names.down, (hidden, inner), layer, "down")


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
