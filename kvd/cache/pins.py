"""Pins in memory: named prefixes whose blocks are never evicted."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.cache.blocks import TreeBlocks
from kvd.cache.errors import PinCapacityError, PinNotReadyError, PinTooShortError
from kvd.cache.events import BlocksPinned, BlocksUnpinned
from kvd.cache.hashing import Namespace
from kvd.cache.prefix_tree import Node
from kvd.types import TOKEN_BYTES, PackedTokens


class PinBook:
    """The pins by name, bounded to ``max_blocks`` distinct blocks. A pin's ancestors are its own, so pinned blocks hide no evictable one."""

    __slots__ = ("_block_size_tokens", "_blocks", "_max_blocks", "nodes")

    def __init__(self, blocks: TreeBlocks, block_size_tokens: int, max_blocks: int) -> None:
        self._blocks = blocks
        self._block_size_tokens = block_size_tokens
        self._max_blocks = max_blocks
        self.nodes: dict[str, tuple[Node, ...]] = {}

    def pin(self, name: str, token_ids: PackedTokens, namespace: Namespace) -> int:
        num_tokens = len(token_ids) // TOKEN_BYTES
        num_blocks = num_tokens // self._block_size_tokens
        if num_blocks == 0:
            raise PinTooShortError(name, num_tokens=num_tokens, block_size_tokens=self._block_size_tokens)
        nodes = [node for node in self._blocks.tree.walk(namespace, token_ids, num_blocks) if node.is_ready]
        if len(nodes) < num_blocks:
            raise PinNotReadyError(name, num_ready=len(nodes), num_blocks=num_blocks)
        self._check_room(name, nodes, num_blocks)
        self.unpin(name)
        for node in nodes:
            self._blocks.pin(node)
        self.nodes[name] = tuple(nodes)
        self._blocks.events.append(BlocksPinned(name, tuple(node.block_hash for node in nodes)))
        return num_blocks

    def check(self, name: str, token_ids: PackedTokens, namespace: Namespace) -> None:
        """Whether there is room for a pin, computed or not.

        Raises:
            PinCapacityError: there is none.
        """
        num_blocks = len(token_ids) // TOKEN_BYTES // self._block_size_tokens
        self._check_room(name, self._blocks.tree.walk(namespace, token_ids, num_blocks), num_blocks)

    def _check_room(self, name: str, known: Sequence[Node], num_blocks: int) -> None:
        """``known`` are those of the prefix's ``num_blocks`` blocks that are in the tree; a pin of that name gives its own up."""
        replaced = set(self.nodes.get(name, ()))
        num_pinned = self._blocks.num_pinned - sum(1 for node in replaced if node.num_pins == 1)
        num_new = num_blocks - sum(1 for node in known if node.num_pins > (node in replaced))
        if num_pinned + num_new > self._max_blocks:
            raise PinCapacityError(
                name, num_new=num_new, num_pinned=num_pinned, max_pinned=self._max_blocks, block_size_tokens=self._block_size_tokens
            )

    def unpin(self, name: str) -> bool:
        nodes = self.nodes.pop(name, None)
        if nodes is None:
            return False
        for node in nodes:
            self._blocks.unpin(node)
        self._blocks.events.append(BlocksUnpinned(name, tuple(node.block_hash for node in nodes)))
        return True
