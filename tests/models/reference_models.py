"""Tiny random models of every family, made with transformers, and what transformers computes with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

TOLERATED_MARGIN = 1e-4
"""Where the reference's two best logits are closer than this, either may come first in float32."""

SIZES: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0 + 0.1 * pair for pair in range(8)], [2.0 + 0.5 * pair for pair in range(8)]
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": SHORT,
    "long_factor": LONG,
}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 1000.0, **parameters}


FAMILIES: dict[str, Any] = {
    "llama2": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, rope_parameters=rope(rope_type="default")),
    "llama3": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-wide-heads": lambda: LlamaConfig(**SIZES, head_dim=24, rope_parameters=rope(rope_type="default")),
    "llama-linear": lambda: LlamaConfig(**{**SIZES, "max_position_embeddings": 64}, rope_parameters=rope(rope_type="linear", factor=4.0)),
    "llama-longrope": lambda: LlamaConfig(**SIZES, rope_parameters=LONG_ROPE),
    "smollm2": lambda: LlamaConfig(
        **{**SIZES, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, tie_word_embeddings=True
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=24),
    "qwen2": lambda: Qwen2Config(**SIZES, rope_parameters=rope(rope_type="default")),
    "qwen2-yarn": lambda: Qwen2Config(**{**SIZES, "max_position_embeddings": 64}, rope_parameters=YARN_ROPE),
    "qwen2-yarn-tuned": lambda: Qwen2Config(
        **SIZES, rope_parameters={**YARN_ROPE, "attention_factor": 0.9, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
    ),
    "qwen2-yarn-mscale": lambda: Qwen2Config(**SIZES, rope_parameters={**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.4}),
    "qwen2-window": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=24, max_window_layers=2),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "qwen3-window": lambda: Qwen3Config(
        **SIZES, head_dim=32, tie_word_embeddings=True, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
}


def make_model(config: Any, seed: int = 2) -> Any:
    """A model whose every weight, norm and bias is random: whatever the decoder leaves out shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
    return model


def save_model(model: Any, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def random_prompt(length: int, vocab_size: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class Continuation:
    """A greedy continuation and, at each step, how far the best logit is above the next."""

    token_ids: list[int]
    margins: list[float]


@torch.inference_mode()
def reference_logits(model: Any, prompt: list[int]) -> Tensor:
    return model(torch.tensor([prompt]), use_cache=False).logits[0]


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> Continuation:
    """transformers' own decoding over its own cache, never stopped by an end-of-sequence token."""
    return batched_greedy(model, [prompt], num_tokens)[0]


@torch.inference_mode()
def batched_greedy(model: Any, prompts: list[list[int]], num_tokens: int) -> list[Continuation]:
    """The same for several prompts at once, padded on the left and masked."""
    model.generation_config = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    result = model.generate(ids, attention_mask=mask)
    best = torch.stack(result.logits, dim=1).float().topk(2).values
    margins = (best[..., 0] - best[..., 1]).tolist()
    return [Continuation(output, margin) for output, margin in zip(result.sequences[:, longest:].tolist(), margins, strict=True)]


def first_divergence(output: list[int], reference: Continuation) -> tuple[int, float] | None:
    """Where two continuations part, with the reference's margin there; None where they are equal."""
    for step, (ours, theirs) in enumerate(zip(output, reference.token_ids, strict=True)):
        if ours != theirs:
            return step, reference.margins[step]
    return None
