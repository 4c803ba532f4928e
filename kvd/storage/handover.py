"""What the index has that the store has not, handed over in numbered sets, each kept until it is durable. The planner's own; one thread."""

from __future__ import annotations

from collections import deque

from kvd.storage.node_index import NodeIndex
from kvd.storage.store_thread import Changes, StoreThread
from kvd.wal.writer import WalWriter


class Handover:
    """``number`` is the last set's; ``store`` is set before the first ``send``."""

    def __init__(self, index: NodeIndex, wal: WalWriter) -> None:
        self._index = index
        self._wal = wal
        self._outstanding: deque[Changes] = deque()
        self.store: StoreThread | None = None
        self.number = 0
        self._epoch = 0
        self.uncommitted = False
        """Something was handed over, or is about to be, that no commit has covered."""

    @property
    def has_changes(self) -> bool:
        index = self._index
        return bool(index.dirty or index.removed or index.dropped_bytes or index.dropped_keys or index.dirty_namespaces or index.dirty_pins)

    @property
    def is_due(self) -> bool:
        """Whether a commit would make anything durable."""
        return self.uncommitted or self.has_changes

    @property
    def is_outstanding(self) -> bool:
        """Whether something was handed over that is not durable yet."""
        return bool(self._outstanding)

    @property
    def awaits_commit(self) -> bool:
        """Whether a commit was asked for and has not come yet."""
        return any(changes.commit for changes in self._outstanding)

    def send(self, *, commit: bool, clean: bool = False) -> None:
        """Hand everything over that is new; ``clean`` marks the store as ended in good order."""
        index = self._index
        assert self.store is not None
        self.number += 1
        changes = Changes(
            number=self.number,
            applied_lsn=self._wal.last_lsn,
            namespaces=[(root, index.namespaces.get(root)) for root in index.dirty_namespaces],
            nodes=[node.row() for node in index.dirty.values()],
            removed_nodes=list(index.removed),
            dropped_blocks=list(index.dropped_bytes),
            dropped_keys=list(index.dropped_keys),
            pins=[(name, index.pins.get(name)) for name in index.dirty_pins],
            commit=commit,
            clean=clean,
            epoch=self._epoch,
        )
        for pending in (index.dirty, index.removed, index.dropped_bytes, index.dropped_keys, index.dirty_namespaces, index.dirty_pins):
            pending.clear()
        self._outstanding.append(changes)
        self.uncommitted = True
        self.store.submit(changes)

    def committed(self, number: int) -> None:
        """Everything up to set ``number`` is durable."""
        while self._outstanding and self._outstanding[0].number <= number:
            self._outstanding.popleft()
        self.uncommitted = bool(self._outstanding)

    def redo(self, epoch: int) -> None:
        """What was handed over and is not durable is new again: the store thread is in this epoch."""
        index = self._index
        self._epoch = epoch
        while self._outstanding:
            changes = self._outstanding.popleft()
            index.dirty_namespaces.update(root for root, _ in changes.namespaces)
            index.dirty_pins.update(name for name, _ in changes.pins)
            index.dropped_keys.update(changes.dropped_keys)
            index.removed.update(key for key in changes.removed_nodes if key not in index.nodes)
            for row in changes.nodes:
                node = index.nodes.get(row.block_hash)
                if node is not None:
                    index.dirty[row.block_hash] = node
            for block_hash in changes.dropped_blocks:
                node = index.nodes.get(block_hash)
                if node is None or not node.stored_bytes:
                    index.dropped_bytes.add(block_hash)
