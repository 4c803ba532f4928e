"""Every block that storage knows, in memory: the node table of the store, what the log adds to it, and what happens while the daemon runs.

A node is kept after its bytes left memory and disk: its tokens are enough to compute it again. The index belongs to one thread at a time (the
starting thread, then the planner's).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterable, Sequence

from kvd.cache.hashing import Namespace, block_hash
from kvd.cache.tenants import may_be_asked
from kvd.storage import schema
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.forget_intent import Mark
from kvd.storage.schema import NodeRow
from kvd.types import TOKEN_BYTES, BlockHash, BlockId, KvGroup
from kvd.wal.record import Forget, Insert, Pin, Record, Unpin

_HALF_COST_TOKENS = 4096
"""A position's attention costs as much as its linear layers at about this context: the recompute cost of a block grows with its depth."""

_SPARE_EXPIRY_ENTRIES = 1024

_NO_BLOCK = BlockId(-1)

Rank = tuple[bool, float]
"""What expires first sorts first: whether it is pinned, and its worth."""


class IndexNode:
    """One block. ``block_id`` is -1 unless it is ready in memory; ``stored_bytes`` is 0 unless its bytes are on disk.

    ``is_suspect``: a block above it was found bad at this start, so that its own bytes were not looked at; they are written anew when there are new ones.
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "depth",
        "is_suspect",
        "last_use_unix_s",
        "num_children",
        "num_pins",
        "num_stored_children",
        "origin",
        "parent",
        "queued",
        "root",
        "stored_bytes",
        "token_ids",
        "uses",
    )

    def __init__(self, block_hash: BlockHash, root: BlockHash, parent: IndexNode | None, token_ids: bytes) -> None:
        self.block_hash = block_hash
        self.root = root
        self.parent = parent
        self.token_ids = token_ids
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.uses = 0
        self.last_use_unix_s = 0
        self.origin = "computed"
        self.block_id = _NO_BLOCK
        self.stored_bytes = 0
        self.num_children = 0
        self.num_stored_children = 0
        self.num_pins = 0
        self.queued = False
        self.is_suspect = False

    @property
    def is_resident(self) -> bool:
        return self.block_id >= 0

    @property
    def is_unwritten(self) -> bool:
        """Whether it is in memory and not on disk."""
        return self.block_id >= 0 and not self.stored_bytes

    def row(self) -> NodeRow:
        root, parent, token_ids = self.names()
        return NodeRow(self.block_hash, root, parent, token_ids, self.depth, self.uses, self.last_use_unix_s, self.origin)

    def names(self) -> tuple[BlockHash, BlockHash, bytes]:
        """What its hash is made of, and the namespace: root, parent (the root for depth 0), tokens."""
        return self.root, self.root if self.parent is None else self.parent.block_hash, self.token_ids

    def chain(self) -> list[IndexNode]:
        """Its ancestors and itself, root first."""
        nodes: list[IndexNode] = []
        node = self
        while True:
            nodes.append(node)
            if node.parent is None:
                return nodes[::-1]
            node = node.parent


class NodeIndex:
    """Nodes, namespaces and pins, and what of them the store does not know yet (``dirty`` and ``removed``)."""

    def __init__(self, block_bytes: int, *, uses_half_life_s: float = 86400.0, now_unix_s: int = 0) -> None:
        """``now_unix_s``: when it is filled; what is said to be used later than that was used under a wrong clock. 0: unknown."""
        self._block_bytes = max(1, block_bytes)
        self._half_life_s = uses_half_life_s
        self._now_unix_s = now_unix_s
        self._expiry: list[tuple[Rank, BlockHash]] | None = None
        """A heap of what is on disk without anything below it, made when something has to expire for the first time. An entry may be out of date: the block
        is no longer such a leaf, or worth more by now. It is looked at when it comes up."""
        self.nodes: dict[BlockHash, IndexNode] = {}
        self.namespaces: dict[BlockHash, Namespace] = {}
        self.pins: dict[str, BlockHash] = {}
        self.num_stored = 0
        self.stored_bytes = 0
        self.num_unwritten = 0
        """Blocks that are in memory and not on disk."""
        self.dirty: dict[BlockHash, IndexNode] = {}
        self.removed: set[BlockHash] = set()
        self.dropped_bytes: set[BlockHash] = set()
        self.dropped_keys: set[tuple[bytes, bytes]] = set()
        """(database, key) of rows that stand for nothing: damaged ones, bytes that no node stands for."""
        self.dirty_namespaces: set[BlockHash] = set()
        self.dirty_pins: set[str] = set()
        self.ambiguous: set[BlockHash] = set()
        """Hashes that stood for two different blocks in this life. What hangs below one of them can't be told apart, and nothing of it is kept."""

    # -------------------------------------------------------------------------------- filling it

    def load(self, namespaces: Iterable[Namespace], rows: Iterable[NodeRow], pins: Iterable[tuple[str, BlockHash]]) -> int:
        """Take what the store holds; the number of rows without a parent or namespace, which are marked for removal."""
        for namespace in namespaces:
            self.namespaces[namespace.root] = namespace
        num_orphans = 0
        for row in sorted(rows, key=lambda each: each.depth):
            node = self._add(row.block_hash, row.root, row.parent, row.token_ids)
            if node is None or node.depth != row.depth:
                num_orphans += 1
                self.removed.add(row.block_hash)
                continue
            last_use_unix_s = min(row.last_use_unix_s, self._now_unix_s) if self._now_unix_s else row.last_use_unix_s
            node.uses, node.last_use_unix_s, node.origin = row.uses, last_use_unix_s, row.origin
        for name, leaf in pins:
            if leaf in self.nodes:
                self._pin(name, leaf)
            else:
                self.dirty_pins.add(name)
        return num_orphans

    def apply(self, record: Record) -> None:
        """Take a record of the log; applying one again changes nothing."""
        if isinstance(record, Insert):
            if record.namespace is not None:
                namespace = Namespace(*record.namespace)
                if namespace.root == record.root:
                    self.add_namespace(namespace)
            self.insert(BlockHash(record.root), BlockHash(record.parent), record.token_ids)
        elif isinstance(record, Pin):
            self.pin(record.name, BlockHash(record.leaf))
        elif isinstance(record, Unpin):
            self.unpin(record.name)
        elif isinstance(record, Forget):
            for each in record.block_hashes:
                node = self.nodes.get(BlockHash(each))
                if node is not None:
                    self.drop_bytes(node)

    def add_namespace(self, namespace: Namespace) -> bool:
        """Whether it is new."""
        if namespace.root in self.namespaces:
            return False
        self.namespaces[namespace.root] = namespace
        self.dirty_namespaces.add(namespace.root)
        return True

    def insert(self, root: BlockHash, parent: BlockHash, token_ids: bytes) -> IndexNode | None:
        """The node of these tokens below ``parent``, made if need be; None if the parent or the namespace is unknown, or their hash is another block's."""
        key = block_hash(parent, token_ids)
        node = self.nodes.get(key)
        if node is not None and node.names() != (root, parent, token_ids):
            self.ambiguous.add(key)
            self.drop_bytes(node)
        if key in self.ambiguous or parent in self.ambiguous:
            return None
        if node is None:
            node = self._add(key, root, parent, token_ids)
            if node is not None:
                node.uses = 1
                node.last_use_unix_s = self._now_unix_s
                self.dirty[key] = node
                self.removed.discard(key)
        return node

    def _add(self, key: BlockHash, root: BlockHash, parent_hash: BlockHash, token_ids: bytes) -> IndexNode | None:
        if root not in self.namespaces or not token_ids or len(token_ids) % TOKEN_BYTES:
            return None
        parent = None
        if parent_hash != root:
            parent = self.nodes.get(parent_hash)
            if parent is None or parent.root != root:
                return None
            parent.num_children += 1
        node = IndexNode(key, root, parent, token_ids)
        self.nodes[key] = node
        return node

    def load_stored(self, keys: Iterable[bytes], groups: Sequence[KvGroup], codec: Codec = PLAIN) -> None:
        """Take which blocks have their bytes on disk: those whose every group has. The rest is marked for removal."""
        names = [group.name for group in groups]
        found: dict[BlockHash, int] = {}
        for key, place in codec.find_blocks(keys, names, self.nodes):
            if place is None:
                self.dropped_keys.add((schema.DB_BLOCKS, key))
            else:
                found[place[1]] = found.get(place[1], 0) + 1
        for each, num_groups in found.items():
            if num_groups == len(names):
                self.set_stored(self.nodes[each], self._block_bytes)
            else:
                self.dropped_bytes.add(each)

    # -------------------------------------------------------------------------------- pins

    def pin(self, name: str, leaf: BlockHash) -> bool:
        """Whether the leaf is known."""
        if leaf not in self.nodes:
            return False
        if self.pins.get(name) != leaf:
            self.unpin(name)
            self._pin(name, leaf)
            self.dirty_pins.add(name)
        return True

    def unpin(self, name: str) -> None:
        leaf = self.pins.pop(name, None)
        if leaf is None:
            return
        self.dirty_pins.add(name)
        for node in self.nodes[leaf].chain():
            node.num_pins -= 1
            self._offer(node)

    def _pin(self, name: str, leaf: BlockHash) -> None:
        self.pins[name] = leaf
        for node in self.nodes[leaf].chain():
            node.num_pins += 1

    # -------------------------------------------------------------------------------- bytes in memory and on disk

    def set_block(self, node: IndexNode, block_id: BlockId) -> None:
        """The node's bytes are in that row of the pool, or in none (-1)."""
        self.num_unwritten -= node.is_unwritten
        node.block_id = block_id
        self.num_unwritten += node.is_unwritten

    def set_stored(self, node: IndexNode, num_bytes: int) -> None:
        """The node's bytes are durable (of an ambiguous hash it is not known whose bytes they are: they go again)."""
        if node.block_hash in self.ambiguous:
            self.drop_bytes(node)
            return
        self._count_out(node)
        self.num_unwritten -= node.is_resident
        node.stored_bytes = num_bytes
        self.stored_bytes += num_bytes
        self.num_stored += 1
        if node.parent is not None:
            node.parent.num_stored_children += 1
        self.dropped_bytes.discard(node.block_hash)
        self._offer(node)

    def drop_bytes(self, node: IndexNode) -> None:
        """The node's bytes are to leave the disk."""
        self.dropped_bytes.add(node.block_hash)
        self._count_out(node)

    def _count_out(self, node: IndexNode) -> None:
        if not node.stored_bytes:
            return
        self.stored_bytes -= node.stored_bytes
        self.num_stored -= 1
        node.stored_bytes = 0
        self.num_unwritten += node.is_resident
        if node.parent is not None:
            node.parent.num_stored_children -= 1
            self._offer(node.parent)

    def forget_stored(self) -> None:
        """The generation is gone: nothing is on disk, and everything has to be written again."""
        for node in self.nodes.values():
            node.stored_bytes = node.num_stored_children = 0
        self._expiry = None
        self.num_stored = self.stored_bytes = 0
        self.num_unwritten = sum(node.is_resident for node in self.nodes.values())
        self.dirty = dict(self.nodes)
        self.removed.clear()
        self.dropped_bytes.clear()
        self.dropped_keys.clear()
        self.dirty_namespaces = set(self.namespaces)
        self.dirty_pins = set(self.pins)

    # -------------------------------------------------------------------------------- worth

    def value(self, node: IndexNode) -> float:
        """What keeping the node's bytes is worth: the base-2 logarithm of decayed uses × recompute cost ÷ bytes, up to a term that all nodes share.

        Uses lose half their weight in each half-life since the last one. So the order of two nodes changes only when one is used: u · 2^((l - now) / h) sorts as
        log2(u) + l / h does, whatever ``now`` is.
        """
        if not node.uses:
            return -math.inf
        position = node.depth * (len(node.token_ids) // TOKEN_BYTES)
        return math.log2(node.uses * (1.0 + position / _HALF_COST_TOKENS) / self._block_bytes) + node.last_use_unix_s / self._half_life_s

    def rank(self, node: IndexNode) -> Rank:
        """Sort key, the least valuable first; pins last."""
        return (node.num_pins > 0, self.value(node))

    def expire_bytes(self, num_bytes: int, below: Rank | None = None, keep: Container[BlockHash] = ()) -> int:
        """Drop the bytes of the least valuable blocks, leaves of what is on disk first, until ``num_bytes`` are freed.

        ``below``: only of blocks that rank under it; ``keep``: not of these. Returns the bytes that were freed. Costs O(log n) a block, but for the first time.
        """
        if self._expiry is None or len(self._expiry) > 2 * self.num_stored + _SPARE_EXPIRY_ENTRIES:
            self._expiry = [
                (self.rank(node), key) for key, node in self.nodes.items() if node.stored_bytes and not node.num_stored_children
            ]
            heapq.heapify(self._expiry)
        heap, kept = self._expiry, []
        num_freed = 0
        while heap and num_freed < num_bytes:
            rank, key = heap[0]
            node = self.nodes.get(key)
            if node is None or not node.stored_bytes or node.num_stored_children:
                heapq.heappop(heap)
                continue
            now_rank = self.rank(node)
            if now_rank > rank:
                heapq.heapreplace(heap, (now_rank, key))
                continue
            if below is not None and rank >= below:
                break
            heapq.heappop(heap)
            if key in keep:
                kept.append((rank, key))
                continue
            num_freed += node.stored_bytes
            self.drop_bytes(node)
        for entry in kept:
            heapq.heappush(heap, entry)
        return num_freed

    def _offer(self, node: IndexNode) -> None:
        """The node may have become a leaf of what is on disk, or be worth less than before."""
        if self._expiry is not None and node.stored_bytes and not node.num_stored_children:
            heapq.heappush(self._expiry, (self.rank(node), node.block_hash))

    def trim(self, max_nodes: int) -> int:
        """Remove the least valuable leaves that are neither in memory nor on disk nor pinned, down to ``max_nodes``; how many went."""
        excess = len(self.nodes) - max_nodes
        heap = [(self.rank(node), key) for key, node in self.nodes.items() if self._is_expendable(node)] if excess > 0 else []
        heapq.heapify(heap)
        num_removed = 0
        while heap and num_removed < excess:
            node = self.nodes[heapq.heappop(heap)[1]]
            self._remove(node)
            num_removed += 1
            if node.parent is not None and self._is_expendable(node.parent):
                heapq.heappush(heap, (self.rank(node.parent), node.parent.block_hash))
        if num_removed:
            live = {node.root for node in self.nodes.values()}
            for root in [root for root in self.namespaces if root not in live]:
                del self.namespaces[root]
                self.dirty_namespaces.add(root)
        return num_removed

    def collect_namespaces(self, keep_fingerprint: bytes) -> int:
        """Mark everything that was computed under another fingerprint, or under a salt as 0.1.0 kept it, for removal; the number of nodes."""
        foreign = {
            root
            for root, namespace in self.namespaces.items()
            if namespace.fingerprint != keep_fingerprint or not may_be_asked(namespace.tenant_salt)
        }
        if not foreign:
            return 0
        for name in [name for name, leaf in self.pins.items() if self.nodes[leaf].root in foreign]:
            self.unpin(name)
        nodes = [node for node in self.nodes.values() if node.root in foreign]
        for node in sorted(nodes, key=lambda each: -each.depth):
            self._remove(node)
        for root in foreign:
            del self.namespaces[root]
            self.dirty_namespaces.add(root)
        return len(nodes)

    def forget(self, mark: Mark) -> list[IndexNode]:
        """Mark everything that the mark holds for removal, its pins too; the nodes.

        Of a prefix: its last block, what is below, and those above that nothing else hangs on, neither another prefix nor a pin.
        Those that have come back to memory since it forgot them are known again at once, as new ones without bytes.
        """
        roots = {root for root, namespace in self.namespaces.items() if mark.has_salt(namespace.tenant_salt)}
        nodes = sorted((node for node in self.nodes.values() if node.root in roots), key=lambda node: node.depth)
        chosen: dict[bytes, IndexNode] = {node.block_hash: node for node in nodes}
        if mark.chains:
            chosen = self._below(nodes, {chain[-1] for chain in mark.chains})
        for name in [name for name, leaf in self.pins.items() if leaf in chosen]:
            self.unpin(name)
        for chain in mark.chains:
            self._choose_above(chosen, chain)
        nodes = list(chosen.values())
        for node in sorted(nodes, key=lambda each: -each.depth):
            self._remove(node)
        for node in sorted(nodes, key=lambda each: each.depth):
            if node.is_resident:
                self._renew(node)
        live = {node.root for node in self.nodes.values()}
        for root in roots - live:
            del self.namespaces[root]
            self.dirty_namespaces.add(root)
        return nodes

    def _below(self, nodes: list[IndexNode], ends: set[bytes]) -> dict[bytes, IndexNode]:
        """Of ``nodes``, parents before children: the ``ends`` and all below them."""
        chosen: dict[bytes, IndexNode] = {}
        for node in nodes:
            if node.block_hash in ends or (node.parent is not None and node.parent.block_hash in chosen):
                chosen[node.block_hash] = node
        return chosen

    def _choose_above(self, chosen: dict[bytes, IndexNode], chain: Sequence[bytes]) -> None:
        """Add those nodes of the chain that nothing hangs on but what is chosen."""
        num_chosen_children = 0
        for key in reversed(chain):
            node = self.nodes.get(BlockHash(key))
            if node is None:
                continue
            if key not in chosen:
                if node.num_children > num_chosen_children or node.num_pins:
                    break
                chosen[key] = node
            num_chosen_children = 1

    def _renew(self, gone: IndexNode) -> None:
        node = self.insert(*gone.names())
        if node is not None:  # of an ambiguous hash nothing is kept
            node.origin, node.uses, node.last_use_unix_s = gone.origin, gone.uses, gone.last_use_unix_s
            self.set_block(node, gone.block_id)

    def _is_expendable(self, node: IndexNode) -> bool:
        return not (node.num_children or node.is_resident or node.stored_bytes or node.num_pins or node.queued)

    def _remove(self, node: IndexNode) -> None:
        if node.stored_bytes:
            self.drop_bytes(node)
        self.num_unwritten -= node.is_resident
        del self.nodes[node.block_hash]
        self.dirty.pop(node.block_hash, None)
        self.removed.add(node.block_hash)
        if node.parent is not None:
            node.parent.num_children -= 1
