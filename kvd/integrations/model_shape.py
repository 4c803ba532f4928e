"""What a transformers model keeps for each position, by its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvd.integrations.errors import KvdCacheError

_ATTENTION = frozenset({"full_attention", "sliding_attention"})
_ROPES_OF_LENGTH = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Layers, heads of keys and values, and their size: the same in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_kept: int
    """Layers that bring keys and values of their own, the first ones: the others use theirs."""


def shape_of(config: Any) -> ModelShape:
    """Raises ``KvdCacheError`` where the model keeps something that is no key and value per position, or that another prompt could not use."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    num_heads = getattr(text, "num_attention_heads", None)
    if getattr(config, "is_encoder_decoder", False) or not kinds <= _ATTENTION or not num_heads:
        raise KvdCacheError("only decoders whose every layer keeps a key and a value for each position are served")
    if rope.get("rope_type", rope.get("type")) in _ROPES_OF_LENGTH:
        raise KvdCacheError("the model's rotary angles depend on how long a sequence becomes: what one prompt computed is not another's")
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    num_layers = text.num_hidden_layers
    return ModelShape(num_layers, num_kv_heads, head_dim, num_layers - (getattr(text, "num_kv_shared_layers", None) or 0))
