"""The paged KV pool of one KV group: one contiguous tensor, block-major, so that a block is one run of bytes.

A pool row is opaque outside the executor. ``KvPool`` holds it in the order that torch reads, ``[num_layers, 2, block_size_tokens, num_kv_heads,
head_dim]``; ``native_kv_pool.NativeKvPool`` in that of the native kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import torch

from kvd.executor.pool_memory import HostMemory, PoolMemory
from kvd.types import BlockId

LAYOUT = "block[layer,kv,position,kv_head,head_dim].v1"
"""Names the order inside a row; part of the fingerprint."""


class KvShape(Protocol):
    """The part of a model's spec that shapes its KV."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def row_bytes(spec: KvShape, dtype: torch.dtype, block_size_tokens: int) -> int:
    """Bytes of one block over all layers."""
    return spec.num_layers * 2 * block_size_tokens * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class PoolRows(ABC):
    """``num_blocks`` rows of ``row_bytes`` on ``device``, zero at first: a block's bytes, whatever their order.

    ``dtype`` is that of the values of K and V. ``memory`` is taken on the host, if it is there and large enough.

    Raises:
        RuntimeError, OSError: the pool could not be allocated.
    """

    layout: str
    """Names the order inside a row; part of the fingerprint."""

    def __init__(
        self,
        num_blocks: int,
        row_bytes: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        memory: HostMemory | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.row_bytes = row_bytes
        self.block_size_tokens = block_size_tokens
        self.dtype = dtype
        self.device = torch.device(device)
        if self.device.type == "cpu":
            size = num_blocks * row_bytes
            self._memory = memory if memory is not None and memory.num_bytes >= size else PoolMemory(size)
            self._rows = torch.frombuffer(self._memory.buffer, dtype=torch.uint8, count=size).view(num_blocks, row_bytes)
        else:
            self._rows = torch.zeros((num_blocks, row_bytes), dtype=torch.uint8, device=self.device)

    @property
    def rows(self) -> torch.Tensor:
        """uint8 ``[num_blocks, row_bytes]``."""
        return self._rows

    def wait_touched(self) -> float:
        """Return when no page of the pool is left to be made by who writes to it first: the seconds that making them took, beside other work."""
        if self.device.type != "cpu":
            return 0.0
        self._memory.wait_touched()
        return self._memory.touched_s

    @abstractmethod
    def scratch(self, num_blocks: int) -> Self:
        """Another pool of the same kind, for steps that nobody keeps."""

    def read_blocks(self, block_ids: Sequence[BlockId], memory: memoryview) -> None:
        """Copy rows into writable ``memory``, ``len(block_ids) * row_bytes`` long, byte for byte.

        Raises:
            IndexError: no such block.
        """
        ids = self._checked(block_ids)
        target = np.frombuffer(memory, dtype=np.uint8).reshape(len(ids), self.row_bytes)
        if self.device.type == "cpu":
            np.take(self._rows.numpy(), ids, axis=0, out=target, mode="clip")  # ids are checked; clip alone writes unbuffered
        else:
            torch.from_numpy(target).copy_(self._rows.index_select(0, self._ids(ids)))

    def write_blocks(self, block_ids: Sequence[BlockId], memory: memoryview) -> None:
        """Copy ``memory`` into rows, byte for byte.

        Raises:
            IndexError: no such block.
        """
        ids = self._checked(block_ids)
        source = np.frombuffer(memory, dtype=np.uint8).reshape(len(ids), self.row_bytes)
        if self.device.type == "cpu":
            self._rows.numpy()[ids] = source
        else:
            self._rows.index_copy_(0, self._ids(ids), torch.from_numpy(source.copy()).to(self.device))

    def copy_blocks(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy whole blocks; every source is read before any target is written. Targets are distinct."""
        if not sources:
            return
        source_ids, target_ids = self._checked(sources), self._checked(targets)
        if self.device.type == "cpu":
            rows = self._rows.numpy()
            rows[target_ids] = rows[source_ids]  # torch's own indexing moves byte by byte
        else:
            self._rows.index_copy_(0, self._ids(target_ids), self._rows.index_select(0, self._ids(source_ids)))

    def clear_blocks(self, block_ids: np.ndarray) -> None:
        """Zero whole blocks, so that nothing of their last use (a NaN least of all) is left behind positions not yet written."""
        if not len(block_ids):
            return
        if self.device.type == "cpu":
            self._rows.numpy()[self._checked(block_ids)] = 0
        else:
            self._rows.index_fill_(0, self._ids(block_ids), 0)

    @abstractmethod
    def clear_positions(self, block_ids: np.ndarray, offsets: np.ndarray) -> None:
        """Positions, by block and place in it, that were computed and are not part of any sequence hold nothing that could reach others, as a NaN could."""

    def _checked(self, block_ids: Sequence[BlockId] | np.ndarray) -> np.ndarray:
        ids = np.asarray(block_ids, dtype=np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.num_blocks):
            raise IndexError(f"block ids {ids.min()}..{ids.max()} of a pool of {self.num_blocks}")
        return ids

    def device_ids(self, block_ids: Sequence[BlockId]) -> torch.Tensor:
        """The ids, checked, as int64 on the pool's device.

        Raises:
            IndexError: no such block.
        """
        return self._ids(self._checked(block_ids))

    def _ids(self, ids: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(ids)
        # from pageable memory the host would wait for the steps that the device has in hand
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


class KvPool(PoolRows):
    """Rows in the order ``[num_layers, 2, block_size_tokens, num_kv_heads, head_dim]``."""

    layout = LAYOUT

    def __init__(
        self,
        spec: KvShape,
        num_blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        memory: HostMemory | None = None,
    ) -> None:
        super().__init__(num_blocks, row_bytes(spec, dtype, block_size_tokens), block_size_tokens, dtype, device, memory=memory)
        self._spec = spec
        self.num_layers = spec.num_layers
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        values = self._rows.view(-1).view(dtype)
        self.planes = values.view(num_blocks * spec.num_layers * 2, -1)
        """K or V of one layer of one block a row: ``(block * num_layers + layer) * 2 + kv``, kv 0 for K."""
        self.positions = values.view(-1, spec.num_kv_heads * spec.head_dim)
        """K or V of one position a row: ``plane * block_size_tokens + offset``."""

    def clear_positions(self, block_ids: np.ndarray, offsets: np.ndarray) -> None:
        planes = self._checked(block_ids)[:, None] * (2 * self.num_layers) + np.arange(2 * self.num_layers)
        self.positions.index_fill_(0, self._ids((planes * self.block_size_tokens + offsets[:, None]).reshape(-1)), 0)

    def scratch(self, num_blocks: int) -> Self:
        """Another pool of the same kind, for steps that nobody keeps."""
        return type(self)(self._spec, num_blocks, self.block_size_tokens, self.dtype, self.device)
