"""What begins before torch is there: without torch, taken only if it is what is wanted, and never the cause of another failure."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

from gguf_files import Shape, write_gguf  # noqa: E402

from kvd.config import CacheConfig, ModelConfig, SchedulerConfig  # noqa: E402
from kvd.executor.assemble import open_model  # noqa: E402
from kvd.executor.head_start import begin  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.executor.models.spec import WeightsError  # noqa: E402

needs_kernels = pytest.mark.skipif(native.status().isa is None, reason="the native kernels are not there")
CPU = ModelConfig(device="cpu", dtype="float32")
CACHE = CacheConfig(kv_memory=1 << 20)


def ignore(_done: int, _total: int) -> None:
    """Hear nothing."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", Shape(), "Q4_1")


@pytest.mark.model
@needs_kernels
def test_weights_are_there_without_torch(smollm2: Path):
    code = f"""
import sys
from pathlib import Path
from kvd.config import CacheConfig, ModelConfig
from kvd.executor.head_start import begin
from kvd.executor.models.inspect import inspect_model
path = Path({str(smollm2)!r})
head = begin(path, inspect_model(path), ModelConfig(device="cpu", dtype="float32"), CacheConfig(kv_memory=1 << 20), num_threads=1)
told = []
weights = head.weights.take(dtype="float32", quantised=True, num_threads=1, progress=lambda done, total: told.append((done, total)))
assert weights is not None and len(weights.layers) == 30
assert not told or told[-1][0] == told[-1][1]
assert head.weights.loaded_s > 0 and not head.is_running
assert "torch" not in sys.modules and "gguf" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Loading:
    """In place of ``load_native``: goes on when it may, to the next tensor if there is one, and can be seen to leave nothing."""

    class Weights:
        """What was loaded."""

    def __init__(self, *, has_more: bool):
        self.has_more = has_more
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.weights: weakref.ref[Loading.Weights] | None = None
        self.has_ended = False

    def __call__(self, *_where: object, progress, **_what: object) -> Loading.Weights:
        weights = self.Weights()
        self.weights = weakref.ref(weights)
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        if self.has_more:
            progress(1, 2)
        self.has_ended = True
        return weights


@needs_kernels
@pytest.mark.parametrize("wanted", [("bfloat16", True, 1), ("float32", False, 1), ("float32", True, 2)])
@pytest.mark.parametrize("moment", ["before a tensor", "after the last tensor", "when loaded"])
def test_nothing_is_kept_of_other_weights_than_are_wanted(tiny: Path, monkeypatch, wanted: tuple[str, bool, int], moment: str):
    loading = Loading(has_more=moment == "before a tensor")
    monkeypatch.setattr("kvd.executor.models.weights.native.load_native", loading)
    head = begin(tiny, inspect_model(tiny), CPU, CACHE, num_threads=1)
    assert head.weights is not None
    assert loading.has_begun.wait(30)
    if moment == "when loaded":
        loading.may_go_on.set()
        wait_until_ended(head)
    dtype, quantised, num_threads = wanted
    assert head.weights.take(dtype=dtype, quantised=quantised, num_threads=num_threads, progress=ignore) is None
    loading.may_go_on.set()
    wait_until_ended(head)
    assert loading.has_ended is (moment != "before a tensor")
    assert not head.weights.was_taken
    assert loading.weights is not None
    assert loading.weights() is None


def wait_until_ended(head) -> None:
    give_up = time.monotonic() + 30
    while head.weights.is_loading:
        assert time.monotonic() < give_up
        time.sleep(0.001)


@needs_kernels
def test_nothing_is_kept_of_weights_where_torch_computes(tiny: Path):
    spec = inspect_model(tiny)
    head = begin(tiny, spec, CPU, CACHE, num_threads=1)
    assert head.weights is not None
    torchs = replace(CPU, kernels="torch")
    opened = open_model(tiny, spec, torchs, CACHE, SchedulerConfig(), threads=1, digest_cache=tiny.with_suffix(".digests"), head_start=head)
    opened.load(ignore)
    assert head.weights.take(dtype="float32", quantised=True, num_threads=1, progress=ignore) is None


@pytest.mark.parametrize(("head_dim", "block_size_tokens"), [(64, 32), (72, 16), (272, 16)])
def test_what_the_kernels_do_not_serve_begins_no_weights(tiny: Path, head_dim: int, block_size_tokens: int):
    spec = replace(inspect_model(tiny), head_dim=head_dim)
    head = begin(tiny, spec, CPU, replace(CACHE, block_size_tokens=block_size_tokens), num_threads=1)
    assert head.weights is None
    assert head.memory is not None


@needs_kernels
def test_a_damaged_file_is_told_to_whoever_takes(tiny: Path, tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-4096])
    head = begin(cut, inspect_model(tiny), CPU, CACHE, num_threads=1)
    assert head.weights is not None
    with pytest.raises(WeightsError, match="truncated"):
        head.weights.take(dtype="float32", quantised=True, num_threads=1, progress=ignore)


@pytest.mark.parametrize(
    ("model", "kv_memory", "has_memory"),
    [
        (ModelConfig(device="cuda"), 1 << 20, False),
        (ModelConfig(device="cpu", kernels="torch"), 1 << 20, True),
        (ModelConfig(device="cpu", dtype="float16"), 1 << 20, True),
        (ModelConfig(device="cpu", kernels="torch"), 1 << 60, False),
    ],
)
def test_what_is_refused_later_begins_nothing_and_raises_nothing(tiny: Path, model: ModelConfig, kv_memory: int, has_memory: bool):
    head = begin(tiny, inspect_model(tiny), model, CacheConfig(kv_memory=kv_memory), num_threads=1)
    assert head.weights is None
    assert (head.memory is not None) is has_memory
