"""What the scheduler needs of the world besides the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvd.cache.hashing import Namespace
from kvd.cache.manager import LoadTarget
from kvd.types import BlockHash, PackedTokens


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, never going back."""


class ColdTier(Protocol):
    """Blocks that are on disk and not in memory. Called on the engine thread; never waits."""

    def lookup(self, namespace: Namespace, parent_hash: BlockHash, blocks: Sequence[PackedTokens]) -> Sequence[int]:
        """How often each of those blocks was used that are on disk, from the first on, and quicker loaded than computed; nothing: compute.

        The blocks follow each other below ``parent_hash`` (the namespace's root for a prompt's first). Tokens are compared, not only hashes. O(blocks).
        """

    def start_load(self, load_id: int, namespace: Namespace, targets: Sequence[LoadTarget]) -> None:
        """Read these blocks, parents first, into the pool. Each load ends with one ``LoadDone`` through the inbox, in the order of the starts.

        A target that is no longer wanted is not written: its block may be another's by then.
        """
