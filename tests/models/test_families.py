"""Every supported family against transformers, from the files transformers writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_attention import greedy, prompt_logits
from reference_models import (
    FAMILIES,
    LONG_ROPE,
    SIZES,
    TOLERATED_MARGIN,
    first_divergence,
    make_model,
    random_prompt,
    reference_greedy,
    reference_logits,
    rope,
    save_model,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import ModelError, fit_length
from kvd.executor.models.weights.load import load_decoder

pytestmark = [pytest.mark.torch, pytest.mark.oracle]

ATOL = 2e-5
PROMPT_TOKENS = 100
"""Longer than every sliding window and than the original positions of every scaled rope above."""


def load(path: Path, dtype: torch.dtype = torch.float32, max_model_len: int = 0):
    spec, _ = fit_length(inspect_model(path), max_model_len)
    return load_decoder(path, spec, dtype=dtype, device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(FAMILIES[family]())
    decoder = load(save_model(model, tmp_path))
    prompt = random_prompt(PROMPT_TOKENS, SIZES["vocab_size"])

    logits = prompt_logits(decoder, prompt)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, reference_logits(model, prompt), atol=ATOL, rtol=0)
    # Chunks that end within a window and a decode token by token see the same past.
    torch.testing.assert_close(prompt_logits(decoder, prompt, chunk=37), logits, atol=ATOL, rtol=0)

    reference = reference_greedy(model, prompt, 64)
    divergence = first_divergence(greedy(decoder, prompt, 64), reference)
    assert divergence is None or divergence[1] < TOLERATED_MARGIN, divergence
    assert len(set(reference.token_ids)) > 5, "a continuation that repeats itself would prove little"


def test_dynamic_ntk_is_that_of_a_sequence_of_max_model_len(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 64}, rope_parameters=rope(rope_type="dynamic", factor=2.0))
    model = make_model(config)
    prompt = random_prompt(PROMPT_TOKENS, SIZES["vocab_size"])
    decoder = load(save_model(model, tmp_path), max_model_len=PROMPT_TOKENS)
    # transformers stretches the angles to the sequence at hand: as long as max_model_len they are the same.
    torch.testing.assert_close(prompt_logits(decoder, prompt), reference_logits(model, prompt), atol=ATOL, rtol=0)
    # The angles must not move with the sequence: a block's bytes are a function of its prefix.
    torch.testing.assert_close(prompt_logits(decoder, prompt[:20]), prompt_logits(decoder, prompt)[:20], atol=ATOL, rtol=0)
    assert (reference_logits(model, prompt[:20]) - prompt_logits(decoder, prompt[:20])).abs().max() > 100 * ATOL


@pytest.mark.parametrize(("max_model_len", "prompt_tokens"), [(64, 60), (128, 100)])
def test_longrope_takes_the_factors_of_max_model_len(tmp_path: Path, max_model_len: int, prompt_tokens: int) -> None:
    model = make_model(LlamaConfig(**SIZES, rope_parameters=LONG_ROPE))
    prompt = random_prompt(prompt_tokens, SIZES["vocab_size"])
    decoder = load(save_model(model, tmp_path), max_model_len=max_model_len)
    torch.testing.assert_close(prompt_logits(decoder, prompt), reference_logits(model, prompt), atol=ATOL, rtol=0)


def test_a_length_dependent_rope_that_nobody_fixed_is_refused(tmp_path: Path) -> None:
    path = save_model(make_model(LlamaConfig(**SIZES, rope_parameters=LONG_ROPE)), tmp_path)
    with pytest.raises(ModelError, match="longrope depends on the sequence's length"):
        load_decoder(path, inspect_model(path), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_sharded_and_older_files_give_the_same_decoder(family: str, tmp_path: Path) -> None:
    model = make_model(FAMILIES[family]())
    whole, sharded = save_model(model, tmp_path / "whole"), save_model(model, tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    # transformers 4 kept rope_theta and rope_scaling apart.
    config = json.loads((sharded / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
    (sharded / "config.json").write_text(json.dumps(config))
    prompt = random_prompt(PROMPT_TOKENS, SIZES["vocab_size"])
    assert torch.equal(prompt_logits(load(sharded), prompt), prompt_logits(load(whole), prompt))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_stored_in_half_precision_are_widened_exactly(stored: torch.dtype, tmp_path: Path) -> None:
    model = make_model(FAMILIES["qwen3"]()).to(stored)
    decoder = load(save_model(model, tmp_path))
    prompt = random_prompt(PROMPT_TOKENS, SIZES["vocab_size"])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(prompt_logits(decoder, prompt), reference_logits(reference, prompt), atol=ATOL, rtol=0)
    assert inspect_model(tmp_path).weights_dtype == str(stored).removeprefix("torch.")


@pytest.mark.parametrize("family", ["llama3", "mistral-window", "qwen2", "qwen3"])
def test_bfloat16_errs_no_more_than_transformers_does(family: str, tmp_path: Path) -> None:
    model = make_model(FAMILIES[family]())
    decoder = load(save_model(model, tmp_path), torch.bfloat16)
    prompt = random_prompt(PROMPT_TOKENS, SIZES["vocab_size"])
    exact = reference_logits(model, prompt)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs = (reference_logits(rounded, prompt).float() - exact).square().mean().sqrt()
    logits = prompt_logits(decoder, prompt)
    assert logits.dtype is torch.float32
    assert (logits - exact).square().mean().sqrt() < 1.25 * theirs
