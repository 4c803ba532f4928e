"""The one decoder: a pre-norm transformer with grouped-query attention, rotary positions and SwiGLU, shaped by a ModelSpec.

Inference only. It computes any mixture of sequences as one flat run of tokens; which of them see each other is the attention's affair
(``Attend``), so that paging, batching and windows live outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvd.executor.models.rope import inverse_frequencies, rotate, rotation
from kvd.executor.models.spec import ModelSpec


class Attend(Protocol):
    """Attention over everything a token may see, in one layer.

    Called once a layer, in order, with the step's rotated queries ``q [T, num_heads, head_dim]``, rotated keys and values
    ``k, v [T, num_kv_heads, head_dim]`` (views that need not be contiguous). It keeps keys and values of *all* T tokens before any of them
    attends, scales by ``spec.attention_scale``, honours ``spec.windows[layer]`` and returns ``[T, num_heads, head_dim]``.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor: ...


class Adapters(Protocol):
    """What low-rank adapters add to the products of a step's tokens."""

    def add(self, layer: int, part: str, inputs: Tensor, outputs: Tensor, /) -> None:
        """Add to ``outputs [T, rows]`` of the product ``part`` (a field of ``LayerWeights``) of ``inputs [T, columns]``, in place."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, fused at load: query, key and value rows in one matrix, gate and up rows in another."""

    attention_norm: Tensor
    """``[hidden]``"""
    qkv: Tensor
    """``[(num_heads + 2 * num_kv_heads) * head_dim, hidden]``: queries, keys, values"""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """``[num_heads + num_kv_heads, head_dim]``: the query norm once a query head, the key norm once a key head"""
    output: Tensor
    """``[hidden, num_heads * head_dim]``"""
    feed_forward_norm: Tensor
    gate_up: Tensor
    """``[2 * intermediate, hidden]``: gate, up"""
    down: Tensor
    """``[hidden, intermediate]``"""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights, in one dtype on one device. A tied ``head`` is the embedding itself."""

    embedding: Tensor
    """``[vocab, hidden]``"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def allocate_weights(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Uninitialised weights of the spec's shapes, for a reader to fill."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, rotated = spec.hidden_size, spec.num_heads + spec.num_kv_heads
    qkv_rows = (rotated + spec.num_kv_heads) * spec.head_dim
    embedding = new(spec.vocab_size, hidden)
    layers = tuple(
        LayerWeights(
            attention_norm=new(hidden),
            qkv=new(qkv_rows, hidden),
            qkv_bias=new(qkv_rows) if spec.qkv_bias else None,
            qk_norm=new(rotated, spec.head_dim) if spec.qk_norm else None,
            output=new(hidden, spec.num_heads * spec.head_dim),
            feed_forward_norm=new(hidden),
            gate_up=new(2 * spec.intermediate_size, hidden),
            down=new(hidden, spec.intermediate_size),
        )
        for _ in range(spec.num_layers)
    )
    return DecoderWeights(embedding, layers, new(hidden), embedding if spec.tied_head else new(spec.vocab_size, hidden))


class Decoder:
    """Token ids and positions in, hidden states and logits out. Holds weights and nothing of any sequence."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.weights = weights
        self._frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(self.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, adapters: Adapters | None = None) -> Tensor:
        """Run every layer over a flat run of tokens.

        ``token_ids`` and ``positions`` are int64 ``[T]`` on the decoder's device, T at least 1; ids lie below ``spec.vocab_size``. Returns
        the residual stream after the last layer, ``[T, hidden]``; ``logits`` applies the final norm to the rows it is given.
        """
        num_tokens = token_ids.shape[0]
        turn = rotation(self._frequencies, positions, self.spec.rope.attention_factor, self.dtype)
        hidden = functional.embedding(token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            inputs = self._norm(hidden, layer.attention_norm)
            heads = functional.linear(inputs, layer.qkv, layer.qkv_bias)
            if adapters is not None:
                adapters.add(index, "qkv", inputs, heads)
            q, k, v = self._split(layer, heads, turn)
            inputs = attend(index, q, k, v).reshape(num_tokens, -1)
            output = functional.linear(inputs, layer.output)
            if adapters is not None:
                adapters.add(index, "output", inputs, output)
            hidden = hidden + output
            inputs = self._norm(hidden, layer.feed_forward_norm)
            gate_up = functional.linear(inputs, layer.gate_up)
            if adapters is not None:
                adapters.add(index, "gate_up", inputs, gate_up)
            gate, up = gate_up.chunk(2, dim=-1)
            inputs = functional.silu(gate) * up
            output = functional.linear(inputs, layer.down)
            if adapters is not None:
                adapters.add(index, "down", inputs, output)
            hidden = hidden + output
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[R, vocab]`` in float32 of the rows ``hidden [R, hidden]`` of what ``forward`` returned."""
        return functional.linear(self._norm(hidden, self.weights.final_norm), self.weights.head).float()

    def _split(self, layer: LayerWeights, products: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        heads = products.view(products.shape[0], -1, spec.head_dim)
        rotated, values = heads.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            rotated = self._norm(rotated, layer.qk_norm)
        queries, keys = rotate(rotated, *turn).split((spec.num_heads, spec.num_kv_heads), dim=1)
        return queries, keys, values

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last dimension, accumulated in float32; scaled after rounding to the dtype."""
        wide = values.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps)
        return weight * wide.to(values.dtype)
