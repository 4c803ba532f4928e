"""Small models with drawn weights for transformers' generate, and prompts for them."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "vocab_size": 97}
KV = {**TINY, "intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**KV),
    "qwen2": Qwen2Config(**KV),
    "qwen3": Qwen3Config(**KV, head_dim=16),
    "mistral-window": MistralConfig(**KV, sliding_window=12),
    "gemma2": Gemma2Config(**KV, head_dim=8, sliding_window=16),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=1),
}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def make(config):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(torch.float32).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    return model


def draw(seed, *shape):
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(seed))


def own(model, input_ids, **options):
    return model.generate(input_ids, **{**GREEDY, **options})


def padded(prompts):
    length = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), length), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :], mask[row, length - len(prompt) :] = prompt, 1
    return ids, mask
