"""A start with a smaller budget: what is worth most goes to a new generation, and the old file leaves the disk before anything is served.

A data file never becomes shorter. While the copy is made both are on disk: the peak is the old file and its part of the new budget. On a disk that has no room for
that, the copy holds what fits; where not even its first transaction does, the old file goes first and everything is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvd.storage.budget import Budget
from kvd.storage.errors import StoreBlockedError, StoreDamagedError, StoreFullError
from kvd.storage.generations import Generations
from kvd.storage.node_index import IndexNode, NodeIndex
from kvd.storage.store import Store
from kvd.types import KvGroup
from kvd.wal.disk_faults import fault_sentence


def shrink(
    generations: Generations, store: Store, index: NodeIndex, budget: Budget, groups: Sequence[KvGroup], *, now_unix_s: int
) -> tuple[Store | None, str]:
    """A store within ``budget.map_bytes`` in the place of ``store``, and ``index`` as it is then; empty, or why there is none.

    ``index`` is what the store and the log hold, its pins included.
    """
    excess = index.stored_bytes - budget.max_block_bytes
    if excess > 0:
        index.expire_bytes(excess)
    index.trim(budget.max_nodes)
    copy = _Copy(store, index, budget, groups)
    try:
        return generations.rebuilt(store, copy.fill, now_unix_s), ""
    except (StoreBlockedError, StoreDamagedError, OSError) as error:
        generations.damage.append(
            f"the store is larger than its part of store_max_bytes and can't be copied: {fault_sentence(error)}; it was dropped"
        )
    store.close()
    index.forget_stored()
    try:
        return generations.create_fresh(now_unix_s), ""
    except (StoreBlockedError, StoreDamagedError, OSError) as error:
        return None, fault_sentence(error)


class _Copy:
    def __init__(self, store: Store, index: NodeIndex, budget: Budget, groups: Sequence[KvGroup]) -> None:
        self._store = store
        self._index = index
        self._budget = budget
        self._groups = groups

    def fill(self, fresh: Store) -> None:
        """Raises as a transaction does, unless blocks alone find no room."""
        index = self._index
        txn = fresh.begin()
        try:
            for namespace in index.namespaces.values():
                txn.put_namespace(namespace)
            for node in index.nodes.values():
                txn.put_node(node.row())
            for name, leaf in index.pins.items():
                txn.put_pin(name, leaf)
            txn.commit()
        except BaseException:
            txn.abort()
            raise
        nodes = list(_by_value(index))
        num_done = 0
        try:
            while num_done < len(nodes):
                num_done += self._copy_some(fresh, nodes[num_done:])
        except StoreFullError:
            for node in reversed(nodes[num_done:]):
                index.drop_bytes(node)

    def _copy_some(self, fresh: Store, nodes: Sequence[IndexNode]) -> int:
        """One transaction's worth; how many of ``nodes``."""
        txn = fresh.begin()
        num_done = 0
        try:
            with self._store.reading_blocks() as reader:
                for node in nodes:
                    for group in self._groups:
                        value = reader.get(group.name, node.block_hash)
                        if value is not None:  # one that is missing is found missing when it is asked for
                            txn.put_block(group.name, node.block_hash, value)
                    num_done += 1
                    if txn.num_bytes >= self._budget.commit_bytes:
                        break
            txn.commit()
        except BaseException:
            txn.abort()
            raise
        return num_done


def _by_value(index: NodeIndex) -> Iterator[IndexNode]:
    """What is on disk, the most valuable first, each after what it hangs below."""
    seen: set[bytes] = set()
    stored = [node for node in index.nodes.values() if node.stored_bytes]
    for node in sorted(stored, key=index.rank, reverse=True):
        for each in node.chain():
            if each.stored_bytes and each.block_hash not in seen:
                seen.add(each.block_hash)
                yield each
