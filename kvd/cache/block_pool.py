"""Which blocks are free, and how many block tables hold each of the others."""

from __future__ import annotations

from array import array

from kvd.types import BlockId


class BlockPool:
    """A fixed number of block ids with reference counts.

    A block is *free* (on the free list), *used* (held by at least one table or by a load), or *cached* (held by nobody, kept by
    the prefix tree). The pool counts; what a block holds is the tree's business. Every operation is O(1).
    """

    __slots__ = ("_free", "num_blocks", "num_shared", "num_used", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        """Blocks that somebody holds."""
        self.num_shared = 0
        """Blocks with more than one holder."""
        self.ref_counts = [0] * num_blocks
        self._free = array("I", range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self.num_blocks - len(self._free) - self.num_used

    def take(self) -> BlockId:
        """A free block, now held once."""
        block_id = self._free.pop()
        self.ref_counts[block_id] = 1
        self.num_used += 1
        return BlockId(block_id)

    def hold(self, block_id: BlockId) -> bool:
        """One more holder; whether the block had none."""
        count = self.ref_counts[block_id] + 1
        self.ref_counts[block_id] = count
        if count == 1:
            self.num_used += 1
            return True
        if count == 2:
            self.num_shared += 1
        return False

    def drop(self, block_id: BlockId) -> bool:
        """One holder less; whether none is left. The block is then cached until ``free``."""
        count = self.ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} is dropped more often than held"
        self.ref_counts[block_id] = count
        if count == 0:
            self.num_used -= 1
            return True
        if count == 1:
            self.num_shared -= 1
        return False

    def free(self, block_id: BlockId) -> None:
        """Put a block that nobody holds on the free list; the last one freed is the next one taken."""
        assert self.ref_counts[block_id] == 0, f"block {block_id} is freed while held"
        self._free.append(block_id)

    def free_ids(self) -> list[int]:
        """The free list, for audits."""
        return self._free.tolist()
