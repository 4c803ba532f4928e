"""From configuration to a runnable executor: device, dtype and pool size are decided here, weights are loaded here.

The pool exists before the weights are read, so that storage can rehydrate into it while they load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvd.config import CacheConfig, ConfigError, ModelConfig, SchedulerConfig
from kvd.executor.host_memory import available_bytes, check_pool_fits
from kvd.executor.kernel_choice import kernel_family, why_torch
from kvd.executor.kv_pool import KvPool, PoolRows, row_bytes
from kvd.executor.models.fingerprint import fingerprint
from kvd.executor.models.spec import ModelSpec, fit_length
from kvd.executor.models.weights.load import load_decoder
from kvd.executor.models.weights.native import keeps_quantised
from kvd.executor.native_kv_pool import NativeKvPool, native_row_bytes, resolve_kv_type
from kvd.executor.runner import ModelRunner, TorchRunner
from kvd.step import ExecutorOutput, SchedulerOutput
from kvd.types import BlockId, KvGroup

_AUTO_POOL_MAX_BYTES = 4 << 30
_GPU_POOL_FRACTION = 0.9


def resolve_device(name: str) -> torch.device:
    """The device of ``ModelConfig.device``.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r}: torch {torch.__version__} finds no CUDA device here; use cpu or auto")
    return device


def resolve_dtype(name: str, device: torch.device, weights_dtype: str) -> torch.dtype:
    """The dtype of weights and KV; ``auto`` as documented in ``ModelConfig.dtype``.

    Raises:
        ConfigError: float16 on a CPU.
    """
    if name == "auto":
        if device.type == "cuda":
            return {"float16": torch.float16, "float32": torch.float32}.get(weights_dtype, torch.bfloat16)
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32  # noqa: SLF001
    if name == "float16" and device.type == "cpu":
        raise ConfigError("dtype = 'float16': only on cuda; on cpu use float32 or bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pool_bytes(configured: int, device: torch.device) -> int:
    """Bytes of the KV pool; 0 means automatic, from the memory that is free now.

    Raises:
        ConfigError: more than this machine has.
    """
    if configured:
        if device.type == "cpu":
            check_pool_fits(configured)
        return configured
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_POOL_FRACTION)
    return min(_AUTO_POOL_MAX_BYTES, available_bytes() // 2)


def compute_threads(configured: int) -> int:
    """Compute threads of the CPU executor; 0 means the physical cores that this process may use."""
    if configured:
        return configured
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.exists() else str(cpu))
    return len(siblings)


class LateRunner:
    """The runner before its weights are there: blocks can be read and written at once, steps only after ``attach``."""

    def __init__(self, pool: PoolRows, fingerprint: bytes) -> None:
        self._pool = pool
        self._groups = (KvGroup("target", pool.row_bytes, fingerprint),)
        self._runner: ModelRunner | None = None

    def attach(self, runner: ModelRunner) -> None:
        self._runner = runner

    def groups(self) -> tuple[KvGroup, ...]:
        return self._groups

    def execute(self, step: SchedulerOutput) -> ExecutorOutput:
        assert self._runner is not None, "a step before the weights"
        return self._runner.execute(step)

    def read_blocks(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> None:
        assert group == "target"
        self._pool.read_blocks(block_ids, memory)

    def write_blocks(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> None:
        assert group == "target"
        self._pool.write_blocks(block_ids, memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model whose weights are not loaded yet, and its pool, ready to be filled."""

    path: Path
    spec: ModelSpec
    pool: PoolRows
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_rows: int
    max_step_tokens: int
    threads: int
    kernel_family: str
    why_torch: str
    """Why torch computes, and not the native kernels; empty where they do."""
    quantised: bool
    """Quantised weights stay so in memory."""
    fingerprint: bytes
    runner: LateRunner

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read the weights and run the warm-up steps; then ``runner`` takes steps. ``progress(done_bytes, total_bytes)`` is called as they come."""
        runner = self._make_runner(progress)
        runner.warm_up()
        self.runner.attach(runner)

    def _make_runner(self, progress: Callable[[int, int], None]) -> ModelRunner:
        if isinstance(self.pool, KvPool):
            decoder = load_decoder(self.path, self.spec, dtype=self.dtype, device=self.device, progress=progress)
            return TorchRunner(decoder, self.spec, self.pool, max_rows=self.max_rows, max_model_len=self.max_model_len)
        from kvd.executor.native_model import NativeModel, load_native_decoder

        assert isinstance(self.pool, NativeKvPool)
        native_decoder = load_native_decoder(
            self.path,
            self.spec,
            dtype=self.dtype,
            quantised=self.quantised,
            threads=self.threads,
            max_model_len=self.max_model_len,
            max_step_tokens=self.max_step_tokens,
            progress=progress,
        )
        model = NativeModel(native_decoder, self.pool)
        return ModelRunner(model, self.pool, self.spec.vocab_size, max_rows=self.max_rows, max_model_len=self.max_model_len)


def open_model(
    path: Path,
    described: ModelSpec,
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    threads: int,
    digest_cache: Path,
) -> OpenedModel:
    """Decide device, dtype and pool, and allocate the pool (pages touched, so that no first request pays for them).

    ``described`` is what ``inspect_model(path)`` says.

    Raises:
        ConfigError: the pool is too small for one sequence or can't be allocated, or the settings don't fit the machine.
        ModelError: the model can't be served as it is (executor/models/spec.py).
    """
    spec, max_model_len = fit_length(described, model.max_model_len)
    device = resolve_device(model.device)
    dtype = resolve_dtype(model.dtype, device, spec.weights_dtype)
    reason = why_torch(model.kernels, spec, device, dtype, cache.block_size_tokens)
    # the native kernels have threads of their own; torch only samples beside them
    torch.set_num_threads(threads if reason else 1)
    quantised = not reason and keeps_quantised(spec, model.weights)
    kv_type = resolve_kv_type(cache.kv_dtype, dtype, reason)
    block_bytes = row_bytes(spec, dtype, cache.block_size_tokens) if reason else native_row_bytes(spec, kv_type)
    num_blocks = pool_bytes(cache.kv_memory, device) // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_memory: {cache.kv_memory} bytes hold {num_blocks} blocks of {block_bytes} bytes; give at least {2 * block_bytes}"
        )
    try:
        pool = KvPool(spec, num_blocks, cache.block_size_tokens, dtype, device) if reason else NativeKvPool(spec, num_blocks, kv_type)
    except (RuntimeError, MemoryError) as error:  # torch's own errors are RuntimeErrors
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"kv_memory = {cache.kv_memory}: {num_blocks * block_bytes} bytes can't be allocated on {device}: {reason}"
        ) from error
    family = f"torch-{device.type}" if reason else kernel_family(quantised=quantised)
    digest = fingerprint(
        path,
        spec,
        dtype=str(dtype).removeprefix("torch."),
        block_size_tokens=cache.block_size_tokens,
        layout=pool.layout,
        kernel_family=family,
        cache_file=digest_cache,
    )
    return OpenedModel(
        path=path,
        spec=spec,
        pool=pool,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_rows=scheduler.max_running,
        max_step_tokens=scheduler.max_tokens_per_step,
        threads=threads,
        kernel_family=family,
        why_torch=reason,
        quantised=quantised,
        fingerprint=digest,
        runner=LateRunner(pool, digest),
    )
