"""From configuration to a runnable executor: device, dtype and pool size are decided here, weights are loaded here.

The pool exists before the weights are read, so that storage can rehydrate into it while they load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch

from kvd.config import CacheConfig, ConfigError, ModelConfig, SchedulerConfig
from kvd.executor.adapter_target import ModelAdapters
from kvd.executor.draft_opening import DraftPlan, plan_draft
from kvd.executor.head_start import HeadStart
from kvd.executor.host_memory import automatic_pool_bytes, check_pool_fits, map_memory
from kvd.executor.kernel_choice import GPU_KERNEL_FAMILY, has_gpu_kernels, kernel_family, why_torch
from kvd.executor.kernels.cpu import native
from kvd.executor.kv_pool import KvPool, PoolRows, row_bytes
from kvd.executor.models.decoder import allocate_weights
from kvd.executor.models.fingerprint import fingerprint
from kvd.executor.models.spec import ModelSpec, fit_length
from kvd.executor.models.weights.load import load_decoder
from kvd.executor.models.weights.native import keeps_quantised
from kvd.executor.native_kv_pool import NativeKvPool, native_row_bytes, resolve_kv_type
from kvd.executor.runner import ModelRunner, TorchRunner
from kvd.executor.torch_adapters import TorchAdapter
from kvd.executor.torch_threads import compute_here_with
from kvd.executor.worker import BlockCopies, Later
from kvd.step import TILE_TOKENS, ExecutorOutput, SchedulerOutput
from kvd.types import BlockId, KvGroup

_GPU_POOL_FRACTION = 0.9
_PAGE_BYTES = 4096


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


def pool_bytes(configured: int, device: torch.device, weights_bytes: int = 0) -> int:
    """Bytes of the KV pool; 0 means automatic, from the memory that is free now; on cuda ``weights_bytes`` of it are the weights'.

    Raises:
        ConfigError: more than this machine has.
    """
    if configured:
        if device.type == "cpu":
            check_pool_fits(configured)
        return configured
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, int((free - weights_bytes) * _GPU_POOL_FRACTION))
    return automatic_pool_bytes()


def weights_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What torch's decoder needs for the weights."""
    weights = allocate_weights(spec, dtype=dtype, device=torch.device("meta"))
    tensors = {weights.embedding, weights.final_norm, weights.head}
    for layer in weights.layers:
        tensors.update(getattr(layer, each.name) for each in fields(layer))
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class LateRunner:
    """The runner before its weights are there: blocks can be read and written at once, steps only after ``attach``."""

    def __init__(self, pool: PoolRows, fingerprint: bytes, copies: BlockCopies | None = None) -> None:
        self._copies = pool if copies is None else copies
        self._groups = (KvGroup("target", pool.row_bytes, fingerprint),)
        self._runner: ModelRunner | None = None

    def attach(self, runner: ModelRunner) -> None:
        self._runner = runner

    def groups(self) -> tuple[KvGroup, ...]:
        return self._groups

    def execute(self, step: SchedulerOutput) -> ExecutorOutput | Later:
        assert self._runner is not None, "a step before the weights"
        return self._runner.launch(step)

    def read_blocks(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> Later | None:
        assert group == "target"
        return self._copies.read_blocks(block_ids, memory)

    def write_blocks(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> Later | None:
        assert group == "target"
        if self._runner is not None:
            self._runner.settle()  # a step under way may still write to a block that its row has lost; no lease covers those
            self._runner.forget_draft(block_ids)
        return self._copies.write_blocks(block_ids, memory)


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
    torch_threads: int
    """What each thread that computes here gives torch (``compute_here_with``)."""
    kernel_family: str
    why_torch: str
    """Why torch computes, and not the native kernels; empty where they do."""
    quantised: bool
    """Quantised weights stay so in memory."""
    fingerprint: bytes
    runner: LateRunner
    adapters: ModelAdapters
    head_start: HeadStart
    times: dict[str, float] = field(default_factory=dict)
    """Seconds that parts of ``load`` took, by name, some of them beside each other."""
    host_memory: Callable[[int], memoryview]
    """Makes memory that blocks are copied to and from at full speed."""
    max_steps_in_flight: int
    """Steps that keep the device busy: more than one where launching is not computing."""
    shared_tile_tokens: int
    """Positions of a tile of attention: runs of blocks that rows share are of use in whole ones."""
    draft: DraftPlan | None = None
    draft_pool: PoolRows | None = None
    """As many rows as ``pool`` has, where there is a draft model."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read the weights and run the warm-up steps; then ``runner`` takes steps. ``progress(done_bytes, total_bytes)`` is called as they come."""
        begun_s = time.monotonic()
        compute_here_with(self.torch_threads)
        early = self.head_start.weights
        if early is not None and isinstance(self.pool, KvPool):
            early.discard()  # they are the native kernels'
        runner = self._make_runner(progress)
        if self.draft is not None and self.draft_pool is not None:
            self._attach_draft(runner, self.draft, self.draft_pool, progress)
        loaded_s = time.monotonic()
        runner.warm_up()
        self.times["warm_up"] = time.monotonic() - loaded_s
        self.times["weights"] = early.loaded_s if early is not None and early.was_taken else loaded_s - begun_s
        self.times["pool_pages"] = self.pool.wait_touched()
        self.runner.attach(runner)

    def _make_runner(self, progress: Callable[[int, int], None]) -> ModelRunner:
        if self.kernel_family == GPU_KERNEL_FAMILY:
            return self._make_gpu_runner(progress)
        if isinstance(self.pool, KvPool):
            decoder = load_decoder(self.path, self.spec, dtype=self.dtype, device=self.device, progress=progress)
            runner = TorchRunner(decoder, self.spec, self.pool, max_rows=self.max_rows, max_model_len=self.max_model_len)
            self.adapters.attach(runner.adapters, partial(TorchAdapter, dtype=self.dtype, device=self.device))
            return runner
        from kvd.executor.native_adapters import pack_adapter
        from kvd.executor.native_model import NativeModel, load_native_decoder
        from kvd.executor.native_runner import NativeRunner

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
            early=self.head_start.weights,
        )
        model = NativeModel(native_decoder, self.pool)
        native_runner = NativeRunner(model, self.pool, self.spec.vocab_size, max_rows=self.max_rows, max_model_len=self.max_model_len)
        dtype = str(self.dtype).removeprefix("torch.")
        self.adapters.attach(native_runner.adapters, partial(pack_adapter, decoder=native_decoder, dtype=dtype))
        return native_runner

    def _attach_draft(self, runner: ModelRunner, draft: DraftPlan, pool: PoolRows, progress: Callable[[int, int], None]) -> None:
        begun_s = time.monotonic()
        model = draft.load(pool, threads=self.threads, max_rows=self.max_rows, max_step_tokens=self.max_step_tokens, progress=progress)
        runner.attach_draft(model, pool, max_tokens=self.max_step_tokens, max_positions=draft.max_positions)
        ModelRunner(model, pool, draft.spec.vocab_size, max_rows=self.max_rows, max_model_len=draft.max_positions).warm_up()
        self.times["draft"] = time.monotonic() - begun_s

    def _make_gpu_runner(self, progress: Callable[[int, int], None]) -> ModelRunner:
        from kvd.executor.gpu.decode_graphs import CudaGraphs
        from kvd.executor.gpu.device_runner import DeviceRunner
        from kvd.executor.gpu.triton_model import TritonModel

        assert isinstance(self.pool, KvPool)
        weights = load_decoder(self.path, self.spec, dtype=self.dtype, device=self.device, progress=progress).weights
        limits = {"max_rows": self.max_rows, "max_model_len": self.max_model_len}
        model = TritonModel(self.spec, weights, self.pool, graphs=CudaGraphs(self.device), **limits)
        return DeviceRunner(model, self.pool, self.spec.vocab_size, **limits)


def open_model(
    path: Path,
    described: ModelSpec,
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    threads: int,
    digest_cache: Path,
    head_start: HeadStart | None = None,
    draft: tuple[Path, ModelSpec] | None = None,
) -> OpenedModel:
    """Decide device, dtype and pool, and allocate the pool (pages touched, so that no first request pays for them).

    ``described`` is what ``inspect_model(path)`` says; ``head_start`` what was begun before torch was there; ``draft`` the draft model's path and what it is.
    Of a block the pool's memory holds what the model keeps and what the draft model keeps.

    Raises:
        ConfigError: the pool is too small for one sequence or can't be allocated, or the settings don't fit the machine.
        ModelError: the model can't be served as it is (executor/models/spec.py).
    """
    spec, max_model_len = fit_length(described, model.max_model_len)
    device = resolve_device(model.device)
    dtype = resolve_dtype(model.dtype, device, spec.weights_dtype)
    reason = why_torch(model.kernels, spec, device, dtype, cache.block_size_tokens)
    drafting = None
    if draft is not None:
        draft_dtype = resolve_dtype(model.dtype, device, draft[1].weights_dtype)
        drafting = plan_draft(*draft, spec, model, cache, device=device, dtype=draft_dtype, max_model_len=max_model_len)
    # the native kernels have threads of their own; torch only samples beside them
    torch_threads = threads if reason or (drafting is not None and drafting.why_torch) else 1
    compute_here_with(torch_threads)
    if device.type == "cpu" and native.status().isa is not None:
        native.pool(threads)  # also where torch computes: the sampler draws with it
    quantised = not reason and keeps_quantised(spec, model.weights)
    kv_type = resolve_kv_type(cache.kv_dtype, dtype, reason)
    block_bytes = row_bytes(spec, dtype, cache.block_size_tokens) if reason else native_row_bytes(spec, kv_type)
    head_start = head_start or HeadStart()
    memory = head_start.memory if device.type == "cpu" else None
    if memory is not None:
        num_bytes = memory.num_bytes
    else:
        on_device = 0
        if device.type == "cuda":
            on_device = weights_bytes(spec, dtype) + (0 if drafting is None else weights_bytes(drafting.spec, drafting.dtype))
        num_bytes = pool_bytes(cache.kv_memory, device, on_device)
    both_bytes = block_bytes + (0 if drafting is None else drafting.block_bytes)
    gap_bytes = 0 if drafting is None else _PAGE_BYTES  # the draft model's part begins with a page
    num_blocks = (num_bytes - gap_bytes) // both_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_memory: {cache.kv_memory} bytes hold {max(0, num_blocks)} blocks of {both_bytes} bytes; give at least {2 * both_bytes + gap_bytes}"
        )
    try:
        if reason:
            pool: PoolRows = KvPool(spec, num_blocks, cache.block_size_tokens, dtype, device, memory=memory)
        else:
            pool = NativeKvPool(spec, num_blocks, kv_type, memory=memory)
        draft_pool = None
        if drafting is not None:
            after = -(-num_blocks * block_bytes // _PAGE_BYTES) * _PAGE_BYTES
            part = None if memory is None else memory.part(after, num_blocks * drafting.block_bytes)
            draft_pool = drafting.make_pool(num_blocks, part)
    except (RuntimeError, MemoryError, OSError) as error:  # torch's own errors are RuntimeErrors
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"kv_memory = {cache.kv_memory}: {num_blocks * both_bytes} bytes can't be allocated on {device}: {reason}"
        ) from error
    on_gpu = has_gpu_kernels(model.kernels, device)
    family = GPU_KERNEL_FAMILY if on_gpu else f"torch-{device.type}" if reason else kernel_family(quantised=quantised)
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
        torch_threads=torch_threads,
        kernel_family=family,
        why_torch="" if on_gpu else reason,
        quantised=quantised,
        fingerprint=digest,
        runner=LateRunner(pool, digest, _side_stream_copies(pool) if on_gpu else None),
        adapters=ModelAdapters(spec, "the GPU kernels compute no adapters; leave it empty, or set kernels = torch" if on_gpu else ""),
        head_start=head_start,
        host_memory=_pinned_memory() if on_gpu else map_memory,
        max_steps_in_flight=1 if reason and not on_gpu else 2,
        shared_tile_tokens=_gpu_tile_tokens(dtype) if on_gpu else TILE_TOKENS,
        draft=drafting,
        draft_pool=draft_pool,
    )


def _side_stream_copies(pool: PoolRows) -> BlockCopies:
    from kvd.executor.gpu.block_copies import SideStreamCopies

    return SideStreamCopies(pool)


def _gpu_tile_tokens(dtype: torch.dtype) -> int:
    from kvd.executor.kernels.triton.attention import tile_tokens

    return tile_tokens(dtype)


def _pinned_memory() -> Callable[[int], memoryview]:
    from kvd.executor.gpu.block_copies import pinned_memory

    return pinned_memory
