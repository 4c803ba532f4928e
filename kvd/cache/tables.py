"""The block tables that have not been released: what each holds, and how it begins, grows, forks, shrinks and ends."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cache.block_table import BlockTable, CopyOnWrite, PartialMatch, PrefixMatch
from kvd.cache.blocks import TreeBlocks
from kvd.cache.events import BlockOrigin
from kvd.cache.filling import Fillings
from kvd.cache.prefix_tree import Node
from kvd.cache.retention import Retention
from kvd.cache.uses import Uses
from kvd.types import PackedTokens


class TableBook:
    """What the front door (cache/manager.py) says of tables, done."""

    __slots__ = ("_block_size_tokens", "_blocks", "_counters", "_fillings", "_pool", "_tree", "_uses", "tables")

    def __init__(self, blocks: TreeBlocks, fillings: Fillings, uses: Uses, block_size_tokens: int) -> None:
        self._blocks = blocks
        self._pool = blocks.pool
        self._tree = blocks.tree
        self._fillings = fillings
        self._uses = uses
        self._counters = uses.counters
        self._block_size_tokens = block_size_tokens
        self.tables: set[BlockTable] = set()

    def allocate(
        self, match: PrefixMatch, num_tokens: int, *, origin: BlockOrigin, counts_use: bool, reserve_blocks: int, is_private: bool
    ) -> BlockTable | None:
        """A table for a match of the tree as it is. Where there is no room for both the source and the target of a copy, what it would have brought is computed."""
        path, partial = match.nodes, match.partial
        num_new = self._blocks_for(num_tokens) - len(path)
        assert num_new > 0, "at least the last token is computed"
        if partial is not None and self._take(num_new, [*path, partial.node], reserve_blocks):
            return self._begin(match, num_tokens, num_new, partial, origin=origin, counts_use=counts_use, is_private=is_private)
        if self._take(num_new, path, reserve_blocks):
            return self._begin(match, num_tokens, num_new, None, origin=origin, counts_use=counts_use, is_private=is_private)
        return None

    def _take(self, num_new: int, nodes: Sequence[Node], reserve_blocks: int) -> bool:
        """Hold these nodes and have ``num_new`` blocks free besides; False changes nothing."""
        counts = self._pool.ref_counts
        num_idle = sum(1 for node in nodes if counts[node.block_id] == 0 and node.num_pins == 0)
        if num_new + reserve_blocks > self._blocks.num_available - num_idle:
            return False
        for node in nodes:
            self._blocks.hold(node.block_id)
        if self._blocks.make_free(num_new):
            return True
        for node in reversed(nodes):
            self._blocks.drop(node.block_id)
        return False

    def _begin(
        self,
        match: PrefixMatch,
        num_tokens: int,
        num_new: int,
        partial: PartialMatch | None,
        *,
        origin: BlockOrigin,
        counts_use: bool,
        is_private: bool,
    ) -> BlockTable:
        path = match.nodes
        block_ids = [node.block_id for node in path]
        block_ids.extend(self._pool.take() for _ in range(num_new))
        self._counters["allocations"] += num_new
        table = BlockTable(match.namespace, block_ids, num_tokens, len(block_ids) * self._block_size_tokens)
        self.tables.add(table)
        table.is_private = is_private
        if partial is not None:
            table.partial = CopyOnWrite(partial.node.block_id, block_ids[len(path)], len(path))
            self._counters["copies"] += 1
        if is_private:
            table.num_in_tree = len(path)
        else:
            self._begin_fills(table, match.token_ids, path, origin=origin, uses=int(counts_use))
        self._uses.use(table, path, partial, counts_use=counts_use)
        return table

    def _begin_fills(self, table: BlockTable, token_ids: PackedTokens, path: Sequence[Node], *, origin: BlockOrigin, uses: int) -> None:
        size = self._tree.block_bytes
        parent = path[-1] if path else None
        table.num_in_tree = len(path)
        for index in range(len(path), table.num_tokens // self._block_size_tokens):
            if parent is None:
                parent = self._tree.root(table.namespace)
            tokens = token_ids[index * size : (index + 1) * size]
            if self._tree.child(parent, tokens) is not None:
                break  # the prompt's last block: it is not matched, for its last token's sake
            parent = self._blocks.insert(parent, tokens, table.block_ids[index], origin=origin, is_ready=False, uses=uses)
            self._fillings.begin(parent, table)
            table.num_in_tree = index + 1

    def end_copy(self, table: BlockTable) -> None:
        """The table no longer holds the block that its beginning is copied from."""
        if table.partial is not None:
            source, table.partial = table.partial.source, None
            self._blocks.drop(source)

    def extend(self, table: BlockTable, num_tokens: int) -> tuple[CopyOnWrite, ...] | None:
        """Make more positions writable than are; None changes nothing."""
        block_ids, counts, node_of = table.block_ids, self._pool.ref_counts, self._blocks.node_of
        first_written = table.num_tokens // self._block_size_tokens
        shared = [i for i in range(first_written, len(block_ids)) if counts[block_ids[i]] > 1 or node_of[block_ids[i]] is not None]
        num_added = max(0, self._blocks_for(num_tokens) - len(block_ids))
        if not self._blocks.make_free(num_added + len(shared)):
            return None
        copies = []
        for index in shared:
            copies.append(CopyOnWrite(block_ids[index], self._pool.take(), index))
            block_ids[index] = copies[-1].target
        for copy in copies:
            self._blocks.drop(copy.source)
        block_ids.extend(self._pool.take() for _ in range(num_added))
        table.num_tokens = max(num_tokens, table.num_tokens)
        table.writable_tokens = len(block_ids) * self._block_size_tokens
        self._counters["allocations"] += num_added + len(copies)
        self._counters["copies"] += len(copies)
        return tuple(copies)

    def record(self, table: BlockTable, token_ids: PackedTokens | bytearray, num_computed: int) -> None:
        """The table's full blocks become ready nodes, as far as the path to them is its own."""
        num_full = num_computed // self._block_size_tokens
        index = table.num_in_tree
        if index >= num_full or table.is_private:
            return
        assert not table.fills, "output comes after the prompt"
        assert not table.is_broken, "a broken table can only be released"
        size, block_ids, node_of = self._tree.block_bytes, table.block_ids, self._blocks.node_of
        parent = node_of[block_ids[index - 1]] if index else None
        while index < num_full:
            if parent is None:
                parent = self._tree.root(table.namespace)
            tokens = bytes(token_ids[index * size : (index + 1) * size])
            node = self._tree.child(parent, tokens)
            if node is None:
                node = self._blocks.insert(parent, tokens, block_ids[index], origin=BlockOrigin.COMPUTED, is_ready=True, uses=1)
                self._blocks.tell_stored(node)
            elif node.block_id != block_ids[index] and not self._blocks.replace(node, block_ids[index]):
                break
            parent = node
            index += 1
        table.num_in_tree = index

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks."""
        assert not table.fills, "only a computed prompt can be forked"
        assert not table.waits_for, "only a computed prompt can be forked"
        for block_id in table.block_ids:
            self._blocks.hold(block_id)
        forked = BlockTable(table.namespace, list(table.block_ids), table.num_tokens, table.num_tokens)
        forked.num_in_tree = table.num_in_tree
        forked.is_private = table.is_private
        table.writable_tokens = table.num_tokens
        self.tables.add(forked)
        self._counters["forks"] += 1
        return forked

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Give up the positions from ``num_tokens`` on."""
        assert not table.fills, "a prompt that is being computed is not truncated"
        assert num_tokens <= table.num_tokens, "truncating does not extend"
        keep = self._blocks_for(num_tokens)
        for block_id in reversed(table.block_ids[keep:]):
            self._blocks.drop(block_id)
        del table.block_ids[keep:]
        table.num_tokens = num_tokens
        table.writable_tokens = num_tokens
        table.num_in_tree = min(table.num_in_tree, num_tokens // self._block_size_tokens)

    def rewind(self, table: BlockTable, num_tokens: int) -> None:
        """Take the content of the positions from ``num_tokens`` on back, and keep their blocks."""
        assert not table.fills, "a prompt that is being computed is not rewound"
        assert table.num_in_tree * self._block_size_tokens <= num_tokens <= table.num_tokens, "only what nobody was told of is rewound"
        table.num_tokens = num_tokens

    def release(self, table: BlockTable, retention: Retention) -> None:
        """The table holds nothing any more; what was its, and is in the tree, is kept as ``retention`` or a higher one of another use says."""
        assert not table.fills, "fail_fill comes first, for its followers must be told"
        self.tables.remove(table)
        self._fillings.unfollow(table)
        self.end_copy(table)
        self._blocks.tick += 1
        for block_id in reversed(table.block_ids):
            self._blocks.drop(block_id, ends_use=retention)
        table.block_ids.clear()
        table.num_tokens = table.writable_tokens = 0
        table.matched = ()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size_tokens)
