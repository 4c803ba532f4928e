"""What a model that was opened shares with the process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

pytestmark = pytest.mark.torch

import torch  # noqa: E402
from tiny_models import make_model  # noqa: E402

from kvd.config import CacheConfig, ConfigError, DaemonConfig, ModelConfig, SchedulerConfig  # noqa: E402
from kvd.executor.assemble import open_model  # noqa: E402
from kvd.executor.head_start import HeadStart  # noqa: E402
from kvd.executor.kernel_choice import why_torch  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.executor.torch_threads import compute_here_with  # noqa: E402
from kvd.model_opening import open_engine  # noqa: E402
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


def on_a_thread(work):
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(work).result()


@pytest.mark.parametrize("where", ["opening", "loading", "executor"])
def test_torch_keeps_its_threads_in_the_rest_of_the_process(tmp_path: Path, where: str):
    """An application's own models, beside the engine, on threads that have not used torch yet."""
    path = make_model(tmp_path / "tiny")
    config = DaemonConfig(
        model=ModelConfig(model=str(path), device="cpu", dtype="float32", kernels="torch", threads=1), cache=CacheConfig(kv_memory=1 << 20)
    )
    before = on_a_thread(torch.get_num_threads)
    on_a_thread(lambda: torch.set_num_threads(3))
    opening = ThreadPoolExecutor(1)
    try:
        opened = opening.submit(open_engine, config, inspect_model(path), tmp_path / "digests.json", HeadStart()).result()
        counts: list[int] = []

        def count() -> None:
            counts.append(torch.get_num_threads())

        if where == "opening":
            opening.submit(count).result()
        elif where == "loading":
            on_a_thread(lambda: (opened.load(lambda *_: None), count()))
        else:
            opened.executor.call(count).result()
        assert counts == [1]
        opened.executor.close(5.0)
        assert on_a_thread(torch.get_num_threads) == 3
    finally:
        opening.shutdown()
        on_a_thread(lambda: torch.set_num_threads(before))


def test_a_word_that_is_no_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("KVD_CPU_ISA", "avx1024")
    for setting in ("auto", "native"):
        with pytest.raises(ConfigError, match="KVD_CPU_ISA=avx1024 in the environment: give one of portable, avx2, avx512"):
            why_torch(setting, None, torch.device("cpu"), torch.float32, 16)
    assert why_torch("torch", None, torch.device("cpu"), torch.float32, 16) == "kernels = torch"


def test_threads_that_say_their_number_at_once_leave_the_process_its_own():
    before = on_a_thread(torch.get_num_threads)
    on_a_thread(lambda: torch.set_num_threads(3))
    try:
        with ThreadPoolExecutor(8) as pool:
            together = Barrier(8, timeout=30)
            list(pool.map(lambda _: (together.wait(), compute_here_with(1)), range(8)))
        assert on_a_thread(torch.get_num_threads) == 3
    finally:
        on_a_thread(lambda: torch.set_num_threads(before))
