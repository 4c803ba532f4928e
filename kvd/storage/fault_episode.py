"""A fault of the disk from its first refusal until blocks are stored again and there is room for more, however often it is tried meanwhile: reported once, and
once when it is over.
"""

from __future__ import annotations

from kvd.storage.ports import Log


class FaultEpisode:
    """``reason`` says why blocks do not reach the disk, its first word which errno; empty when they do. The planner's own; read by any thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._reported: set[tuple[str, bool]] = set()
        self._num_refusals = 0
        self.reason = ""

    def refused(self, reason: str, *, generation_lost: bool) -> bool:
        """Whether the episode begins with this."""
        is_news = not self.reason
        cause = reason.partition(": ")[0]
        if not {(cause, generation_lost), (cause, True)} & self._reported:
            self._reported.add((cause, generation_lost))
            self._log.error("storage.degraded", reason=reason, generation_lost=generation_lost)
        self.reason = reason
        self._num_refusals += 1
        return is_news

    @property
    def is_second_refusal(self) -> bool:
        """Whether the disk took a row, and then no block again: it is full indeed, and only pages that become free in the file can help. If they do, and are
        used up in turn, it is so once more.
        """
        return self._num_refusals == 2

    def stored(self) -> None:
        """Blocks were stored, be it in pages that had become free."""
        self._num_refusals = min(self._num_refusals, 1)

    def over(self) -> None:
        """Blocks are stored again, or could be, and the disk has room."""
        if self.reason:
            self._log.info("storage.resumed")
        self._reported.clear()
        self._num_refusals = 0
        self.reason = ""
