"""Who fills which node, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.cache.block_table import BlockTable
from kvd.cache.prefix_tree import Node


class _Fill:
    __slots__ = ("children", "followers", "owner")

    def __init__(self, owner: BlockTable | None) -> None:
        self.owner = owner
        self.followers: list[BlockTable] = []
        self.children: list[Node] = []


class Fillings:
    """The filling nodes. An owner is a block table or, for a load from disk, None.

    Filling nodes know their filling children, so that a failure finds everything below it without a search.
    """

    __slots__ = ("_fills",)

    def __init__(self) -> None:
        self._fills: dict[Node, _Fill] = {}

    def __len__(self) -> int:
        return len(self._fills)

    def __contains__(self, node: Node) -> bool:
        return node in self._fills

    def begin(self, node: Node, owner: BlockTable | None) -> None:
        self._fills[node] = _Fill(owner)
        parent = node.parent
        if parent is not None and not parent.is_ready:
            self._fills[parent].children.append(node)
        if owner is not None:
            owner.fills.append(node)

    def owner(self, node: Node) -> BlockTable | None:
        return self._fills[node].owner

    def follow(self, node: Node, follower: BlockTable) -> None:
        self._fills[node].followers.append(follower)
        follower.waits_for.append(node)

    def unfollow(self, follower: BlockTable) -> None:
        """The table waits for nothing any more."""
        for node in follower.waits_for:
            fill = self._fills.get(node)
            if fill is not None:
                fill.followers.remove(follower)
        follower.waits_for.clear()

    def complete(self, node: Node) -> tuple[BlockTable | None, list[BlockTable]]:
        """The node is filled: its owner, and its followers, which no longer wait for it."""
        fill = self._fills.pop(node)
        if fill.owner is not None:
            filled = fill.owner.fills.popleft()
            assert filled is node, "an owner fills its nodes in order"
        for follower in fill.followers:
            awaited = follower.waits_for.popleft()
            assert awaited is node, "a table's nodes become ready in order"
        return fill.owner, fill.followers

    def fail(self, nodes: Iterable[Node]) -> tuple[list[tuple[Node, BlockTable | None]], list[BlockTable]]:
        """Forget these nodes and all filling nodes below them.

        Returns:
            the failed nodes, parents first, with their owners; and the tables, other than the owners of ``nodes``, that waited for
            a failed node: they are broken now.
        """
        failed: dict[Node, BlockTable | None] = {}
        direct_owners: set[BlockTable | None] = set()
        followers: dict[BlockTable, None] = {}
        stack: list[Node] = []
        for node in nodes:
            if node in self._fills:
                direct_owners.add(self._fills[node].owner)
                stack.append(node)
        stack.reverse()
        while stack:
            node = stack.pop()
            fill = self._fills.pop(node, None)
            if fill is None:
                continue
            failed[node] = fill.owner
            followers.update(dict.fromkeys(fill.followers))
            stack.extend(reversed(fill.children))
        for owner in {owner for owner in failed.values() if owner is not None}:
            kept = [node for node in owner.fills if node not in failed]
            owner.fills.clear()
            owner.fills.extend(kept)
        for follower in followers:
            self.unfollow(follower)
            follower.is_broken = True
        ordered = sorted(failed.items(), key=lambda item: item[0].depth)
        return ordered, [table for table in followers if table not in direct_owners]

    def items(self) -> list[tuple[Node, BlockTable | None, list[BlockTable], list[Node]]]:
        """Everything, for audits."""
        return [(node, fill.owner, list(fill.followers), list(fill.children)) for node, fill in self._fills.items()]
