"""LoRA adapters as PEFT writes them, for any model's sizes, made without PEFT, torch or NumPy."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somebody/some-model",
    "r": 4,
    "lora_alpha": 12,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "inference_mode": True,
    "megatron_core": "megatron.core",
}


def write_safetensors(path: Path, tensors: dict[str, tuple[tuple[int, ...], array[float]]]) -> None:
    """A safetensors file of float32 tensors, each a shape and its values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + 4 * len(values)]}
        offset += 4 * len(values)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(values.tobytes() for _, values in tensors.values()))


def module_sizes(
    *, num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a Llama's linear modules, by name."""
    context, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    sizes = {}
    for layer in range(num_layers):
        for name, size in (
            ("self_attn.q_proj", (context, hidden_size)),
            ("self_attn.k_proj", (kv_width, hidden_size)),
            ("self_attn.v_proj", (kv_width, hidden_size)),
            ("self_attn.o_proj", (hidden_size, context)),
            ("mlp.gate_proj", (intermediate_size, hidden_size)),
            ("mlp.up_proj", (intermediate_size, hidden_size)),
            ("mlp.down_proj", (hidden_size, intermediate_size)),
        ):
            sizes[f"model.layers.{layer}.{name}"] = size
    return sizes


def make_adapter(
    path: Path, sizes: dict[str, tuple[int, int]], *, seed: int = 0, size: float = 1.0, ranks: dict[str, int] | None = None, **config: Any
) -> Path:
    """Write an adapter of random values into ``path``: other values for each ``seed``, larger ones for a larger ``size``.

    ``config`` overrides keys of its configuration; ``ranks`` are those of modules that have not ``r``, by name. Modules are those that a list of ``target_modules`` names by
    their last part.
    """
    settings = {**CONFIG, **config}
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(settings))
    draw = random.Random(seed)
    tensors: dict[str, tuple[tuple[int, ...], array[float]]] = {}
    for name, (outputs, inputs) in sizes.items():
        if name.rpartition(".")[2] in settings["target_modules"]:
            rank = (ranks or {}).get(name, settings["r"])
            for half, shape, deviation in (("A", (rank, inputs), inputs**-0.5), ("B", (outputs, rank), size * max(rank, 1) ** -0.5)):
                values = array("f", (draw.gauss(0, deviation) for _ in range(shape[0] * shape[1])))
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = (shape, values)
    write_safetensors(path / "adapter_model.safetensors", tensors)
    return path
