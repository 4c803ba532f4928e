"""What ``generate`` is asked for, as transformers itself will understand it, and which of that a pool may serve.

Keys and values in the pool are found by tokens alone. So they may depend on the model, its tokens and their places and on nothing else: what is not known to leave them
alone is refused by name, be it new in transformers or a model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from kvd.integrations.errors import KvdCacheError

_ARGUMENTS = frozenset(
    {
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "assistant_model",
        "streamer",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
    }
)
"""Of ``generate`` itself: they choose among tokens, or run models with caches of their own."""
_HARMLESS = frozenset(
    {"tokenizer", "assistant_tokenizer", "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Of the model and of ways to generate. What ``GenerationConfig`` knows is harmless but for what ``Generation`` looks at."""
_CHUNKS_FROM_START = hasattr(GenerationMixin, "_prefill_chunking")
"""Whether this release's ``prefill_chunk_size`` begins with the first token whatever a cache holds."""
_IMPLEMENTATIONS = (None, "hybrid")
"""Hybrid: what the configurations of models with windows came with, which late releases take for nothing."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A call of ``generate``: whether it caches, and whether it passes prompts whole whatever a cache holds, as assisted generation does."""

    uses_cache: bool
    passes_all: bool

    @classmethod
    def of(cls, model: Any, options: Mapping[str, Any]) -> Generation:
        """``options``: ``generate``'s arguments but for the prompts, their mask and the cache.

        Raises:
            KvdCacheError: one of them makes keys and values depend on more than tokens and their places, or may do so for all that is known.
        """
        settings = {name: value for name, value in options.items() if name not in _ARGUMENTS}
        config, others = model._prepare_generation_config(options.get("generation_config"), **settings)  # noqa: SLF001  # as generate does
        if not config.use_cache:
            return cls(uses_cache=False, passes_all=False)
        refused = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
        if config.cache_implementation not in _IMPLEMENTATIONS:
            refused.append("cache_implementation")
        if getattr(config, "token_healing", None):
            refused.append("token_healing")
        if refused:
            names = ", ".join(sorted(refused))
            raise KvdCacheError(
                f"{names}: outside the pool, whose keys and values are those of input_ids, padded on the left, and of nothing else: "
                "call model.generate, or leave it out"
            )
        is_assisted = config.get_generation_mode(options.get("assistant_model")) == GenerationMode.ASSISTED_GENERATION
        is_chunked = _CHUNKS_FROM_START and getattr(config, "prefill_chunk_size", None) is not None
        return cls(uses_cache=True, passes_all=is_assisted or is_chunked)


def special_token(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """``pad_token_id`` or ``eos_token_id`` (one or several) as ``generate`` with these options knows it; None: there is none."""
    given = options.get(name)
    if given is None:
        given = getattr(options.get("generation_config"), name, None)
    return given if given is not None else getattr(model.generation_config, name)


def has_guessed_padding(input_ids: torch.Tensor, model: Any, options: Mapping[str, Any]) -> bool:
    """Whether ``generate`` without a mask takes some of these tokens for padding."""
    pad, eos = special_token(model, options, "pad_token_id"), special_token(model, options, "eos_token_id")
    return pad is not None and pad not in (eos if isinstance(eos, list) else [eos]) and bool((input_ids == pad).any())
