"""Checks every count of the cache against what it counts. For tests and for ``kvd doctor``-like audits; never on the hot path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from kvd.cache.block_table import BlockTable
from kvd.cache.blocks import TreeBlocks
from kvd.cache.filling import Fillings
from kvd.cache.prefix_tree import Node


def check_cache(
    blocks: TreeBlocks,
    fillings: Fillings,
    *,
    pins: Mapping[str, tuple[Node, ...]],
    tables: Collection[BlockTable],
    num_loading: int,
    block_size_tokens: int,
) -> None:
    """Audit the cache; an AssertionError names what is wrong."""
    _check_holders(blocks, fillings, tables, num_loading)
    _check_states(blocks)
    _check_tree(blocks, block_size_tokens)
    _check_retentions(blocks)
    _check_pins(blocks, pins)
    _check_fillings(fillings, tables)
    _check_tables(blocks, tables, block_size_tokens)


def _check_holders(blocks: TreeBlocks, fillings: Fillings, tables: Collection[BlockTable], num_loading: int) -> None:
    holders: Counter[int] = Counter()
    for table in tables:
        held = table.block_ids if table.partial is None else [*table.block_ids, table.partial.source]
        assert len(set(held)) == len(held), "a table holds a block twice"
        holders.update(held)
    loading = [node.block_id for node, owner, _, _ in fillings.items() if owner is None]
    assert len(loading) == num_loading, f"{len(loading)} blocks are loading, {num_loading} counted"
    holders.update(loading)
    holders.update(blocks.outlived)
    for block_id, count in enumerate(blocks.pool.ref_counts):
        assert count == holders[block_id], f"block {block_id} has {holders[block_id]} holders, {count} counted"
    num_shared = sum(1 for count in holders.values() if count > 1)
    assert blocks.pool.num_used == len(holders), f"{len(holders)} blocks are used, {blocks.pool.num_used} counted"
    assert blocks.pool.num_shared == num_shared, f"{num_shared} blocks are shared, {blocks.pool.num_shared} counted"


def _check_states(blocks: TreeBlocks) -> None:
    pool = blocks.pool
    free = pool.free_ids()
    assert len(set(free)) == len(free), "a block is on the free list twice"
    for block_id in free:
        assert pool.ref_counts[block_id] == 0, f"block {block_id} is free and held"
        assert blocks.node_of[block_id] is None, f"block {block_id} is free and in the tree"
    is_free = set(free)
    idle = [i for i, count in enumerate(pool.ref_counts) if count == 0 and i not in is_free]
    for block_id in idle:
        assert blocks.node_of[block_id] is not None, f"block {block_id} is lost: neither free, held nor in the tree"
    assert len(free) + pool.num_used + len(idle) == pool.num_blocks, "free, used and cached blocks are not all blocks"
    assert pool.num_cached == len(idle), f"{len(idle)} blocks are cached, {pool.num_cached} counted"
    assert blocks.outlived <= blocks.leases.keys(), "a forgotten block is held and not leased"
    for block_id in blocks.leases.keys() - blocks.outlived:
        node = blocks.node_of[block_id]
        assert node is not None, f"block {block_id} is leased and not in the tree"
        assert node.is_ready, f"block {block_id} is leased and filling"


def _check_tree(blocks: TreeBlocks, block_size_tokens: int) -> None:
    nodes = blocks.tree.nodes()
    in_tree = {id(node) for node in nodes}
    by_block = [node for node in blocks.node_of if node is not None]
    assert {id(node) for node in by_block} == in_tree, "the tree's nodes and the blocks' nodes differ"
    assert blocks.tree.ready_keys() == sorted(node.key for node in nodes if node.is_ready), (
        "the order holds other nodes than the ready ones"
    )
    roots = {id(root): root for root in blocks.tree.roots()}
    num_children: Counter[int] = Counter(id(node.parent) for node in nodes)
    for root in roots.values():
        assert num_children[id(root)] == root.num_children > 0, "a root without children, or miscounted"
    for node in nodes:
        parent = node.parent
        assert node.in_tree, "a removed node is in the index"
        assert parent is not None, "a node without a parent"
        assert id(parent) in (in_tree if parent.depth >= 0 else roots), "a node's parent has left the tree"
        assert node.depth == parent.depth + 1, "a node's depth is not its parent's plus one"
        assert node.namespace == parent.namespace, "a node's namespace is not its parent's"
        assert len(node.token_ids) == 4 * block_size_tokens, "a node's key is not a block of tokens"
        assert node.num_children == num_children[id(node)], "children are miscounted"
        assert parent.is_ready or not node.is_ready, "a ready node below a filling one"
        assert blocks.node_of[node.block_id] is node, "a block names another node"
    queued = blocks.queued()
    assert len({id(node) for _, node in queued}) == len(queued), "a node is queued twice"
    assert all(priority == node.priority for priority, node in queued), "a node is queued with another priority than it has"
    evictable = {id(node) for node in nodes if blocks.is_evictable(node)}
    assert {id(node) for _, node in queued} == evictable, "the eviction order does not hold exactly the evictable leaves"


def _check_retentions(blocks: TreeBlocks) -> None:
    due = {id(node): instant for instant, nodes in blocks.retentions.due().items() for node in nodes}
    assert all(blocks.retentions.due().values()), "an instant at which nothing ends"
    for node in blocks.tree.nodes():
        instants, priorities = [each[0] for each in node.timed], [each[1] for each in node.timed]
        assert instants == sorted(set(instants)), "a node's retentions are not in the order of their ends"
        assert priorities == sorted(set(priorities), reverse=True), "a retention is covered by a longer one"
        assert all(priority > node.lasting_priority for priority in priorities), "a retention is covered by the lasting one"
        assert node.priority == (priorities[0] if priorities else node.lasting_priority), "a node's priority is not its highest"
        assert due.pop(id(node), None) == (instants[0] if instants else None), "a node's retention ends unseen"
    assert not due, "a node that left the tree is still kept"


def _check_pins(blocks: TreeBlocks, pins: Mapping[str, tuple[Node, ...]]) -> None:
    num_pins: Counter[int] = Counter()
    for name, pinned in pins.items():
        for depth, node in enumerate(pinned):
            assert node.in_tree, f"a block of pin {name!r} was evicted"
            assert node.is_ready, f"a block of pin {name!r} is filling"
            assert node.depth == depth, f"pin {name!r} has a hole"
            num_pins[id(node)] += 1
    for node in blocks.tree.nodes():
        assert node.num_pins == num_pins[id(node)], "pins are miscounted"
    num_idle = sum(1 for node in blocks.tree.nodes() if node.num_pins and blocks.pool.ref_counts[node.block_id] == 0)
    assert blocks.num_pinned == len(num_pins), f"{len(num_pins)} blocks are pinned, {blocks.num_pinned} counted"
    assert blocks.num_idle_pinned == num_idle, f"{num_idle} pinned blocks are idle, {blocks.num_idle_pinned} counted"


def _check_fillings(fillings: Fillings, tables: Collection[BlockTable]) -> None:
    owned = {id(node): table for table in tables for node in table.fills}
    awaited: dict[int, set[int]] = {}
    for table in tables:
        for node in table.waits_for:
            awaited.setdefault(id(node), set()).add(id(table))
    filling = fillings.items()
    for node, owner, followers, children in filling:
        assert node.in_tree, "a filling node has left the tree"
        assert not node.is_ready, "a ready node is filling"
        assert owned.get(id(node)) is owner, "a filling node and its owner disagree"
        assert {id(table) for table in followers} == awaited.get(id(node), set()), "a filling node and its followers disagree"
        assert all(child.parent is node for child in children if child.in_tree), "a filling node and its children disagree"
    known = {id(node) for node, _, _, _ in filling}
    assert known >= set(owned), "a table fills a node that nobody knows as filling"
    assert known >= set(awaited), "a table waits for a node that nobody fills"


def _check_tables(blocks: TreeBlocks, tables: Collection[BlockTable], block_size_tokens: int) -> None:
    for table in tables:
        num_blocks = len(table.block_ids)  # after a rewind, more than the tokens need
        assert -(-table.num_tokens // block_size_tokens) <= num_blocks, "a table's blocks do not fit its tokens"
        assert table.num_tokens <= table.writable_tokens <= num_blocks * block_size_tokens, "a table's writable range is wrong"
        for index in range(table.num_tokens // block_size_tokens, num_blocks):
            block_id = table.block_ids[index]
            if table.writable_tokens > table.num_tokens:
                assert blocks.pool.ref_counts[block_id] == 1, "a block that may be written is shared"
                assert blocks.node_of[block_id] is None, "a block that may be written is in the tree"
        nodes = [blocks.node_of[block_id] for block_id in table.block_ids]
        for depth, node in enumerate(nodes):
            assert node is None or node.depth == depth, "a table holds a tree block at the wrong place"
            assert node is None or node.namespace == table.namespace, "a table holds a block of another namespace"
            assert node is None or depth == 0 or node.parent is nodes[depth - 1], "a table does not hold the path to its node"
        if table.partial is not None:
            assert table.block_ids[table.partial.index] == table.partial.target, "a block that is to be copied into has left the table"
        if not table.is_broken:
            assert all(node is not None for node in nodes[: table.num_in_tree]), "a table has lost a node"
        assert not table.is_broken or not (table.fills or table.waits_for), "a broken table still fills or waits"
