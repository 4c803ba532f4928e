"""Beam search through scheduler, cache and runner against transformers' ``generate`` on the same float32 weights: sequences and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from beam_world import World
from reference_models import FAMILIES, make_model, random_prompt, save_model
from transformers import GenerationConfig

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

pytestmark = [pytest.mark.torch, pytest.mark.oracle]

SIZE, NUM_BLOCKS, MAX_ROWS, MAX_LEN = 16, 200, 16, 200
KERNELS = ["torch", "native"]


def make_runner(path: Path, kernels: str) -> Any:
    spec = fit_length(inspect_model(path), MAX_LEN)[0]
    limits = {"max_rows": MAX_ROWS, "max_model_len": MAX_LEN}
    if kernels == "torch":
        decoder = load_decoder(path, spec, dtype=torch.float32, device="cpu")
        return TorchRunner(decoder, spec, KvPool(spec, NUM_BLOCKS, SIZE, torch.float32, "cpu"), **limits)
    if native.status().isa is None:
        pytest.skip(native.status().reason)
    decoder = load_native_decoder(
        path,
        spec,
        dtype=torch.float32,
        quantised=False,
        threads=1,
        max_model_len=MAX_LEN,
        max_step_tokens=64,
        progress=lambda done, total: None,
    )
    pool = NativeKvPool(spec, NUM_BLOCKS, "float32")
    return NativeRunner(NativeModel(decoder, pool), pool, spec.vocab_size, **limits)


def reference(model: Any, prompt: list[int], beam: BeamSearch, stop_ids: tuple[int, ...], num_choices: int, **options: Any) -> Any:
    model.generation_config = GenerationConfig(
        do_sample=False,
        num_beams=beam.width,
        num_return_sequences=num_choices,
        length_penalty=beam.length_penalty,
        early_stopping="never" if beam.early_stopping is None else beam.early_stopping,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    with torch.inference_mode():
        result = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64))
    outputs = []
    for row in result.sequences[:, len(prompt) :].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in stop_ids), len(row))
        outputs.append(tuple(row[:end]))
    return outputs, result.sequences_scores.tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_model(FAMILIES["llama3"]())
    return model, save_model(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=KERNELS)
def runner(request: pytest.FixtureRequest, tiny: Any) -> Any:
    return make_runner(tiny[1], request.param)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("early_stopping", [False, True, None])
def test_sequences_and_scores_are_those_of_generate(tiny: Any, runner: Any, width: int, early_stopping: bool | None) -> None:
    """All searches of one setting run beside each other, in chunks, sharing prompts."""
    world = World(
        runner=runner, block_size=SIZE, num_blocks=NUM_BLOCKS, max_running=MAX_ROWS, max_model_len=MAX_LEN, max_tokens_per_step=40
    )
    asked = []
    for number, (length_penalty, num_stops, max_tokens, min_tokens) in enumerate(
        [(0.0, 40, 14, 0), (1.0, 40, 14, 5), (2.0, 12, 20, 0), (1.0, 1, 9, 0), (1.0, 0, 25, 0), (-0.5, 40, 14, 0)]
    ):
        beam, stop_ids = BeamSearch(width, length_penalty, early_stopping), tuple(range(3, 3 + num_stops))
        prompt = random_prompt(7 + 11 * number, 263, seed=number % 4)
        options = {"stop_token_ids": stop_ids, "max_tokens": max_tokens, "min_tokens": min_tokens}
        asked.append((world.submit(prompt, beam=beam, num_choices=width, **options), prompt, beam, options))
    world.finish()
    lengths = set()
    for request_id, prompt, beam, options in asked:
        outputs, scores = reference(
            tiny[0],
            prompt,
            beam,
            options["stop_token_ids"],
            width,
            max_new_tokens=options["max_tokens"],
            min_new_tokens=options["min_tokens"] or None,
        )
        said = world.said(request_id)
        assert [tokens for tokens, _ in said] == outputs
        assert [score for _, score in said] == pytest.approx(scores, rel=1e-4)
        lengths.update(map(len, outputs))
    assert len(lengths) > 3
