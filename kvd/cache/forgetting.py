"""Forgetting on request: what a selection holds leaves the tree at once, whoever uses it.

Unlike eviction this asks nobody. Tables that hold such blocks keep them, as private ones, until their release; blocks that are being filled are not waited for any
more; a block whose bytes are being copied out is kept as it is until that copy's lease ends.
"""

from __future__ import annotations

from collections.abc import Collection

from kvd.cache.block_table import BlockTable
from kvd.cache.blocks import TreeBlocks
from kvd.cache.events import BlockRemoved
from kvd.cache.prefix_tree import Node, PrefixTree
from kvd.cache.tenants import Selection


def select(tree: PrefixTree, selection: Selection) -> list[Node]:
    """The nodes of a selection, parents before children. O(all nodes).

    For a prefix these are the blocks below it, its last, and those above that nothing else hangs on: not in another prefix and not in a pin (those of the selection are released).
    """
    nodes = [node for node in tree.nodes() if selection.has_salt(node.namespace.tenant_salt)]
    nodes.sort(key=lambda node: node.depth)
    if not selection.token_ids:
        return nodes
    num_blocks = len(selection.token_ids) // tree.block_bytes
    selected: dict[Node, None] = {}
    for namespace in {node.namespace: None for node in nodes}:
        path = tree.walk(namespace, selection.token_ids, num_blocks)
        if len(path) == num_blocks:
            selected[path[-1]] = None
    for node in nodes:
        if node.parent in selected:
            selected[node] = None
    gone = {id(node) for node in selected}
    for namespace in {node.namespace: None for node in nodes}:
        num_gone_below = 0
        for node in reversed(tree.walk(namespace, selection.token_ids, num_blocks)):
            if id(node) not in gone:
                if node.num_children > num_gone_below or node.num_pins:
                    break
                selected[node] = None
            num_gone_below = 1
    return sorted(selected, key=lambda node: node.depth)


def keep_private(tables: Collection[BlockTable], nodes: Collection[Node], blocks: TreeBlocks) -> None:
    """Tables that hold one of these nodes, which are about to leave the tree, are nobody else's from it on."""
    leaving = {id(node) for node in nodes}
    for table in tables:
        for index in range(table.num_in_tree):
            if id(blocks.node_of[table.block_ids[index]]) in leaving:
                table.num_in_tree = index
                table.is_private = True
                break
        if any(id(node) in leaving for node in table.matched):
            table.matched = ()


def remove(blocks: TreeBlocks, node: Node) -> None:
    """A ready node without children and pins leaves the tree; its block is free once nobody holds or copies it."""
    block_id = node.block_id
    if block_id in blocks.leases:
        blocks.hold(block_id)
        blocks.outlived.add(block_id)
    blocks.unlink(node)
    blocks.events.append(BlockRemoved(node.block_hash, block_id))
