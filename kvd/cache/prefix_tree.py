"""The tree of full blocks: one node per block, children found by the block's token bytes.

All edges live in one dict, keyed by the parent's serial number followed by the child's token bytes. A look-up compares the tokens
themselves, never only their hash; a node needs no dict of its own, and references point from child to parent alone, so that nodes
form no cycles and stay out of the garbage collector's sight: a million cached blocks cost no collection pauses. The ready nodes' keys are kept in order besides,
so that a node's children stand together there, and whoever of them begins like a given block longest stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.cache.key_order import KeyOrder
from kvd.types import TOKEN_BYTES, BlockHash, BlockId, PackedTokens

_SERIAL_BYTES = 8
_NO_BLOCK = BlockId(-1)

HashFunction = Callable[[BlockHash, PackedTokens], BlockHash]


class Node(msgspec.Struct, eq=False, gc=False):
    """A full block in the tree. *Filling* until ``is_ready``; only a ready node has ready children."""

    parent: Node | None
    """None for a namespace's root and for a node that left the tree."""
    namespace: Namespace
    key: bytes
    child_prefix: bytes
    block_hash: BlockHash
    block_id: BlockId
    depth: int
    """0 for the first block of a prompt, -1 for a root."""
    origin: BlockOrigin
    is_ready: bool
    """Set by the tree."""
    is_fresh: bool
    """Restored or recomputed, and not yet given to a request."""
    uses: int
    """Requests that were given the block, the one that computed it included."""
    last_used: int = 0
    in_tree: bool = True
    num_children: int = 0
    num_pins: int = 0
    queue_ticket: int = 0
    priority: int = 0
    """Retention priority that counts now: that of ``timed``'s first, else ``lasting_priority``."""
    lasting_priority: int = 0
    timed: tuple[tuple[float, int], ...] = ()
    """Higher priorities that end: (instant, priority), the soonest first (cache/retention.py)."""
    floor: float = 0.0
    """The eviction policy's, set when a use begins or ends."""

    @property
    def token_ids(self) -> PackedTokens:
        return self.key[_SERIAL_BYTES:]


class PrefixTree:
    """Roots by namespace, and below each the blocks by their tokens."""

    __slots__ = ("_hash", "_index", "_ready", "_roots", "_serial", "block_bytes", "version")

    def __init__(self, block_size_tokens: int, hash_function: HashFunction) -> None:
        self.block_bytes = block_size_tokens * TOKEN_BYTES
        self.version = 0
        """Changes with every insertion and removal."""
        self._hash = hash_function
        self._index: dict[bytes, Node] = {}
        self._ready = KeyOrder()
        self._roots: dict[Namespace, Node] = {}
        self._serial = 0

    def __del__(self) -> None:
        """Cut the paths, for a long one would be freed by recursion from its leaf to its root, deeper than the C stack."""
        for node in self._index.values():
            node.parent = None

    def __len__(self) -> int:
        return len(self._index)

    def walk(self, namespace: Namespace, token_ids: PackedTokens, max_blocks: int) -> list[Node]:
        """The nodes of the longest path that holds the beginning of ``token_ids``, root first, at most ``max_blocks``."""
        node: Node | None = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return path
        size = self.block_bytes
        get = self._index.get
        prefix = node.child_prefix
        for offset in range(0, min(max_blocks, len(token_ids) // size) * size, size):
            node = get(prefix + token_ids[offset : offset + size])
            if node is None:
                break
            path.append(node)
            prefix = node.child_prefix
        return path

    def begins_alike(self, parent: Node | None, namespace: Namespace, token_ids: PackedTokens) -> tuple[Node, int] | None:
        """Of the ready children of ``parent`` (None: of the namespace's root) one with the longest common beginning with ``token_ids``, at most a block of them, and that
        beginning's number of tokens; None if none begins with the same token. O(log n) of all nodes.
        """
        above = self._roots.get(namespace) if parent is None else parent
        if above is None or not above.num_children or not token_ids:
            return None
        wanted = int.from_bytes(token_ids, "little")
        num_most, best = 0, b""
        for key in self._ready.beside(above.child_prefix + token_ids):
            if key.startswith(above.child_prefix):
                differs = wanted ^ int.from_bytes(key[_SERIAL_BYTES : _SERIAL_BYTES + len(token_ids)], "little")
                num_bits = (differs & -differs).bit_length() - 1 if differs else 8 * len(token_ids)
                num_tokens = num_bits // (8 * TOKEN_BYTES)
                if num_tokens > num_most:
                    num_most, best = num_tokens, key
        return (self._index[best], num_most) if num_most else None

    def set_ready(self, node: Node) -> None:
        """A node in the tree is filled."""
        assert not node.is_ready, "a node is filled once"
        node.is_ready = True
        self._ready.add(node.key)

    def child(self, parent: Node, token_ids: PackedTokens) -> Node | None:
        return self._index.get(parent.child_prefix + token_ids)

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made if need be; it goes when its last child goes."""
        root = self._roots.get(namespace)
        if root is None:
            prefix = self._next_prefix()
            root = Node(None, namespace, b"", prefix, namespace.root, _NO_BLOCK, -1, BlockOrigin.COMPUTED, True, False, 0)
            self._roots[namespace] = root
        return root

    def insert(self, parent: Node, token_ids: PackedTokens, block_id: BlockId, *, origin: BlockOrigin, is_ready: bool, uses: int) -> Node:
        """Add a child that is not there yet."""
        key = parent.child_prefix + token_ids
        assert key not in self._index, "a path has one node"
        assert parent.in_tree, "a child needs a parent in the tree"
        node = Node(
            parent,
            parent.namespace,
            key,
            self._next_prefix(),
            self._hash(parent.block_hash, token_ids),
            block_id,
            parent.depth + 1,
            origin,
            is_ready,
            origin is not BlockOrigin.COMPUTED,
            uses,
        )
        self._index[key] = node
        if is_ready:
            self._ready.add(key)
        parent.num_children += 1
        self.version += 1
        return node

    def remove(self, node: Node, *, is_unlinked: bool = False) -> Node:
        """Take a node out; its parent (which may be a root that goes too). ``is_unlinked``: the parent's count has been lowered already."""
        parent = node.parent
        assert parent is not None, "roots go by themselves"
        del self._index[node.key]
        if node.is_ready:
            self._ready.remove(node.key)
        if not is_unlinked:
            parent.num_children -= 1
        node.in_tree = False
        node.parent = None
        self.version += 1
        if parent.depth < 0 and parent.num_children == 0:
            self._roots.pop(parent.namespace, None)
            parent.in_tree = False
        return parent

    def nodes(self) -> list[Node]:
        """Every node, for audits."""
        return list(self._index.values())

    def ready_keys(self) -> list[bytes]:
        """The order's keys, for audits."""
        return self._ready.keys()

    def roots(self) -> list[Node]:
        """Every root, for audits."""
        return list(self._roots.values())

    def _next_prefix(self) -> bytes:
        self._serial += 1
        return self._serial.to_bytes(
            _SERIAL_BYTES, "big"
        )  # the children of young nodes come last in the order: most insertions are at its end
