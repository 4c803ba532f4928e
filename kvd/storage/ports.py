"""What storage needs of the engine's side: the block bytes, the leases, the cache, the inbox, time and a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.commands import CheckpointDone, ForgetDone, LoadDone, RecipeDurable
from kvd.types import BlockHash, BlockId, KvGroup

__all__ = ["BlockIO", "Clock", "KvGroup", "Leases", "LoadTarget", "Log", "RehydrationCache", "StorageInbox", "Ticket"]


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

    @property
    def host_memory(self) -> Callable[[int], memoryview]:
        """Makes writable memory of so many bytes that blocks are copied to and from at full speed."""

    def copy_out(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> Ticket: ...

    def copy_in(self, group: str, block_ids: Sequence[BlockId], memory: memoryview) -> Ticket: ...


class Leases(Protocol):
    """The cache, as the checkpoint sees it (engine thread only)."""

    def lease(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Hold a ready block against eviction and writing; False if it no longer holds that content."""

    def end_lease(self, block_id: BlockId) -> None: ...


class LoadTarget(Protocol):
    """A filling node that waits for its bytes."""

    @property
    def node(self) -> Any: ...

    @property
    def block_id(self) -> BlockId: ...

    @property
    def block_hash(self) -> BlockHash: ...

    @property
    def is_wanted(self) -> bool:
        """False once the node has left the tree: the block may be another's by then."""


class RehydrationCache(Protocol):
    """The cache, as rehydration sees it, before the engine loop runs."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def max_pinned_blocks(self) -> int:
        """Distinct blocks that pins may hold together."""

    def begin_load(self, namespace: Namespace, blocks: Sequence[tuple[bytes, int]], origin: BlockOrigin) -> Sequence[LoadTarget] | None:
        """Filling nodes for the (packed tokens, uses) of a chain from its root that are not in the tree yet; None without room."""

    def complete_fill(self, nodes: Sequence[Any]) -> Any: ...

    def fail_fill(self, nodes: Sequence[Any]) -> Any: ...


class StorageInbox(Protocol):
    """The engine's inbox: any thread may put, a put never blocks."""

    def put_internal(self, command: RecipeDurable | CheckpointDone | ForgetDone | LoadDone) -> None: ...


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, never going back."""

    def unix(self) -> float:
        """Seconds since the epoch."""


class Log(Protocol):
    """A structured log, as structlog's."""

    def debug(self, event: str, **fields: Any) -> Any: ...

    def info(self, event: str, **fields: Any) -> Any: ...

    def warning(self, event: str, **fields: Any) -> Any: ...

    def error(self, event: str, **fields: Any) -> Any: ...
