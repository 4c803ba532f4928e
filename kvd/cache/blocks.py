"""Blocks in the tree: holding, leasing and evicting them, with every count kept as it changes."""

from __future__ import annotations

from collections.abc import Callable

from kvd.cache.block_pool import BlockPool
from kvd.cache.events import BlockOrigin, BlockRemoved, BlockStored, CacheEvent
from kvd.cache.eviction import EvictionPolicy, EvictionQueue
from kvd.cache.prefix_tree import HashFunction, Node, PrefixTree
from kvd.cache.retention import Retention, RetentionBook
from kvd.types import BlockHash, BlockId, PackedTokens


class TreeBlocks:
    """The pool and the tree over it. A cached block is *idle*: held by nobody; an idle leaf that is neither pinned nor leased can be evicted."""

    __slots__ = (
        "_policy",
        "_queue",
        "events",
        "leases",
        "node_of",
        "num_evicted",
        "num_idle_pinned",
        "num_pinned",
        "outlived",
        "pool",
        "retentions",
        "tick",
        "tree",
    )

    def __init__(self, num_blocks: int, block_size_tokens: int, policy: EvictionPolicy, hash_function: HashFunction) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size_tokens, hash_function)
        self.node_of: list[Node | None] = [None] * num_blocks
        self.leases: dict[BlockId, int] = {}
        self.outlived: set[BlockId] = set()
        """Leased blocks whose node was forgotten: held until the lease ends."""
        self.num_pinned = 0
        self.num_idle_pinned = 0
        self.num_evicted = 0
        self.tick = 0
        """The logical clock of uses."""
        self.events: list[CacheEvent] = []
        self._policy = policy
        self._queue = EvictionQueue(policy)
        self.retentions = RetentionBook(self._on_priority)

    @property
    def num_available(self) -> int:
        """Free blocks and idle ones without a pin. Leases, and loads below an idle block, may hold some back for a moment."""
        return self.pool.num_free + self.pool.num_cached - self.num_idle_pinned

    def hold(self, block_id: BlockId) -> None:
        """One more holder of a block that is used or cached."""
        if self.pool.hold(block_id):
            node = self.node_of[block_id]
            assert node is not None, "only a cached block can be taken up again"
            self.num_idle_pinned -= node.num_pins > 0
            if node.queue_ticket:
                self._queue.discard(node)

    def drop(self, block_id: BlockId, *, ends_use: Retention | None = None) -> None:
        """One holder less; with the last one the block becomes cached or free. ``ends_use``: it was used until now, for the policy's order, and is to
        be kept like this.
        """
        node = self.node_of[block_id]
        if node is not None and ends_use is not None:
            self.retentions.keep(node, ends_use)
        if not self.pool.drop(block_id):
            return
        if node is None:
            self.pool.free(block_id)
            return
        self.num_idle_pinned += node.num_pins > 0
        if ends_use is not None:
            self.touch(node)
        self.settle(node)

    def touch(self, node: Node) -> None:
        """A use of the node begins or ends."""
        node.last_used = self.tick
        self._policy.on_touch(node)

    def reuse(self, node: Node) -> None:
        """A further request is given the node."""
        self._policy.on_reuse(node)
        node.uses += 1

    def insert(self, parent: Node, token_ids: PackedTokens, block_id: BlockId, *, origin: BlockOrigin, is_ready: bool, uses: int) -> Node:
        """A held block becomes a node."""
        assert self.node_of[block_id] is None, "a block holds one prefix"
        node = self.tree.insert(parent, token_ids, block_id, origin=origin, is_ready=is_ready, uses=uses)
        node.last_used = self.tick
        self._policy.on_insert(node)
        self.node_of[block_id] = node
        if parent.queue_ticket:
            self._queue.discard(parent)
        return node

    def replace(self, node: Node, block_id: BlockId) -> bool:
        """A held block that was computed for the same tokens takes the place of an idle node's own, which is freed; False if that is in use, leased or filling."""
        idle_id = node.block_id
        if self.pool.ref_counts[idle_id] or not node.is_ready or idle_id in self.leases:
            return False
        assert self.node_of[block_id] is None, "a block holds one prefix"
        if node.queue_ticket:
            self._queue.discard(node)
        self.num_idle_pinned -= node.num_pins > 0
        self.node_of[idle_id] = None
        self.pool.free(idle_id)
        self.events.append(BlockRemoved(node.block_hash, idle_id))
        node.block_id = block_id
        node.origin = BlockOrigin.COMPUTED
        node.is_fresh = False
        self.reuse(node)
        self.node_of[block_id] = node
        self.tell_stored(node)
        return True

    def withdraw(self, node: Node) -> None:
        """A filling node leaves the tree; its holders keep the block."""
        self.node_of[node.block_id] = None
        self.retentions.forget(node)
        self.settle(self.tree.remove(node))

    def unlink(self, node: Node) -> None:
        """A ready node without children and pins leaves the tree; a block that nobody holds is free then."""
        if node.queue_ticket:
            self._queue.discard(node)
        self.node_of[node.block_id] = None
        self.retentions.forget(node)
        if self.pool.ref_counts[node.block_id] == 0:
            self.pool.free(node.block_id)
        self.settle(self.tree.remove(node))

    def forget_uses(self, has_salt: Callable[[bytes], bool]) -> None:
        """The eviction policy, too, forgets what left under salts of which ``has_salt`` says so."""
        self._policy.forget(has_salt)

    def tell_stored(self, node: Node) -> None:
        assert node.parent is not None, "a node in the tree has a parent"
        self.events.append(
            BlockStored(node.namespace, node.block_hash, node.parent.block_hash, node.token_ids, node.block_id, node.depth, node.origin)
        )

    # --------------------------------------------------------------------------------------------------- pins and leases

    def pin(self, node: Node) -> None:
        node.num_pins += 1
        if node.num_pins == 1:
            self.num_pinned += 1
            self.num_idle_pinned += self.pool.ref_counts[node.block_id] == 0
            self.settle(node)

    def unpin(self, node: Node) -> None:
        node.num_pins -= 1
        if node.num_pins == 0:
            self.num_pinned -= 1
            self.num_idle_pinned -= self.pool.ref_counts[node.block_id] == 0
            self.settle(node)

    def lease(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        node = self.node_of[block_id]
        if node is None or not node.is_ready or node.block_hash != block_hash:
            return False
        self.leases[block_id] = self.leases.get(block_id, 0) + 1
        self.settle(node)
        return True

    def end_lease(self, block_id: BlockId) -> None:
        count = self.leases[block_id] - 1
        if count:
            self.leases[block_id] = count
            return
        del self.leases[block_id]
        if block_id in self.outlived:
            self.outlived.remove(block_id)
            self.drop(block_id)
            return
        node = self.node_of[block_id]
        assert node is not None, "a leased block stays in the tree"
        self.settle(node)

    # ---------------------------------------------------------------------------------------------------------- eviction

    def make_free(self, num_blocks: int) -> bool:
        """Have at least ``num_blocks`` on the free list, evicting if need be; False changes nothing. O(log n) for each evicted block."""
        num_missing = num_blocks - self.pool.num_free
        if num_missing <= 0:
            return True
        if num_blocks > self.num_available:
            return False
        victims: list[Node] = []
        while len(victims) < num_missing:
            victim = self._pop_victim()
            if victim is None:
                self._put_back(victims)
                return False
            victims.append(victim)
        for victim in victims:
            self._evict(victim)
        return True

    def evict(self, max_blocks: int) -> int:
        """Free up to ``max_blocks`` cached blocks; how many it were."""
        num_evicted = 0
        while num_evicted < max_blocks:
            victim = self._pop_victim()
            if victim is None:
                break
            self._evict(victim)
            num_evicted += 1
        return num_evicted

    def settle(self, node: Node) -> None:
        """Queue the node if it can be evicted now, else see that it is not queued."""
        if self.is_evictable(node):
            if node.queue_ticket == 0:
                self._queue.push(node)
        elif node.queue_ticket:
            self._queue.discard(node)

    def is_evictable(self, node: Node) -> bool:
        return (
            node.num_children == 0
            and node.is_ready
            and node.num_pins == 0
            and node.depth >= 0
            and self.pool.ref_counts[node.block_id] == 0
            and node.block_id not in self.leases
        )

    def queued(self) -> list[tuple[int, Node]]:
        """The nodes in the eviction order and the retention priorities that they stand there with, for audits."""
        return self._queue.queued()

    def _pop_victim(self) -> Node | None:
        """The next leaf to go, unlinked from its parent, which may be the next leaf."""
        victim = self._queue.pop()
        if victim is not None:
            assert victim.parent is not None, "a queued node is in the tree"
            victim.parent.num_children -= 1
            self.settle(victim.parent)
        return victim

    def _put_back(self, victims: list[Node]) -> None:
        for victim in reversed(victims):
            assert victim.parent is not None, "a victim is still in the tree"
            victim.parent.num_children += 1
            self.settle(victim.parent)
            self.settle(victim)

    def _on_priority(self, node: Node) -> None:
        """The node's retention priority is another: it queues anew."""
        self._policy.on_touch(node)
        if node.queue_ticket:
            self._queue.discard(node)
            self._queue.push(node)

    def _evict(self, victim: Node) -> None:
        self._policy.on_evicted(victim)
        self.retentions.forget(victim)
        self.tree.remove(victim, is_unlinked=True)
        self.node_of[victim.block_id] = None
        self.pool.free(victim.block_id)
        self.events.append(BlockRemoved(victim.block_hash, victim.block_id))
        self.num_evicted += 1
