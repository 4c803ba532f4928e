"""What begins before torch is there: without torch, taken only if it is what is wanted, and never the cause of another failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.model]

from kvd.config import CacheConfig, ModelConfig  # noqa: E402
from kvd.executor.head_start import begin  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.executor.models.spec import WeightsError  # noqa: E402

needs_kernels = pytest.mark.skipif(native.status().isa is None, reason="the native kernels are not there")


def ignore(_done: int, _total: int) -> None:
    """Hear nothing."""


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


@needs_kernels
def test_other_weights_than_are_wanted_are_not_taken(smollm2: Path):
    spec = inspect_model(smollm2)
    model = ModelConfig(device="cpu", dtype="float32")
    head = begin(smollm2, spec, model, CacheConfig(kv_memory=1 << 20), num_threads=1)
    assert head.weights is not None
    for wanted in (("bfloat16", True, 1), ("float32", False, 1), ("float32", True, 2)):
        assert head.weights.take(dtype=wanted[0], quantised=wanted[1], num_threads=wanted[2], progress=ignore) is None
    assert not head.weights.was_taken
    assert head.weights.take(dtype="float32", quantised=True, num_threads=1, progress=ignore) is not None


@needs_kernels
def test_a_damaged_file_is_told_to_whoever_takes(smollm2: Path, tmp_path: Path):
    spec = inspect_model(smollm2)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(smollm2.read_bytes()[: 4 << 20])
    head = begin(cut, spec, ModelConfig(device="cpu", dtype="float32"), CacheConfig(kv_memory=1 << 20), num_threads=1)
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
def test_what_is_refused_later_begins_nothing_and_raises_nothing(smollm2: Path, model: ModelConfig, kv_memory: int, has_memory: bool):
    head = begin(smollm2, inspect_model(smollm2), model, CacheConfig(kv_memory=kv_memory), num_threads=1)
    assert head.weights is None
    assert (head.memory is not None) is has_memory
