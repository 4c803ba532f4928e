"""SmolLM2 on the native kernels: the reference's tokens in float32, from quantised and from dequantised weights."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.model]

import torch  # noqa: E402
from test_executor_smollm2 import SAMPLE, TOLERATED_MARGIN, divergences, read_lines  # noqa: E402

from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.executor.models.spec import fit_length  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel, load_native_decoder  # noqa: E402
from kvd.executor.runner import ModelRunner  # noqa: E402

if native.status().isa is None:
    pytest.skip(native.status().reason, allow_module_level=True)


def make_runner(path, num_blocks, *, quantised):
    spec = fit_length(inspect_model(path), 2048)[0]
    decoder = load_native_decoder(
        path,
        spec,
        dtype=torch.float32,
        quantised=quantised,
        threads=2,
        max_model_len=2048,
        max_step_tokens=256,
        progress=lambda done, total: None,
    )
    pool = NativeKvPool(spec, num_blocks, "float32")
    return ModelRunner(NativeModel(decoder, pool), pool, spec.vocab_size, max_rows=16, max_model_len=2048)


@pytest.mark.parametrize("quantised", [True, False])
def test_a_sample_of_every_kind_continues_as_the_reference(smollm2, quantised):
    found = divergences(make_runner(smollm2, 320, quantised=quantised), SAMPLE, budget=192, num_blocks=320)
    assert all(margin < TOLERATED_MARGIN for _, _, margin in found)
    assert len(found) <= 1


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("quantised", [True, False])
def test_every_prompt_continues_as_the_reference(smollm2, quantised):
    names = list(read_lines("smollm2_prompts.jsonl"))
    found = divergences(make_runner(smollm2, 1024, quantised=quantised), names, budget=256, num_blocks=1024)
    assert all(margin < TOLERATED_MARGIN for _, _, margin in found)
    assert len(found) <= len(names) // 100
