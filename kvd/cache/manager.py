"""The front door of the cache: match, allocate, extend, release; fills, loads, leases, pins and eviction.

Single-threaded: only the engine thread calls it. No call looks at a clock, and none costs more than the blocks that it
names: the number of cached blocks enters only as a logarithm, on eviction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from kvd.cache.audit import check_cache
from kvd.cache.block_table import BlockTable, CopyOnWrite, LoadTarget, PartialMatch, PrefixInfo, PrefixMatch
from kvd.cache.blocks import TreeBlocks
from kvd.cache.errors import CacheError, PinCapacityError, PinNotReadyError, PinTooShortError
from kvd.cache.events import BlockOrigin, CacheEvent
from kvd.cache.eviction import CostPolicy, EvictionPolicy, LruPolicy, eviction_policy
from kvd.cache.filling import Fillings
from kvd.cache.forgetting import keep_private, remove, select
from kvd.cache.hashing import Namespace, block_hash
from kvd.cache.pins import PinBook
from kvd.cache.prefix_tree import HashFunction, Node
from kvd.cache.retention import DEFAULT_RETENTION, Retention
from kvd.cache.tables import TableBook
from kvd.cache.tenants import Selection
from kvd.cache.uses import Uses
from kvd.types import TOKEN_BYTES, BlockHash, BlockId, PackedTokens

__all__ = [
    "MIN_PARTIAL_TOKENS",
    "BlockTable",
    "CacheError",
    "CacheManager",
    "CopyOnWrite",
    "CostPolicy",
    "EvictionPolicy",
    "LoadTarget",
    "LruPolicy",
    "Node",
    "PinCapacityError",
    "PinNotReadyError",
    "PinTooShortError",
    "PrefixInfo",
    "PrefixMatch",
    "Retention",
    "eviction_policy",
]

_LRU = LruPolicy()

MIN_PARTIAL_TOKENS = 4
"""A copy of a block costs a CPU a small part of one token's computation, but kernels take tokens in groups: fewer than these seldom make a step shorter."""


