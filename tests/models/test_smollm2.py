"""The real SmolLM2 against transformers: logits, and greedy continuations of the committed prompts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import greedy, prompt_logits
from gguf import GGUFReader
from reference_models import TOLERATED_MARGIN, Continuation, first_divergence, reference_logits
from transformers import AutoModelForCausalLM

from kvd.executor.models.decoder import Decoder
from kvd.executor.models.gguf_file import open_gguf
from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import fit_length
from kvd.executor.models.weights.load import load_decoder

pytestmark = [pytest.mark.torch, pytest.mark.oracle, pytest.mark.model]

DATA = Path(__file__).parent.parent / "data"
LOGITS_ATOL = 5e-4
"""Logits reach 40 here. Room for builds of torch that sum in another order: on one and the same build the results may be equal to the bit."""
SAMPLE = ("prose-07", "ask-12", "code-05", "world-16", "digits-08", "odd-11", "odd-20", "long-01", "chat-13", "longchat-04")
"""One of each kind, for every change; the rest is the full tier's."""
DECODED = ("ask-12", "world-16", "longchat-04")
"""Decoded token by token besides."""


def read_lines(name: str) -> dict[str, dict[str, Any]]:
    lines = (DATA / name).read_text(encoding="utf-8").split("\n")
    return {entry["id"]: entry for entry in map(json.loads, filter(None, lines))}


PROMPTS = read_lines("smollm2_prompts.jsonl")
REFERENCES = read_lines("smollm2_reference.jsonl")


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    spec, _ = fit_length(inspect_model(smollm2), 0)
    return load_decoder(smollm2, spec, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()


def divergences(decoder: Decoder, name: str) -> list[tuple[int, float]]:
    """Steps at which another token than the reference's is the likeliest after the reference's own past, with the margins there.

    None at all means that the greedy continuation is the reference.
    """
    prompt, expected = PROMPTS[name]["token_ids"], REFERENCES[name]["token_ids"]
    likeliest = prompt_logits(decoder, prompt + expected[:-1])[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return [(step, REFERENCES[name]["margins"][step]) for step in range(len(expected)) if likeliest[step] != expected[step]]


def test_the_committed_set_is_whole_and_of_these_weights(smollm2: Path) -> None:
    meta = json.loads((DATA / "smollm2_reference.meta.json").read_text())
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == meta["weights_sha256"]
    assert list(PROMPTS) == list(REFERENCES)
    assert len(PROMPTS) >= 200
    assert {len(entry["token_ids"]) for entry in REFERENCES.values()} == {64} == {len(entry["margins"]) for entry in REFERENCES.values()}
    assert max(len(entry["token_ids"]) for entry in PROMPTS.values()) > 600


def test_the_description(smollm2: Path) -> None:
    spec = inspect_model(smollm2)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert (spec.vocab_size, spec.max_positions, spec.rope.theta, spec.eos_token_ids) == (49152, 8192, 100_000.0, (2,))
    assert (spec.tied_head, spec.quantisation, spec.architecture.value) == (True, "Q4_1+Q8_0", "llama")


def test_the_header_is_what_the_gguf_package_reads(smollm2: Path) -> None:
    file, reader = open_gguf(smollm2), GGUFReader(smollm2)
    lists = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "general.languages"}
    assert file.metadata == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.") and key not in lists
    }
    assert {name: (item.offset_bytes, item.size_bytes, item.storage) for name, item in file.tensors.items()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name) for tensor in reader.tensors
    }


@pytest.mark.parametrize("name", ["long-02", "world-10", "chat-20"])
def test_logits_equal_those_of_transformers(decoder: Decoder, reference: Any, name: str) -> None:
    prompt = PROMPTS[name]["token_ids"]
    torch.testing.assert_close(prompt_logits(decoder, prompt), reference_logits(reference, prompt), atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_likeliest_tokens_are_the_references(decoder: Decoder, name: str) -> None:
    found = divergences(decoder, name)
    assert all(margin < TOLERATED_MARGIN for _, margin in found), found


@pytest.mark.parametrize("name", DECODED)
def test_greedy_decoding_gives_the_reference(decoder: Decoder, name: str) -> None:
    expected = Continuation(REFERENCES[name]["token_ids"], REFERENCES[name]["margins"])
    divergence = first_divergence(greedy(decoder, PROMPTS[name]["token_ids"], len(expected.token_ids)), expected)
    assert divergence is None or divergence[1] < TOLERATED_MARGIN, divergence


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_continuation_is_the_reference(decoder: Decoder) -> None:
    found = {name: steps for name in PROMPTS if (steps := divergences(decoder, name))}
    print(f"{len(found)} of {len(PROMPTS)} continuations part from the reference: {found}")
    assert all(margin < TOLERATED_MARGIN for steps in found.values() for _, margin in steps), found
    assert len(found) <= 0.01 * len(PROMPTS), found


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_logits_of_every_prompt_equal_those_of_transformers(decoder: Decoder, reference: Any) -> None:
    for name, entry in PROMPTS.items():
        difference = (prompt_logits(decoder, entry["token_ids"]) - reference_logits(reference, entry["token_ids"])).abs().max()
        assert difference < LOGITS_ATOL, (name, float(difference))
