"""The pool whose rows the native CPU kernels read: no shuffling between a load and the product that it feeds.

For each layer K, then V: K ``[kv_head, head_dim / 2, 16 positions, 2]``, V ``[kv_head, 16 positions / 2, head_dim, 2]`` (float32:
``[kv_head, head_dim, 16]`` and ``[kv_head, 16, head_dim]``); int8 planes end with float32 scales ``[kv_head, 16 positions]``, symmetric:
value = code * scale. A block of zeros holds zeros.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch

from kvd.config import ConfigError
from kvd.executor.kernels.cpu.native import BLOCK_SIZE_TOKENS
from kvd.executor.kv_pool import KvShape, PoolRows
from kvd.executor.pool_memory import HostMemory

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_SCALE_BYTES = 4


def resolve_kv_type(setting: str, dtype: torch.dtype, why_torch: str) -> str:
    """How K and V are kept, by name: ``setting`` is ``CacheConfig.kv_dtype``, ``dtype`` what the model is computed in.

    ``why_torch`` says why torch computes the model; empty: the native kernels do.

    Raises:
        ConfigError: torch keeps K and V as it computes them, and something else was asked for.
    """
    computed = str(dtype).removeprefix("torch.")
    if setting in ("auto", computed):
        return computed
    if why_torch:
        raise ConfigError(
            f"kv_dtype = {setting!r}: only the native CPU kernels keep KV otherwise than they compute, and here torch computes in {computed}"
            f" ({why_torch}); use kv_dtype = 'auto', or the native kernels (`kvd doctor` shows what they need)"
        )
    return setting


def native_row_bytes(spec: KvShape, kv_type: str) -> int:
    """Bytes of one block over all layers, scales included."""
    rows = spec.num_layers * 2 * spec.num_kv_heads * BLOCK_SIZE_TOKENS
    return rows * (spec.head_dim * _DTYPES[kv_type].itemsize + (_SCALE_BYTES if kv_type == "int8" else 0))


class NativeKvPool(PoolRows):
    """Rows in the native kernels' order on the CPU, blocks of 16 positions; ``kv_type`` is float32, bfloat16 or int8.

    Raises:
        RuntimeError, OSError: the pool could not be allocated.
    """

    def __init__(self, spec: KvShape, num_blocks: int, kv_type: str, *, memory: HostMemory | None = None) -> None:
        super().__init__(num_blocks, native_row_bytes(spec, kv_type), BLOCK_SIZE_TOKENS, _DTYPES[kv_type], "cpu", memory=memory)
        self._spec = spec
        self.kv_type = kv_type
        inside = "[kv_head,dim,position],v[kv_head,position,dim]"
        if kv_type != "float32":
            inside = "[kv_head,dim/2,position,2],v[kv_head,position/2,dim,2]"
        scales = "+scales[kv_head,position]" if kv_type == "int8" else ""
        self.layout = f"native-{kv_type}:block16[layer,k{inside}{scales}].v1"

    @property
    def address(self) -> int:
        """Where row 0 stands."""
        return self._rows.data_ptr()

    def clear_positions(self, block_ids: np.ndarray, offsets: np.ndarray) -> None:
        """Nothing: the kernels don't read behind a row's last position."""

    def scratch(self, num_blocks: int) -> Self:
        """Another pool of the same kind, for steps that nobody keeps."""
        return type(self)(self._spec, num_blocks, self.kv_type)
