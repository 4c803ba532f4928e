"""The planner's part of forgetting: nodes leave the index and the store's tables, copies under way are waited for, the log goes on in a segment of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.storage.forget_intent import Mark
from kvd.storage.handover import Handover
from kvd.storage.hot_blocks import HotBlocks
from kvd.storage.node_index import NodeIndex
from kvd.storage.operations import Operations
from kvd.storage.ports import Clock
from kvd.wal.writer import WalWriter


@dataclass(frozen=True, slots=True)
class ForgetNodes:
    """``on_done`` gets how many nodes went, the LSN up to which the log may hold them, and an error; then a commit covers all of it or there is an error."""

    marks: tuple[Mark, ...]
    on_done: Callable[[int, int, str], None]


class NodeForgetting:
    """On the planner's thread. ``fault`` says why nothing can be committed; ``begun`` is called when somebody has come to wait for a commit."""

    def __init__(
        self,
        index: NodeIndex,
        hot: HotBlocks,
        operations: Operations,
        handover: Handover,
        wal: WalWriter,
        *,
        clock: Clock,
        fault: Callable[[], str],
        begun: Callable[[], None],
    ) -> None:
        self._index = index
        self._hot = hot
        self._operations = operations
        self._handover = handover
        self._wal = wal
        self._clock = clock
        self._fault = fault
        self._begun = begun

    def take(self, message: ForgetNodes) -> None:
        nodes = [node for mark in message.marks for node in self._index.forget(mark)]
        for node in nodes:
            if self._hot.discard(node):
                self._operations.settle(node.block_hash)
        lsn = self._wal.seal()
        if reason := self._fault():
            message.on_done(len(nodes), lsn, f"the store is degraded: {reason}")
            return

        def copied(_num_blocks: int, _num_bytes: int, error: str) -> None:
            if error:
                message.on_done(len(nodes), lsn, error)
                return
            self._handover.send(commit=True)  # what a copy that was under way has brought goes too
            self._operations.begin(lambda _blocks, _bytes, why: message.on_done(len(nodes), lsn, why), (), self._handover.number)

        self._handover.send(commit=True)
        under_way = self._hot.pending().intersection(node.block_hash for node in nodes)
        self._operations.begin(copied, under_way, self._handover.number)
        for node in nodes:
            if (again := self._index.nodes.get(node.block_hash)) is not None:  # it has come back to memory meanwhile
                self._hot.consider(again, self._clock.monotonic())
        self._begun()

    def refuse(self, message: ForgetNodes) -> None:
        """Persistence has stopped."""
        message.on_done(0, 0, f"persistence has stopped: {self._fault()}")
