"""Blocks between a GPU's pool and pinned host memory, on side streams, so that steps go on meanwhile.

A copy out begins when everything that the executor's queue held before it is done: its stream waits for the compute stream as it is when the copy's turn comes. Nothing that comes later waits for it, since
blocks being copied out are leased and not written.

A copy in crosses the bus beside the steps that run, into memory of its own, and is put into the pool by the compute stream, in its turn: only that stream writes to the pool. A block that is given up under
the copy may have another owner in the next step already, whose writes must come after the copy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvd.executor.gpu.transfer import EventFence
from kvd.executor.kv_pool import PoolRows
from kvd.types import BlockId


def pinned_memory(num_bytes: int) -> memoryview:
    """Writable memory of the host that the device reads and writes by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy that was launched. ``memory`` and ``rows``, its host's and its device's end, are kept until it is over."""

    fence: EventFence
    memory: memoryview
    rows: Tensor

    def done(self) -> bool:
        return self.fence.done()

    def result(self) -> None:
        self.fence.wait()


class SideStreamCopies:
    """Copies of one pool, each way on a stream of its own. The rows of a copy are gathered on the device and cross the bus as one transfer."""

    def __init__(self, pool: PoolRows) -> None:
        self._pool = pool
        self._out = torch.cuda.Stream(pool.device)
        self._in = torch.cuda.Stream(pool.device)

    def read_blocks(self, block_ids: Sequence[BlockId], memory: memoryview) -> PendingCopy:
        """Copy rows into ``memory``, which is pinned (others would do, slowly).

        Raises:
            IndexError: no such block.
        """
        self._out.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.inference_mode(), torch.cuda.stream(self._out):
            rows = self._pool.rows.index_select(0, self._pool.device_ids(block_ids))
            self._host_rows(memory).copy_(rows, non_blocking=True)
            return PendingCopy(EventFence(self._out), memory, rows)

    def write_blocks(self, block_ids: Sequence[BlockId], memory: memoryview) -> PendingCopy:
        """Copy ``memory``, which is pinned, into rows; errors as ``read_blocks``."""
        compute = torch.cuda.current_stream(self._pool.device)
        with torch.inference_mode():
            ids = self._pool.device_ids(block_ids)
            with torch.cuda.stream(self._in):
                rows = self._host_rows(memory).to(self._pool.device, non_blocking=True)
            compute.wait_stream(self._in)
            self._pool.rows.index_copy_(0, ids, rows)
            return PendingCopy(EventFence(compute), memory, rows)

    def _host_rows(self, memory: memoryview) -> Tensor:
        return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(-1, self._pool.row_bytes)