class CacheManager:
    """Blocks, the prefix tree over them, and who uses what.

    ``num_blocks`` and ``block_size_tokens`` shape the pool; ``free_watermark`` and ``max_pinned_fraction`` are fractions of it.
    ``hash_function`` is the chained block hash, which the tree never trusts for equality. A match ends inside a block where that saves at least
    ``min_partial_tokens``; a block's size or more: never.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size_tokens: int = 16,
        free_watermark: float = 0.05,
        max_pinned_fraction: float = 0.5,
        policy: EvictionPolicy = _LRU,
        hash_function: HashFunction = block_hash,
        min_partial_tokens: int = MIN_PARTIAL_TOKENS,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.watermark_blocks = math.ceil(num_blocks * free_watermark)
        self._min_partial_tokens = min_partial_tokens
        self.max_pinned_blocks = int(num_blocks * max_pinned_fraction)
        self._blocks = TreeBlocks(num_blocks, block_size_tokens, policy, hash_function)
        self._pool = self._blocks.pool
        self._tree = self._blocks.tree
        self._pins = PinBook(self._blocks, block_size_tokens, self.max_pinned_blocks)
        self._fillings = Fillings()
        self._num_loading = 0
        self._uses = Uses(self._blocks, self._fillings, block_size_tokens)
        self._book = TableBook(self._blocks, self._fillings, self._uses, block_size_tokens)
        self._tables = self._book.tables
        self._counters = self._uses.counters

    # ------------------------------------------------------------------------------------------------ numbers

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that the tree keeps and nobody uses."""
        return self._pool.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that tables and loads hold."""
        return self._pool.num_used

    @property
    def num_shared(self) -> int:
        """Blocks held more than once."""
        return self._pool.num_shared

    @property
    def num_references(self) -> int:
        """Places of blocks in tables and loads: what is more than ``num_used`` is saved by sharing. O(tables)."""
        return sum(len(table.block_ids) for table in self._tables) + self._num_loading

    @property
    def num_available(self) -> int:
        """Free blocks and cached ones that are not pinned; leases may hold some of these back for a moment."""
        return self._blocks.num_available

    @property
    def num_transient(self) -> int:
        """Blocks that leases and loads hold back for a moment."""
        return len(self._blocks.leases) + self._num_loading

    @property
    def num_tables(self) -> int:
        """Tables that have not been released."""
        return len(self._tables)

    @property
    def pinned_blocks(self) -> int:
        """Distinct blocks of all pins."""
        return self._blocks.num_pinned

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size_tokens)

    def stats(self) -> dict[str, int]:
        """Counters since the start; ``hit_tokens_*`` by origin of the matched blocks."""
        names = [
            "allocations",
            "forks",
            "copies",
            "query_tokens",
            "hit_tokens",
            "partial_hit_tokens",
            *(f"hit_tokens_{origin.value}" for origin in BlockOrigin),
        ]
        return {"evictions": self._blocks.num_evicted, **{name: self._counters[name] for name in names}}

    # ------------------------------------------------------------------------------------------------- tables

    def match(self, token_ids: PackedTokens, namespace: Namespace) -> PrefixMatch:
        """The longest prefix in the tree, ready or filling, of at most all tokens but the last (which must be computed for its logits): whole blocks, and the beginning of
        one more where that is worth a copy.

        A pure read, O(blocks of the prompt + log n).
        """
        size = self.block_size_tokens
        most_tokens = max(0, len(token_ids) // TOKEN_BYTES - 1)
        nodes = self._tree.walk(namespace, token_ids, most_tokens // size)
        num_tokens = len(nodes) * size
        partial = None
        if most_tokens - num_tokens >= self._min_partial_tokens and (not nodes or nodes[-1].is_ready):
            rest = token_ids[num_tokens * TOKEN_BYTES : min(most_tokens, num_tokens + size) * TOKEN_BYTES]
            found = self._tree.begins_alike(nodes[-1] if nodes else None, namespace, rest)
            if found is not None and found[1] >= self._min_partial_tokens:
                partial = PartialMatch(*found)
                num_tokens += partial.num_tokens
        return PrefixMatch(namespace, token_ids, tuple(nodes), num_tokens, self._tree.version, partial)

    def allocate(
        self,
        match: PrefixMatch,
        num_tokens: int,
        *,
        origin: BlockOrigin = BlockOrigin.COMPUTED,
        counts_use: bool = True,
        reserve_blocks: int = 0,
        is_private: bool = False,
    ) -> BlockTable | None:
        """A table for the first ``num_tokens`` tokens of the match's prompt: the matched blocks, and private ones after them.

        The full blocks beyond the match enter the tree at once as filling nodes of this table. ``counts_use`` is False for work that is no
        user's (pins, recomputing) and for a request's resumption: no use is told, and blocks stay fresh. ``reserve_blocks`` must remain
        available besides. ``is_private``: nothing of it enters the tree. Where the table has a ``partial``, that copy is to be made before the first step, and
        ``end_copy`` to be called once it is under way.

        Returns:
            None if there are not enough blocks; then nothing has changed.
        """
        if match.tree_version != self._tree.version:
            match = self.match(match.token_ids, match.namespace)
        return self._book.allocate(
            match, num_tokens, origin=origin, counts_use=counts_use, reserve_blocks=reserve_blocks, is_private=is_private
        )

    def extend(self, table: BlockTable, num_tokens: int) -> tuple[CopyOnWrite, ...] | None:
        """Make positions up to ``num_tokens`` writable: further blocks, and private copies of shared ones that will be written.

        Returns:
            The copies to make before the next write; None if there are not enough blocks, and then nothing has changed.
        """
        if num_tokens <= table.writable_tokens:
            if num_tokens > table.num_tokens:  # noqa: PLR1730 -- every decoding row comes by, and max() is a call
                table.num_tokens = num_tokens
            return ()
        return self._book.extend(table, num_tokens)

    def end_copy(self, table: BlockTable) -> None:
        """The step that copies the table's ``partial`` was submitted: its source may go. Nothing if there is none."""
        self._book.end_copy(table)

    def record(self, table: BlockTable, token_ids: PackedTokens | bytearray, num_computed: int) -> None:
        """The sequence's first ``num_computed`` tokens are computed: its full blocks become ready nodes.

        Where the tree has a block with these tokens already, an idle one gives way to the table's own; while somebody uses it, the table's stays
        private, and so does what follows, until a later call. So a table holds the whole path to each of its nodes, and no node is kept from eviction by
        a block below it that belongs to somebody else.
        """
        self._book.record(table, token_ids, num_computed)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; whoever first writes to a shared one gets a copy."""
        return self._book.fork(table)

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Give up the positions from ``num_tokens`` on."""
        self._book.truncate(table, num_tokens)

    def rewind(self, table: BlockTable, num_tokens: int) -> None:
        """The positions from ``num_tokens`` on, written by the sequence alone, will be written again: they hold nothing, and their blocks stay the table's."""
        self._book.rewind(table, num_tokens)

    def release(self, table: BlockTable, retention: Retention = DEFAULT_RETENTION) -> None:
        """The sequence is over: its blocks stay cached where the tree has them, and be it used or computed, as long as ``retention`` or a higher
        one of another use says; else they are free.
        """
        self._book.release(table, retention)

    # -------------------------------------------------------------------------------------------------- fills

    def awaited(self, table: BlockTable) -> set[BlockTable]:
        """The tables that fill what this one waits for (loads have none)."""
        owners = {self._fillings.owner(node) for node in table.waits_for}
        return {owner for owner in owners if owner is not None}

    def complete_fill(self, nodes: Iterable[Node]) -> None:
        """The step or load that fills these nodes (parents before children) has completed; nodes that have left the tree are passed over."""
        for node in nodes:
            if not node.in_tree:
                continue
            assert node.parent is not None, "a node in the tree has a parent"
            assert node.parent.is_ready, "parents are filled before their children"
            owner, followers = self._fillings.complete(node)
            self._tree.set_ready(node)
            self._blocks.tell_stored(node)
            for follower in followers:
                if owner is None and node.is_fresh and follower.matched:
                    node.is_fresh = False
                    follower.num_restored_tokens += self.block_size_tokens
                if not follower.waits_for:
                    self._uses.tell(follower)
            if owner is None:
                self._num_loading -= 1
                self._blocks.drop(node.block_id)

    def fail_fill(self, nodes: Iterable[Node]) -> list[BlockTable]:
        """These nodes will not be filled: they and all below them leave the tree.

        Returns:
            The tables, other than the owners of ``nodes``, that waited for a node that failed. They can only be released; their
            sequences are to be planned anew.
        """
        failed, affected = self._fillings.fail(nodes)
        for node, owner in reversed(failed):
            self._blocks.withdraw(node)
            if owner is None:
                self._num_loading -= 1
                self._blocks.drop(node.block_id)
            else:
                owner.num_in_tree = min(owner.num_in_tree, node.depth)
        return affected

    def begin_load(
        self,
        namespace: Namespace,
        blocks: Sequence[tuple[PackedTokens, int]],
        origin: BlockOrigin = BlockOrigin.RESTORED,
        retention: Retention = DEFAULT_RETENTION,
    ) -> list[LoadTarget] | None:
        """Room for a chain of blocks from disk, each (its tokens, its uses), the first of a prompt first, to be kept as ``retention`` or a use says.

        Nodes that are there already are skipped; where a request is filling one, nothing is loaded. The rest is filling until
        ``complete_fill`` (parents before children) or ``fail_fill``.

        Returns:
            What is to be read; None if there are not enough blocks, and then nothing has changed.
        """
        path = self._tree.walk(namespace, b"".join(tokens for tokens, _ in blocks), len(blocks))
        if any(not node.is_ready and self._fillings.owner(node) is not None for node in path):
            return []
        missing = blocks[len(path) :]
        for node in path:
            self._blocks.hold(node.block_id)
        targets = None
        if self._blocks.make_free(len(missing)):
            targets = self._begin_load(namespace, path, missing, origin, retention)
        for node in reversed(path):
            self._blocks.drop(node.block_id)
        return targets

    # ------------------------------------------------------------------------------------------ pins and leases

    def pin(self, name: str, token_ids: PackedTokens, namespace: Namespace) -> int:
        """Keep the full blocks of a prefix from eviction; a pin of that name is replaced.

        Returns:
            The number of blocks.

        Raises:
            PinTooShortError: the prefix has no full block.
            PinNotReadyError: a block is not in memory, or still filling.
            PinCapacityError: the pins would hold more than ``max_pinned_blocks``.
        """
        return self._pins.pin(name, token_ids, namespace)

    def check_pin(self, name: str, token_ids: PackedTokens, namespace: Namespace) -> None:
        """Raise the ``PinCapacityError`` that ``pin`` would, before the prefix is computed."""
        self._pins.check(name, token_ids, namespace)

    def unpin(self, name: str) -> bool:
        """Give a pin up; whether there was one."""
        return self._pins.unpin(name)

    def pins(self) -> dict[str, PrefixInfo]:
        """The pins by name."""
        return {name: PrefixInfo.of(nodes[-1], self._blocks.tick) for name, nodes in self._pins.nodes.items()}

    def pin_info(self, name: str) -> dict[str, Any]:
        """The report of one pin.

        Raises:
            KeyError: no pin is named so.
        """
        return PrefixInfo.of(self._pins.nodes[name][-1], self._blocks.tick).as_dict()

    def forget(self, selection: Selection) -> tuple[int, list[BlockTable]]:
        """Everything that the selection holds leaves the tree at once, its pins first; O(all blocks). Who uses it keeps it as its own.

        Returns:
            How many blocks left the tree; and the tables that waited for one: they can only be released, their sequences are to be planned anew.
        """
        for name, pin in self.pins().items():
            if selection.holds(pin.namespace.tenant_salt, pin.token_ids):
                self._pins.unpin(name)
        nodes = select(self._tree, selection)
        leaving = {id(node) for node in nodes}
        keep_private(self._tables, nodes, self._blocks)
        filling = [node for node in nodes if not node.is_ready]
        affected = self.fail_fill(
            [node for node in filling if node.parent is not None and (node.parent.is_ready or id(node.parent) not in leaving)]
        )
        for node in reversed(nodes):
            if node.in_tree:
                remove(self._blocks, node)
        self._uses.drop_removed()
        self._blocks.forget_uses(selection.has_salt)
        return len(nodes), affected

    def lease(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Hold a ready block against eviction (and so against writing) until ``end_lease``; False if it no longer holds that content."""
        return self._blocks.lease(block_id, block_hash)

    def end_lease(self, block_id: BlockId) -> None:
        """End one lease of the block."""
        self._blocks.end_lease(block_id)

    # ----------------------------------------------------------------------------------- eviction and reports

    def evict_to_watermark(self, max_blocks: int) -> int:
        """Background eviction: free cached blocks until the watermark is met, at most ``max_blocks``; how many."""
        return self._blocks.evict(min(max_blocks, self.watermark_blocks - self.num_free))

    def expire_retention(self, now_s: float, max_blocks: int) -> int:
        """The retentions that end by ``now_s`` count no more, for at most ``max_blocks`` blocks; how many. Other calls' instants are on the same clock."""
        return self._blocks.retentions.expire(now_s, max_blocks)

    def take_events(self) -> tuple[CacheEvent, ...]:
        """What happened since the last call, in order."""
        events = tuple(self._blocks.events)
        self._blocks.events.clear()
        return events

    def hottest(self, limit: int, tenant: str = "") -> list[PrefixInfo]:
        """The tenant's most used prefixes in memory, among those that the latest requests shared or that were loaded."""
        return self._uses.hottest(limit, tenant)

    def check_invariants(self) -> None:
        """Audit everything against everything, O(all blocks); an AssertionError names what is wrong."""
        check_cache(
            self._blocks,
            self._fillings,
            pins=self._pins.nodes,
            tables=self._tables,
            num_loading=self._num_loading,
            block_size_tokens=self.block_size_tokens,
        )

    # ------------------------------------------------------------------------------------------------ helpers

    def _begin_load(
        self,
        namespace: Namespace,
        path: Sequence[Node],
        missing: Sequence[tuple[PackedTokens, int]],
        origin: BlockOrigin,
        retention: Retention,
    ) -> list[LoadTarget]:
        tip = path[-1] if path else None
        targets = []
        for tokens, uses in missing:
            parent = tip if tip is not None else self._tree.root(namespace)
            tip = self._blocks.insert(parent, tokens, self._pool.take(), origin=origin, is_ready=False, uses=uses)
            self._blocks.retentions.keep(tip, retention)
            self._fillings.begin(tip, None)
            targets.append(LoadTarget(tip, tip.block_id, tip.block_hash))
        self._num_loading += len(targets)
        if tip is not None:
            self._uses.remember_prefix(tip)
        return targets
