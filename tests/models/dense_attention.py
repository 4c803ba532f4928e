"""Attention as plain as it gets, for comparing the decoder alone: one sequence, every key kept, SDPA under a mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvd.executor.models.decoder import Decoder
from kvd.executor.models.spec import ModelSpec


class DenseAttention:
    """Keeps the keys and values of one growing sequence, layer by layer."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = self._keys[layer] = torch.cat([self._keys[layer], k]) if layer in self._keys else k.clone()
        values = self._values[layer] = torch.cat([self._values[layer], v]) if layer in self._values else v.clone()
        num_keys = keys.shape[0]
        query_positions = torch.arange(num_keys - q.shape[0], num_keys)[:, None]
        key_positions = torch.arange(num_keys)[None, :]
        visible = key_positions <= query_positions
        window = self._spec.windows[layer]
        if window:
            visible &= key_positions > query_positions - window
        heads = [tensor.transpose(0, 1)[None] for tensor in (q, keys, values)]
        attended = scaled_dot_product_attention(*heads, attn_mask=visible, scale=self._spec.attention_scale, enable_gqa=True)
        return attended[0].transpose(0, 1)


def prompt_logits(decoder: Decoder, prompt: list[int], chunk: int | None = None) -> Tensor:
    """Logits of every position, the prompt given in chunks of ``chunk`` tokens."""
    attend = DenseAttention(decoder.spec)
    rows = []
    for start in range(0, len(prompt), chunk or len(prompt)):
        ids = torch.tensor(prompt[start : start + (chunk or len(prompt))])
        rows.append(decoder.forward(ids, torch.arange(start, start + len(ids)), attend))
    return decoder.logits(torch.cat(rows))


def greedy(decoder: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    """The most likely continuation, token by token over kept keys and values."""
    attend = DenseAttention(decoder.spec)
    hidden = decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), attend)
    output = [int(decoder.logits(hidden[-1:]).argmax())]
    while len(output) < num_tokens:
        position = len(prompt) + len(output) - 1
        hidden = decoder.forward(torch.tensor(output[-1:]), torch.tensor([position]), attend)
        output.append(int(decoder.logits(hidden).argmax()))
    return output
