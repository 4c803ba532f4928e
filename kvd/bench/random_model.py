"""Random Llama folders of a wanted shape, for measurements in which only the shape counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_START, _END = "<|start|>", "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HIDDEN = 512
KV_WIDTH = 128


def write_random_model(path: Path, *, head_dim: int, num_layers: int = 4, seed: int = 0) -> Path:
    """A model whose matrices have the same sizes for every ``head_dim``: heads times their dimension is constant, of queries (512) and of keys (128).

    Float32 safetensors with random values, and a byte-level tokenizer: a token is a byte.

    Raises:
        ValueError: ``head_dim`` does not divide 128 (up to 128).
    """
    if head_dim < 2 or KV_WIDTH % head_dim:
        raise ValueError(f"head dimension {head_dim} does not divide {KV_WIDTH}")
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": HIDDEN,
        "intermediate_size": 1408,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HIDDEN // head_dim,
        "num_key_value_heads": KV_WIDTH // head_dim,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, seed), path / "model.safetensors")
    _write_tokenizer(path)
    return path


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = draw.standard_normal((rows, columns), dtype=np.float32)
        values *= columns**-0.5
        return values

    inner, ones = config["intermediate_size"], np.ones(HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], HIDDEN), "model.norm.weight": ones}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for part, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", KV_WIDTH, HIDDEN),
            ("self_attn.v_proj", KV_WIDTH, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", inner, HIDDEN),
            ("mlp.up_proj", inner, HIDDEN),
            ("mlp.down_proj", HIDDEN, inner),
        ):
            weights[f"{name}{part}.weight"] = matrix(rows, columns)
        weights |= {f"{name}input_layernorm.weight": ones.copy(), f"{name}post_attention_layernorm.weight": ones.copy()}
    return weights


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet, 2)} | {_START: 0, _END: 1}, []))
    tokenizer.add_special_tokens([_START, _END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "chat_template": _TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
