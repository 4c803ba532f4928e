"""``kv_dtype`` from the configuration to the logits: what the pool holds, what its blocks are called, and how near the results stay."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

import random  # noqa: E402

import torch  # noqa: E402
from native_runner import WatchedModel  # noqa: E402
from tiny_models import VOCAB_SIZE, make_model  # noqa: E402

from kvd.config import CacheConfig, ConfigError, ModelConfig, SchedulerConfig  # noqa: E402
from kvd.executor.assemble import open_model  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.native_model import NativeModel, load_native_decoder  # noqa: E402
from kvd.executor.runner import ModelRunner  # noqa: E402
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow  # noqa: E402
from kvd.types import SamplingParams, pack_tokens  # noqa: E402

KV_MEMORY = 4 << 20
PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=150)
needs_kernels = pytest.mark.skipif(native.status().isa is None, reason="kvd was installed without its native kernels")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def opened(path, kv_dtype, kernels="auto"):
    return open_model(
        path,
        inspect_model(path),
        ModelConfig(kernels=kernels, dtype="float32"),
        CacheConfig(kv_memory=KV_MEMORY, kv_dtype=kv_dtype),
        SchedulerConfig(),
        threads=1,
        digest_cache=path / "digests.json",
    )


@needs_kernels
def test_the_pool_holds_more_of_what_is_smaller_and_calls_it_by_another_name(model_path):
    models = {kv_dtype: opened(model_path, kv_dtype) for kv_dtype in ("auto", "float32", "bfloat16", "int8")}
    blocks = {kv_dtype: model.num_blocks for kv_dtype, model in models.items()}
    assert blocks["auto"] == blocks["float32"]
    assert blocks["bfloat16"] == pytest.approx(2 * blocks["float32"], abs=1)
    assert blocks["int8"] == pytest.approx(4 * 16 / (16 + 4) * blocks["float32"], abs=2)  # head dimension 16, and a scale
    digests = {kv_dtype: model.fingerprint for kv_dtype, model in models.items()}
    assert digests["auto"] == digests["float32"]
    assert len(set(digests.values())) == 3


def test_torch_refuses_what_it_does_not_keep(model_path):
    with pytest.raises(ConfigError, match=r"kv_dtype = 'int8'.*kernels = torch.*kv_dtype = 'auto'"):
        opened(model_path, "int8", "torch")
    assert opened(model_path, "float32", "torch").num_blocks


@needs_kernels
def test_results_stay_near_and_do_not_depend_on_chunks(model_path):
    spec = inspect_model(model_path)
    decoder = load_native_decoder(
        model_path,
        spec,
        dtype=torch.float32,
        quantised=False,
        threads=1,
        max_model_len=256,
        max_step_tokens=256,
        progress=lambda _done, _total: None,
    )

    def run(kv_type, chunk):
        pool = NativeKvPool(spec, 16, kv_type)
        watched = WatchedModel(NativeModel(decoder, pool))
        runner = ModelRunner(watched, pool, spec.vocab_size, max_rows=2, max_model_len=256)
        row = StartedRow(0, pack_tokens(PROMPT), len(PROMPT), 0, min(chunk, len(PROMPT)), tuple(range(12)), SamplingParams(temperature=0.0))
        counts = [min(chunk, len(PROMPT) - done) for done in range(chunk, len(PROMPT), chunk)] + [1] * 8
        runner.execute(SchedulerOutput(1, (row,), ContinuedRows([], [], [0], [])))
        for count in counts:
            runner.execute(SchedulerOutput(1, (), ContinuedRows([0], [count], [0, 0], [])))
        return torch.stack(watched.seen[0])

    exact = run("float32", 150)
    for kv_type, largest in (("bfloat16", 0.02), ("int8", 0.03)):
        logits = run(kv_type, 150)
        assert 0 < float((logits[0] - exact[0]).abs().max()) < largest * float(exact[0].abs().max())
        for chunk in (7, 64):
            assert torch.equal(run(kv_type, chunk), logits)
