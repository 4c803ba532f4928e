"""What storage needs of the engine's side: the block bytes, the leases, the inbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvd.commands import CheckpointDone, RecipeDurable
from kvd.types import BlockHash, BlockId, KvGroup


__all__ = ["BlockIO", "KvGroup", "Leases", "StorageInbox", "Ticket"]


class Ticket(Protocol):
    """A copy in the executor's queue."""

    @property
    def error(self) -> BaseException | None:
        """What the finished copy raised; with an error the bytes were not (all) copied and must not be used."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...


class BlockIO(Protocol):
    """Copies block rows between the pool and plain memory, in the order of the executor's one queue.

    ``memory`` is ``len(block_ids) * row_bytes`` long, one row after the other; it stays untouched by others until the ticket is done.
    """

    def groups(self) -> tuple[KvGroup, ...]: ...

    def copy_out(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> Ticket: ...

    def copy_in(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> Ticket: ...


class Leases(Protocol):
    """The cache, as the checkpoint sees it (engine thread only)."""

    def lease(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Hold a ready block against eviction and writing; False if it no longer holds that content."""

    def end_lease(self, block_id: BlockId) -> None: ...


class StorageInbox(Protocol):
    """The engine's inbox: any thread may put, a put never blocks."""

    def put_internal(self, command: RecipeDurable | CheckpointDone) -> None: ...
