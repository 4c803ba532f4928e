"""The head of the queue for whom there were too few blocks: it is matched and counted anew only when there may be enough."""

from __future__ import annotations

from kvd.cache.manager import CacheManager
from kvd.scheduler.request import Sequence
from kvd.scheduler.roster import Roster


class Shortage:
    """What there was when a sequence was last refused. Those who run only take blocks, and give them back when they leave; so in between the answer stays."""

    __slots__ = ("_cache", "_num_available", "_num_running", "_roster", "_sequence")

    def __init__(self, cache: CacheManager, roster: Roster) -> None:
        self._cache = cache
        self._roster = roster
        self._sequence: Sequence | None = None
        self._num_available = 0
        self._num_running = 0

    def note(self, sequence: Sequence) -> None:
        """The sequence was refused, and nobody's blocks could be taken for it."""
        cache, roster = self._cache, self._roster
        # who is leaving, and leases and loads, hold blocks back that are counted already: their end makes room and raises no count
        is_lasting = not (roster.num_leaving or cache.num_transient)
        self._sequence = sequence if is_lasting else None
        self._num_available = cache.num_available
        self._num_running = len(roster.running)

    def lasts(self, sequence: Sequence) -> bool:
        """Whether the sequence would be refused again: there are no more blocks than there were, and they are reserved for no fewer who run. If not, it is over."""
        if (
            sequence is self._sequence
            and self._cache.num_available <= self._num_available
            and len(self._roster.running) >= self._num_running
        ):
            return True
        self._sequence = None
        return False
