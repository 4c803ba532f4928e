"""Who waits for a checkpoint, for which blocks, and up to which change. The planner's own; one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvd.types import BlockHash

OnDone = Callable[[int, int, str], None]
"""Blocks and bytes that became durable meanwhile, and an error or nothing."""


@dataclass(slots=True)
class _Operation:
    on_done: OnDone
    pending: set[BlockHash]
    number: int
    num_blocks: int = 0
    num_bytes: int = 0
    is_committed: bool = False
    error: str = ""


class Operations:
    """Each ends once: when its blocks are settled and the change that it waits for is committed, or by an error."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []

    def __bool__(self) -> bool:
        return bool(self._operations)

    def begin(self, on_done: OnDone, pending: Iterable[BlockHash], number: int) -> None:
        """Wait for ``pending`` (durable, or found to be gone) and for the ``Changes`` of ``number``."""
        self._operations.append(_Operation(on_done, set(pending), number))

    def settle(self, block_hash: BlockHash, error: str = "") -> None:
        """Nothing more happens to this block: it is durable, left memory, or was refused; ``error`` ends those that wait for it so."""
        for operation in self._operations:
            if block_hash in operation.pending:
                operation.pending.discard(block_hash)
                operation.error = operation.error or error

    def committed(self, num_blocks: int, num_bytes: int, number: int) -> None:
        for operation in self._operations:
            operation.num_blocks += num_blocks
            operation.num_bytes += num_bytes
            operation.is_committed = number >= operation.number

    def complete(self) -> None:
        """End those that have what they wait for."""
        done = [each for each in self._operations if each.is_committed and not each.pending]
        if done:
            self._operations = [each for each in self._operations if each not in done]
            for each in done:
                each.on_done(each.num_blocks, each.num_bytes, each.error)

    def fail(self, error: str) -> None:
        """End all of them by ``error``."""
        failed, self._operations = self._operations, []
        for each in failed:
            each.on_done(each.num_blocks, each.num_bytes, error)
