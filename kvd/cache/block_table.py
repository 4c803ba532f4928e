"""A sequence's blocks, and the small records that the front door hands out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from kvd.cache.hashing import Namespace
from kvd.cache.prefix_tree import Node
from kvd.types import TOKEN_BYTES, BlockHash, BlockId, PackedTokens


class BlockTable:
    """Block ids by position: block i holds positions ``i * block_size_tokens`` and on. Compared by identity.

    Readers may use every public attribute; only the cache writes them.
    """

    __slots__ = (
        "block_ids",
        "fills",
        "is_broken",
        "is_private",
        "matched",
        "namespace",
        "num_cached_tokens",
        "num_in_tree",
        "num_recomputed_tokens",
        "num_restored_tokens",
        "num_tokens",
        "partial",
        "waits_for",
        "writable_tokens",
    )

    def __init__(self, namespace: Namespace, block_ids: list[BlockId], num_tokens: int, writable_tokens: int) -> None:
        self.namespace = namespace
        self.block_ids = block_ids
        self.num_tokens = num_tokens
        """Positions that hold content or are promised to be written."""
        self.writable_tokens = writable_tokens
        """Positions up to which ``extend`` needs no block and no copy."""
        self.num_cached_tokens = 0
        """Tokens matched in the tree when the table was allocated: whole blocks, and of one more the beginning that ``partial`` brings."""
        self.num_restored_tokens = 0
        """Of these, read from disk and given to a request for the first time; what is still being read counts when it is there."""
        self.num_recomputed_tokens = 0
        """Of these, recomputed before READY and given to a request for the first time."""
        self.fills: deque[Node] = deque()
        """Filling nodes that this table's owner is to compute, in order."""
        self.waits_for: deque[Node] = deque()
        """Matched nodes that others are still filling, in order."""
        self.is_broken = False
        """A node that it waited for failed: the table can only be released."""
        self.is_private = False
        """What it computes enters the tree no more: it was forgotten."""
        self.matched: tuple[Node, ...] = ()
        """Matched nodes whose use is told when ``waits_for`` is empty; empty then."""
        self.partial: CopyOnWrite | None = None
        """A copy to make before the sequence's first step: its beginning is the matched tokens behind the last whole block. The table holds the source until the cache is told that
        the step was submitted."""
        self.num_in_tree = 0
        """Blocks, from the first on, that are the tree's nodes; those after them are private."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the tree holds of a prompt: the matched nodes, root first, and perhaps a ready one below the last that begins with the tokens which follow."""

    namespace: Namespace
    token_ids: PackedTokens
    nodes: tuple[Node, ...]
    num_tokens: int
    """In all, those of ``partial`` included."""
    tree_version: int
    partial: PartialMatch | None = None

    def cut(self, num_tokens: int, block_size_tokens: int) -> PrefixMatch:
        """The whole blocks of the match within its first ``num_tokens`` tokens. To be allocated before anything else changes the tree."""
        nodes = self.nodes[: num_tokens // block_size_tokens]
        return replace(self, nodes=nodes, num_tokens=len(nodes) * block_size_tokens, partial=None)


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """The first ``num_tokens`` tokens of this node's block are the prompt's next ones."""

    node: Node
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CopyOnWrite:
    """Copy block ``source`` to ``target`` before anything is written: the table holds ``target`` at ``index`` from now on."""

    source: BlockId
    target: BlockId
    index: int


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where the bytes of a block read from disk go. ``node`` is the handle for ``complete_fill`` and ``fail_fill``."""

    node: Node
    block_id: BlockId
    block_hash: BlockHash

    @property
    def is_wanted(self) -> bool:
        """Whether the node is still in the tree; if not, the block may be another's already and must not be written."""
        return self.node.in_tree


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """A prefix in memory, for people: where it is kept, how long it is, how often and when requests were given it."""

    namespace: Namespace
    token_ids: PackedTokens
    num_blocks: int
    num_tokens: int
    uses: int
    age_ticks: int
    """Allocations and releases, by all requests, since its last use."""
    is_pinned: bool
    block_hash: BlockHash
    """Of its last block."""

    @classmethod
    def of(cls, node: Node, tick: int) -> PrefixInfo:
        """The prefix that ends with ``node``; ``tick`` is the present."""
        blocks: list[PackedTokens] = []
        ancestor: Node | None = node
        while ancestor is not None and ancestor.depth >= 0:
            blocks.append(ancestor.token_ids)
            ancestor = ancestor.parent
        token_ids = b"".join(reversed(blocks))
        return cls(
            namespace=node.namespace,
            token_ids=token_ids,
            num_blocks=len(blocks),
            num_tokens=len(token_ids) // TOKEN_BYTES,
            uses=node.uses,
            age_ticks=tick - node.last_used,
            is_pinned=node.num_pins > 0,
            block_hash=node.block_hash,
        )

    def as_dict(self) -> dict[str, Any]:
        """The report's form, without the tokens."""
        return {
            "tokens": self.num_tokens,
            "blocks": self.num_blocks,
            "hits": self.uses,
            "age_ticks": self.age_ticks,
            "pinned": self.is_pinned,
            "residency": "memory",
        }
