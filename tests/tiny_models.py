"""Tiny random Llama directories with a tokenizer and a chat template of their own, made in a moment and without transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
EOS = "<|end|>"
START = "<|start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
DATED_TEMPLATE = "<|start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|end|>\n" + CHAT_TEMPLATE
_CORPUS = ("the tour begins at ten and the museum closes at six", "every visitor signs the ledger before the tour begins")
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def make_model(
    path: Path,
    *,
    seed: int = 0,
    template: str = CHAT_TEMPLATE,
    corpus: tuple[str, ...] = _CORPUS,
    poisoned_token_id: int | None = None,
    **config: Any,
) -> Path:
    """Write a model into ``path``, over what may be there: the same shapes for every ``seed``, other weights for each.

    ``corpus`` decides the merges of the tokenizer, ``config`` overrides keys of config.json. The row of ``poisoned_token_id`` in the embedding is NaN.
    """
    path.mkdir(exist_ok=True)
    settings = {**_CONFIG, **config}
    (path / "config.json").write_text(json.dumps(settings))
    save_file(_weights(settings, seed, poisoned_token_id), path / "model.safetensors")
    write_tokenizer(path, corpus=corpus)
    write_template(path, template)
    return path


def perturb(source: Path, target: Path, scale: float) -> Path:
    """A copy of a model whose weights are a little other: it mostly says the same."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    save_file(
        {name: tensor + scale * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()},
        target / "model.safetensors",
    )
    return target


def write_tokenizer(path: Path, *, corpus: tuple[str, ...] = _CORPUS) -> None:
    """A byte-level BPE tokenizer whose merges come from ``corpus``; ids 0 and 1 are the special tokens, the rest of the vocabulary is unused."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[START, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(path / "tokenizer.json"))


def write_template(path: Path, template: str) -> None:
    """The chat template, in the tokenizer's configuration."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _weights(config: dict[str, Any], seed: int, poisoned_token_id: int | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_width = hidden * config["num_key_value_heads"] // config["num_attention_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5 * 1.5

    weights = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "lm_head.weight": matrix(config["vocab_size"], hidden) * 4,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv_width, hidden),
            ("self_attn.v_proj", kv_width, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
    if poisoned_token_id is not None:
        weights["model.embed_tokens.weight"][poisoned_token_id] = float("nan")
    return weights
