"""Loading: progress, dtypes, and every way in which weights can fail to fit their description."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import Architecture, ModelError, ModelSpec, RopeSpec, UnsupportedModelError, WeightsError
from kvd.executor.models.weights.load import load_decoder
from kvd.executor.models.weights.plan import assign

pytestmark = pytest.mark.torch

SPEC = ModelSpec(
    architecture=Architecture.QWEN2,
    name="tiny",
    num_layers=2,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=40,
    max_positions=64,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
    windows=(0, 0),
    qkv_bias=True,
    qk_norm=False,
    tied_head=False,
    eos_token_ids=(),
    weights_format="safetensors",
    weights_dtype="float32",
)
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}


def tensors(spec: ModelSpec = SPEC) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {item.name: torch.randn(item.shape) for item in assign(spec)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def load(path: Path, spec: ModelSpec | None = None, dtype: torch.dtype = torch.float32):
    return load_decoder(path, spec or inspect_model(path), dtype=dtype, device="cpu")


def rewrite(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    content = {**load_file(path / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path / "model.safetensors")


def test_progress_counts_the_bytes_of_the_file(model: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_decoder(model, inspect_model(model), dtype=torch.bfloat16, device="cpu", progress=lambda done, total: calls.append((done, total)))
    expected = sum(tensor.numel() * 4 for tensor in tensors().values())
    assert calls[-1] == (expected, expected)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert len(calls) == len(tensors())


def test_weights_are_in_the_dtype_asked_for(model: Path) -> None:
    decoder = load(model, dtype=torch.bfloat16)
    hidden = decoder.forward(torch.tensor([3, 4]), torch.tensor([0, 1]), lambda _layer, q, _k, _v: q)
    assert (decoder.dtype, hidden.dtype, decoder.logits(hidden[:1]).dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert decoder.logits(hidden[:1]).shape == (1, 40)
    assert hidden.is_inference()


@pytest.mark.parametrize(
    ("dtype", "message"),
    [(torch.float16, "float16 is for cuda only"), (torch.float64, "float64 is not supported; supported: float32, bfloat16")],
)
def test_dtypes_that_the_cpu_does_not_compute_in_are_refused(model: Path, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(model, dtype=dtype)


def test_a_missing_tensor_is_named(model: Path) -> None:
    rewrite(model, {"model.layers.1.self_attn.k_proj.bias": None})
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias is missing"):
        load(model)


def test_an_unexpected_tensor_is_named(model: Path) -> None:
    rewrite(model, {"model.layers.1.self_attn.o_proj.bias": torch.zeros(16)})
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.self_attn\.o_proj\.bias is unexpected"):
        load(model)


def test_a_wrong_shape_is_named_with_both_shapes(model: Path) -> None:
    rewrite(model, {"model.layers.0.mlp.up_proj.weight": torch.zeros(24, 17)})
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has shape \[24, 17\], expected \[24, 16\]"):
        load(model)


def test_a_storage_type_that_is_not_read_is_named(model: Path) -> None:
    rewrite(model, {"model.norm.weight": torch.zeros(16, dtype=torch.float64)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is stored as F64; supported: F32, F16, BF16"):
        load(model)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000])
def test_a_truncated_file_is_named(model: Path, kept: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors: damaged or truncated"):
        load(model)


def test_old_rotary_buffers_are_no_weights(model: Path) -> None:
    rewrite(model, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    assert load(model).spec.num_layers == 2


def test_a_tied_head_may_be_stored_once_more_but_not_differ(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    rewrite(model, {"lm_head.weight": tensors()["model.embed_tokens.weight"]})
    assert load(model).spec.tied_head
    rewrite(model, {"lm_head.weight": tensors()["model.embed_tokens.weight"] + 1})
    with pytest.raises(WeightsError, match=r"tie_word_embeddings is set, but tensor lm_head\.weight differs"):
        load(model)


def test_shards_are_found_with_and_without_an_index(model: Path) -> None:
    content = tensors()
    names = sorted(content)
    (model / "model.safetensors").unlink()
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: content[name] for name in part}, model / file)
    ids, positions = torch.tensor([1, 2, 3]), torch.arange(3)

    def hidden() -> torch.Tensor:
        return load(model).forward(ids, positions, lambda _layer, q, _k, _v: q)

    unindexed = hidden()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in shards.items() for name in part}}))
    (model / "c.safetensors").write_bytes(b"not of this model")
    assert torch.equal(hidden(), unindexed)
    (model / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b\.safetensors: missing, but the index names it"):
        inspect_model(model)


@pytest.mark.parametrize("name", ["../b.safetensors", "/etc/b.safetensors", "b.bin", ""])
def test_an_index_may_only_name_files_beside_it(model: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightsError, match="not the name of a safetensors file beside it"):
        inspect_model(model)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_an_error(model: Path, content: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        inspect_model(model)


def test_a_tensor_in_two_files_is_an_error(model: Path) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(16)}, model / "b.safetensors")
    with pytest.raises(WeightsError, match=r"b\.safetensors: tensor model\.norm\.weight occurs in another file too"):
        load(model)


def test_pickled_weights_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="convert them to safetensors"):
        inspect_model(model)
    with pytest.raises(UnsupportedModelError, match="convert them to safetensors"):
        load(model, replace(SPEC, name="x"))
