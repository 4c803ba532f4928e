"""Descriptions of models: what config.json says becomes a spec, and what the decoder does not compute is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.executor.models.hf_config import spec_from_config
from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import ModelError, RopeSpec, RopeType, UnsupportedModelError, WeightsError, fit_length

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
}


def describe(**changes: Any):
    config = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    if "model_type" in changes and "architectures" not in changes:
        del config["architectures"]
    return spec_from_config(config, name="m", origin="config.json", eos_token_ids=())


def test_a_plain_llama() -> None:
    spec = describe()
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_positions) == (4, 2, 16, 512)
    assert spec.rope == RopeSpec(theta=5000.0)
    assert spec.windows == (0, 0, 0, 0)
    assert (spec.qkv_bias, spec.qk_norm, spec.tied_head) == (False, False, False)
    assert spec.attention_scale == 0.25


def test_defaults_of_left_out_keys_are_the_familys() -> None:
    assert describe(num_key_value_heads="absent").num_kv_heads == 4
    assert describe(rope_theta="absent").rope.theta == 10_000.0
    assert describe(model_type="qwen3").head_dim == 128
    assert describe(model_type="mistral").windows == (4096,) * 4
    assert describe(model_type="mistral", sliding_window=None).windows == (0,) * 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 7}, (7, 7, 7, 7)),
        ({"model_type": "qwen2", "sliding_window": 7}, (0, 0, 0, 0)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True}, (0, 0, 0, 0)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (0, 7, 7, 7)),
        ({"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, (7, 7, 7, 7)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, 0, 7, 0),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert describe(**changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"'gpt2' is not supported; supported: Llama 2 and 3.x, SmolLM2 .*Mistral.*Qwen2.*Qwen3"),
        ({"model_type": None}, "None is not supported; supported: Llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*supported: Llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"attention_bias": True}, "attention_bias .*output projection.* is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts .mixture of experts. is not supported"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"sliding_window": 64}, "sliding_window is not supported for llama"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            "rope type 'proportional' is not supported; supported: default, dynamic",
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope type 'mrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 3}}, "rope parameter 'twist' is not supported for rope type 'linear'"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope type .'linear'. is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"layer_types": ["linear_attention"] * 4}, "layer type 'linear_attention' is not supported"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}, "mixed layer_types"),
    ],
)
def test_unsupported_models_are_refused_with_what_is_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        describe(**changes)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "hidden_size must be an integer, is None"),
        ({"hidden_size": 64.5}, "hidden_size must be an integer"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_layers is 0, must be positive"),
        ({"num_hidden_layers": 4097}, "num_hidden_layers is 4097, must be at most 4096"),
        ({"num_hidden_layers": 10**7, "model_type": "qwen2"}, "num_hidden_layers is 10000000, must be at most 4096"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"layer_types": ["full_attention"]}, "a type for each of the 4 layers"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "no sliding_window is in use"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor 0.5 must be at least 1"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "low_freq_factor < high"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0] * 8}},
            "short_factor has 1 entries",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [1.0] * 8}}, "short_factor must be a list of numbers"),
        ({"rope_scaling": [1]}, "rope_parameters must be an object"),
        *(({"rope_theta": value}, "rope_theta is .*, must be more than 1") for value in (0, -0.0, 1, -10_000.0, 1e-300)),
        *(({"rope_theta": value}, "rope_theta must be a number, is ") for value in (float("nan"), float("inf"), 10**400, "big", True)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta is 0.0, must be more than 1"),
    ],
)
def test_damaged_descriptions_are_errors_that_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe(**changes)


def test_scaled_ropes_keep_their_parameters_and_reach() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_type": "llama3",
    }
    spec = describe(rope_scaling=llama3)
    assert spec.rope == RopeSpec(
        type=RopeType.LLAMA3, theta=5000.0, factor=8.0, original_max_positions=128, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert spec.max_positions == 512
    assert describe(rope_scaling={"type": "linear", "factor": 4.0}).max_positions == 2048
    assert describe(rope_scaling={"type": "dynamic", "factor": 2.0}).max_positions == 1024
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert describe(rope_scaling=yarn).max_positions == 2048
    assert describe(rope_scaling=yarn, max_position_embeddings=2048).max_positions == 2048
    assert describe(rope_scaling=yarn).rope.attention_factor == pytest.approx(1.138629436)
    assert describe(rope_scaling={**yarn, "attention_factor": 0.5}).rope.attention_factor == 0.5
    longrope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert describe(rope_scaling=longrope, original_max_position_embeddings=128).rope.factor == 4.0


def test_rope_parameters_of_both_generations_mean_the_same() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 128}
    new = describe(rope_theta="absent", rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **yarn})
    assert new == describe(rope_scaling={"type": "yarn", **yarn})


def test_length_is_settled_and_fixes_only_length_dependent_ropes() -> None:
    plain = describe(max_position_embeddings=100_000)
    assert fit_length(plain, 0) == (plain, 8192)
    assert fit_length(plain, 50_000) == (plain, 50_000)
    assert fit_length(describe(), 0) == (describe(), 512)
    dynamic, length = fit_length(describe(rope_scaling={"type": "dynamic", "factor": 2.0}), 700)
    assert (dynamic.rope.fixed_length_tokens, length) == (700, 700)
    with pytest.raises(ModelError, match="max_model_len 513: model m has 512 positions"):
        fit_length(describe(), 513)


def test_a_directory_is_described_without_its_weights_being_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json; a model is a GGUF file"):
        inspect_model(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ModelError, match=r"no config\.json; name one of its GGUF files: tiny\.gguf"):
        inspect_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2, "dtype": "bfloat16"}))
    with pytest.raises(WeightsError, match="no weights"):
        inspect_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"unread")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    spec = inspect_model(tmp_path)
    assert (spec.eos_token_ids, spec.weights_dtype, spec.name) == ((2, 3), "bfloat16", tmp_path.name)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["a", [2, "a"], 1.5, True, {"id": 2}, [[2]], 2**31, -2])
def test_an_end_of_sequence_that_is_no_id_is_an_error_that_names_file_and_key(file: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"unread")
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / file).write_text(json.dumps({**BASE, "eos_token_id": value}))
    with pytest.raises(ModelError, match=f"/{file}: eos_token_id must be the id of a token or a list of ids, is "):
        inspect_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_a_damaged_config_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json: not"):
        inspect_model(tmp_path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        inspect_model(tmp_path / "gone")
    (tmp_path / "weights.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        inspect_model(tmp_path / "weights.pt")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 600) | st.floats() | st.sampled_from(["llama", "yarn", "silu", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from([*BASE, "head_dim", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "tie_word_embeddings"])


@given(st.dictionaries(KEYS, JSON, max_size=3))
def test_any_config_becomes_a_sound_spec_or_a_named_error(changes: dict[str, Any]) -> None:
    try:
        spec = spec_from_config({**BASE, **changes}, name="m", origin="config.json", eos_token_ids=())
    except ModelError:
        return
    assert spec.num_heads % spec.num_kv_heads == 0
    assert spec.head_dim > 0
    assert len(spec.windows) == spec.num_layers
