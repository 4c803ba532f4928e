"""SmolLM2's beams in float32 against transformers': the committed sequences and scores of tests/data/smollm2_beams.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from beam_world import World

from kvd.executor.kernels.cpu import native
from kvd.executor.kv_pool import KvPool
from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import fit_length
from kvd.executor.models.weights.load import load_decoder
from kvd.executor.native_kv_pool import NativeKvPool
from kvd.executor.native_model import NativeModel, load_native_decoder
from kvd.executor.native_runner import NativeRunner
from kvd.executor.runner import TorchRunner
from kvd.types import BeamSearch

pytestmark = [pytest.mark.torch, pytest.mark.model]

DATA = Path(__file__).parents[1] / "data"
SIZE, NUM_BLOCKS, MAX_ROWS, MAX_LEN, NUM_TOKENS = 16, 400, 32, 1024, 24
SAMPLE = ("ask-06", "chat-08")
MARGIN = 1e-4
"""Two scores of the reference closer than this may change places."""


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").split("\n") if line]


PROMPTS = {entry["id"]: entry["token_ids"] for entry in read_lines("smollm2_prompts.jsonl")}


def native_runner(path: Path) -> NativeRunner:
    if native.status().isa is None:
        pytest.skip(native.status().reason)
    spec = fit_length(inspect_model(path), MAX_LEN)[0]
    decoder = load_native_decoder(
        path,
        spec,
        dtype=torch.float32,
        quantised=True,
        threads=2,
        max_model_len=MAX_LEN,
        max_step_tokens=256,
        progress=lambda done, total: None,
    )
    pool = NativeKvPool(spec, NUM_BLOCKS, "float32")
    return NativeRunner(NativeModel(decoder, pool), pool, spec.vocab_size, max_rows=MAX_ROWS, max_model_len=MAX_LEN)


def torch_runner(path: Path) -> TorchRunner:
    spec = fit_length(inspect_model(path), MAX_LEN)[0]
    decoder = load_decoder(path, spec, dtype=torch.float32, device="cpu")
    pool = KvPool(spec, NUM_BLOCKS, SIZE, torch.float32, "cpu")
    return TorchRunner(decoder, spec, pool, max_rows=MAX_ROWS, max_model_len=MAX_LEN)


def check(runner: Any, lines: list[dict[str, Any]]) -> None:
    """All searches beside each other."""
    world = World(
        runner=runner, block_size=SIZE, num_blocks=NUM_BLOCKS, max_running=MAX_ROWS, max_model_len=MAX_LEN, max_tokens_per_step=256
    )
    asked = []
    for line in lines:
        early_stopping = None if line["early_stopping"] == "never" else line["early_stopping"]
        beam = BeamSearch(line["width"], line["length_penalty"], early_stopping)
        options = {"max_tokens": NUM_TOKENS, "stop_token_ids": tuple(line["stop_token_ids"]), "num_choices": line["width"]}
        asked.append(world.submit(PROMPTS[line["id"]], beam=beam, **options))
    world.finish()
    for request_id, line in zip(asked, lines, strict=True):
        said = world.said(request_id)
        assert [score for _, score in said] == pytest.approx(line["scores"], rel=1e-4)
        for (tokens, score), reference in zip(said, line["sequences"], strict=True):
            assert list(tokens) == reference or sum(abs(other - score) < MARGIN for other in line["scores"]) > 1


def test_a_sample_equals_transformers_on_the_native_kernels(smollm2: Path) -> None:
    check(native_runner(smollm2), [line for line in read_lines("smollm2_beams.jsonl") if line["id"] in SAMPLE])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make", [native_runner, torch_runner])
def test_every_search_equals_transformers(smollm2: Path, make: Any) -> None:
    check(make(smollm2), read_lines("smollm2_beams.jsonl"))
