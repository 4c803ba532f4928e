"""The draft model from its description to a model that computes: what fits the target, its share of the pool's memory, its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvd.config import CacheConfig, ConfigError, ModelConfig
from kvd.executor.kernel_choice import GPU_KERNEL_FAMILY, has_gpu_kernels, kernel_family, why_torch
from kvd.executor.kv_pool import KvPool, PoolRows, row_bytes
from kvd.executor.models.spec import ModelSpec, fit_length
from kvd.executor.models.weights.load import load_decoder
from kvd.executor.models.weights.native import keeps_quantised
from kvd.executor.native_kv_pool import NativeKvPool, native_row_bytes, resolve_kv_type
from kvd.executor.pool_memory import HostMemory
from kvd.executor.step_model import StepModel, TorchModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """How the draft model will run."""

    path: Path
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    why_torch: str
    """Why torch computes, and not the native kernels; empty where they do."""
    on_gpu: bool
    """The Triton kernels compute."""
    quantised: bool
    kv_type: str
    block_size_tokens: int
    max_positions: int
    """Positions that it can compute, at most the target's."""

    @property
    def block_bytes(self) -> int:
        """What it adds to the bytes of a block."""
        return row_bytes(self.spec, self.dtype, self.block_size_tokens) if self.why_torch else native_row_bytes(self.spec, self.kv_type)

    @property
    def kernel_family(self) -> str:
        """What computes, as ``assemble`` names it for the target."""
        if self.on_gpu:
            return GPU_KERNEL_FAMILY
        return f"torch-{self.device.type}" if self.why_torch else kernel_family(quantised=self.quantised)

    def make_pool(self, num_blocks: int, memory: HostMemory | None) -> PoolRows:
        """Rows for the draft's part of the blocks; errors are those of ``PoolRows``."""
        if self.why_torch:
            return KvPool(self.spec, num_blocks, self.block_size_tokens, self.dtype, self.device, memory=memory)
        return NativeKvPool(self.spec, num_blocks, self.kv_type, memory=memory)

    def load(self, pool: PoolRows, *, threads: int, max_rows: int, max_step_tokens: int, progress: Callable[[int, int], None]) -> StepModel:
        """Read the weights; errors are those of the weights' loaders."""
        if isinstance(pool, NativeKvPool):
            from kvd.executor.native_model import NativeModel, load_native_decoder

            decoder: Any = load_native_decoder(
                self.path,
                self.spec,
                dtype=self.dtype,
                quantised=self.quantised,
                threads=threads,
                max_model_len=self.max_positions,
                max_step_tokens=max_step_tokens,
                progress=progress,
            )
            return NativeModel(decoder, pool)
        assert isinstance(pool, KvPool)
        decoder = load_decoder(self.path, self.spec, dtype=self.dtype, device=self.device, progress=progress)
        if self.on_gpu:
            from kvd.executor.gpu.triton_model import TritonModel

            return TritonModel(self.spec, decoder.weights, pool, max_rows=max_rows, max_model_len=self.max_positions)
        from kvd.executor.attention.reference import ReferenceAttention

        return TorchModel(decoder, lambda pool: ReferenceAttention(self.spec, pool), pool)


def plan_draft(
    path: Path,
    described: ModelSpec,
    target: ModelSpec,
    model: ModelConfig,
    cache: CacheConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
) -> DraftPlan:
    """Settle how the model at ``path`` drafts for ``target``, on the same device and with blocks of the same size.

    Raises:
        ConfigError: it has another vocabulary, or the settings don't fit it.
    """
    if described.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft_model = {path}: it has a vocabulary of {described.vocab_size} tokens, the model one of {target.vocab_size}; "
            "a draft model proposes the target's own tokens, so take a smaller model of the same family"
        )
    spec, max_positions = fit_length(described, min(max_model_len, described.max_positions))
    try:
        reason = why_torch(model.kernels, spec, device, dtype, cache.block_size_tokens)
        kv_type = resolve_kv_type(cache.kv_dtype, dtype, reason)
    except ConfigError as error:
        raise ConfigError(f"draft_model = {path}: {error}") from error
    return DraftPlan(
        path=path,
        spec=spec,
        device=device,
        dtype=dtype,
        why_torch=reason,
        on_gpu=has_gpu_kernels(model.kernels, device),
        quantised=not reason and keeps_quantised(spec, model.weights),
        kv_type=kv_type,
        block_size_tokens=cache.block_size_tokens,
        max_positions=max_positions,
    )
