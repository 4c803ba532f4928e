"""What requests make of the tree: uses counted and told, hits by origin, and the prefixes that were shared last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvd.cache.block_table import BlockTable, PartialMatch, PrefixInfo
from kvd.cache.blocks import TreeBlocks
from kvd.cache.events import BlockOrigin, BlocksUsed
from kvd.cache.filling import Fillings
from kvd.cache.prefix_tree import Node
from kvd.cache.tenants import is_of_tenant

_MAX_REMEMBERED_PREFIXES = 1024


class Uses:
    """Counts a table's use of the nodes that it matched, once, and tells it when all of them are ready."""

    __slots__ = ("_block_size_tokens", "_blocks", "_fillings", "_prefix_ends", "counters")

    def __init__(self, blocks: TreeBlocks, fillings: Fillings, block_size_tokens: int) -> None:
        self._blocks = blocks
        self._fillings = fillings
        self._block_size_tokens = block_size_tokens
        self._prefix_ends: dict[Node, None] = {}
        self.counters: Counter[str] = Counter()

    def use(self, table: BlockTable, path: Sequence[Node], partial: PartialMatch | None, *, counts_use: bool) -> None:
        """The table was given the nodes of ``path``, root first, and the beginning of ``partial``'s.

        Who is given a block's beginning makes a block of its own, which serves the next as well: it is no use that keeps the first one longer than another.
        """
        self._blocks.tick += 1
        size = self._block_size_tokens
        table.num_cached_tokens = len(path) * size
        num_fresh: Counter[BlockOrigin] = Counter()
        num_hit: Counter[BlockOrigin] = Counter()
        for node in path:
            self._blocks.touch(node)
            if not node.is_ready:
                self._fillings.follow(node, table)
            if counts_use:
                self._blocks.reuse(node)
                num_hit[node.origin] += size
                if node.is_ready or self._fillings.owner(node) is not None:
                    num_fresh[node.origin] += node.is_fresh * size
                    node.is_fresh = False
        if partial is not None:
            table.num_cached_tokens += partial.num_tokens
            self._blocks.touch(partial.node)
            if counts_use:
                num_hit[partial.node.origin] += partial.num_tokens
                num_fresh[partial.node.origin] += partial.node.is_fresh * partial.num_tokens
                partial.node.is_fresh = False
                self.counters["partial_hit_tokens"] += partial.num_tokens
        if not counts_use:
            return
        table.num_restored_tokens = num_fresh[BlockOrigin.RESTORED]
        table.num_recomputed_tokens = num_fresh[BlockOrigin.RECOMPUTED]
        self.counters["query_tokens"] += table.num_tokens
        self.counters["hit_tokens"] += table.num_cached_tokens
        for origin, num_tokens in num_hit.items():
            self.counters[f"hit_tokens_{origin.value}"] += num_tokens
        if path:
            table.matched = tuple(path)
            self.remember_prefix(path[-1])
            if not table.waits_for:
                self.tell(table)

    def tell(self, table: BlockTable) -> None:
        """Nothing that the table matched is filling any more: its use becomes an event."""
        if table.matched:
            self._blocks.events.append(BlocksUsed(tuple(node.block_hash for node in table.matched)))
            table.matched = ()

    def remember_prefix(self, node: Node) -> None:
        """The node ends a prefix that was shared or loaded."""
        self._prefix_ends.pop(node, None)
        self._prefix_ends[node] = None
        if len(self._prefix_ends) > _MAX_REMEMBERED_PREFIXES:
            del self._prefix_ends[next(iter(self._prefix_ends))]

    def drop_removed(self) -> None:
        """Remember no prefix that has left the tree."""
        self._prefix_ends = {node: None for node in self._prefix_ends if node.in_tree}

    def hottest(self, limit: int, tenant: str) -> list[PrefixInfo]:
        """The tenant's most used of the remembered prefixes."""
        self.drop_removed()
        own = [node for node in self._prefix_ends if node.is_ready and is_of_tenant(node.namespace.tenant_salt, tenant)]
        ends = sorted(own, key=lambda node: (-node.uses, -node.last_used))
        return [PrefixInfo.of(node, self._blocks.tick) for node in ends[:limit]]
