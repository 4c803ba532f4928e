"""Loads from disk on behalf of waiting requests: what fell out of memory comes back while others run.

When a sequence is about to be seated, the full blocks behind its match are looked up in the cold tier, once a plan. Those that are worth it become filling nodes that
nobody's table fills, so the sequence follows them as it would follow another request's, and so does whoever else matches them. A load goes on to its end
whatever becomes of those who wait for it: its blocks are cached then, or have left the tree.
"""

from __future__ import annotations

from kvd.cache.manager import CacheManager, LoadTarget, Node, PrefixMatch
from kvd.scheduler.ports import ColdTier
from kvd.scheduler.request import Sequence
from kvd.scheduler.roster import Roster
from kvd.types import TOKEN_BYTES


class Loads:
    """The loads under way, together at most ``max_blocks``; what does not fit is computed. Without a cold tier nothing is ever loaded."""

    def __init__(self, cache: CacheManager, roster: Roster, cold_tier: ColdTier | None, max_blocks: int) -> None:
        self._cache = cache
        self._roster = roster
        self._cold_tier = cold_tier
        self._max_blocks = max_blocks
        self._block_bytes = cache.block_size_tokens * TOKEN_BYTES
        self._loads: dict[int, list[LoadTarget]] = {}
        self._loading: set[Node] = set()
        self.num_loads = 0
        """Begun since the start."""
        self.num_failed = 0
        """Of these, ended without all of their blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the loads under way."""
        return len(self._loading)

    def begin(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Load what follows ``match`` of the waiting sequence's tokens, as far as it is on disk, worth it, and within the bounds.

        Blocks for all of the sequence and the next one of each who runs must be there, as for its admission: a load takes none that they need.
        """
        request = sequence.request
        if self._cold_tier is None or sequence.has_asked_disk or request.has_failed_load or request.is_private:
            return
        cache, nodes = self._cache, match.nodes
        num_matched = len(nodes)
        num_missing = (sequence.num_known - 1) // cache.block_size_tokens - num_matched
        num_wanted = min(num_missing, self._max_blocks - len(self._loading))
        num_new = cache.blocks_for(sequence.num_known) - num_matched
        if num_wanted <= 0 or num_new + len(self._roster.running) > cache.num_available:
            return
        if nodes and not nodes[-1].is_ready and nodes[-1] not in self._loading:
            return  # a request computes it, and what is below is not read before it
        size, first = self._block_bytes, num_matched * self._block_bytes
        blocks = [match.token_ids[start : start + size] for start in range(first, first + num_wanted * size, size)]
        parent_hash = nodes[-1].block_hash if nodes else match.namespace.root
        sequence.has_asked_disk = True
        uses = self._cold_tier.lookup(match.namespace, parent_hash, blocks)
        if not uses:
            return
        chain = [(node.token_ids, node.uses) for node in nodes] + list(zip(blocks, uses, strict=False))
        targets = cache.begin_load(match.namespace, chain, retention=self._roster.retention(request))
        if not targets:
            return
        self.num_loads += 1
        self._loads[self.num_loads] = targets
        self._loading.update(target.node for target in targets)
        self._cold_tier.start_load(self.num_loads, match.namespace, targets)

    def end(self, load_id: int, num_loaded: int) -> None:
        """A load is over: its first ``num_loaded`` blocks are ready; the rest leaves the tree, and who waited for it is planned anew, to be computed."""
        nodes = [target.node for target in self._loads.pop(load_id)]
        self._loading.difference_update(nodes)
        self._cache.complete_fill(nodes[:num_loaded])
        if num_loaded < len(nodes):
            self.num_failed += 1
            for sequence in self._roster.withdraw(nodes[num_loaded:]):
                sequence.request.has_failed_load = True

    def check_invariants(self) -> None:
        """Every block of a load is filling for nobody, or has left the tree with a block above it."""
        nodes = [target.node for targets in self._loads.values() for target in targets]
        assert len(set(nodes)) == len(nodes) == len(self._loading), "a block is loaded twice, or miscounted"
        assert not any(node.is_ready for node in nodes), "a block is ready before its load is over"
        assert len(self._loading) <= self._max_blocks, "more is loaded than may be"
