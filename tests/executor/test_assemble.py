"""What a model that was opened shares with the process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

import torch  # noqa: E402
from tiny_models import make_model  # noqa: E402

from kvd.config import CacheConfig, ConfigError, ModelConfig, SchedulerConfig  # noqa: E402
from kvd.executor.assemble import open_model  # noqa: E402
from kvd.executor.kernel_choice import why_torch  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.step import ContinuedRows, ExecutorOutput, SchedulerOutput, StartedRow  # noqa: E402
from kvd.types import BlockId, SamplingParams, pack_tokens  # noqa: E402


@pytest.mark.skipif(native.status().isa is None, reason="the native kernels are not there")
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_draws_take_the_threads_that_were_asked_for(tmp_path: Path, kernels: str):
    native.pool(2)
    path = make_model(tmp_path / "tiny")
    opened = open_model(
        path,
        inspect_model(path),
        ModelConfig(device="cpu", dtype="float32", kernels=kernels),
        CacheConfig(kv_memory=1 << 20),
        SchedulerConfig(max_running=2),
        threads=1,
        digest_cache=tmp_path / "digests.json",
    )
    opened.load(lambda _done, _total: None)
    row = StartedRow(0, pack_tokens([5, 6, 7]), 3, 0, 3, (BlockId(0),), SamplingParams(temperature=1.0, seed=1))
    ran = opened.runner.execute(SchedulerOutput(1, (row,), ContinuedRows()))
    output = ran if isinstance(ran, ExecutorOutput) else ran.result()
    assert len(output.token_ids) == 1
    assert native.pool().num_threads == 1


def test_a_word_that_is_no_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("KVD_CPU_ISA", "avx1024")
    for setting in ("auto", "native"):
        with pytest.raises(ConfigError, match="KVD_CPU_ISA=avx1024 in the environment: give one of portable, avx2, avx512"):
            why_torch(setting, None, torch.device("cpu"), torch.float32, 16)
    assert why_torch("torch", None, torch.device("cpu"), torch.float32, 16) == "kernels = torch"
