"""Ids of requests that are over, remembered against re-delivery."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum


class Past(Enum):
    """What is known of a request id that is not running."""

    UNKNOWN = "unknown"
    OVER = "over"
    """It had its terminal message; the same id again is a duplicate."""
    MAY_RETRY = "may_retry"
    """It failed with a retryable code; the same id may be sent again."""


class RecentIds:
    """The last ``capacity`` ids, least recently ended forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[bytes, Past] = OrderedDict()

    def add(self, request_id: bytes, *, may_retry: bool) -> None:
        """Remember how a request ended."""
        self._ids[request_id] = Past.MAY_RETRY if may_retry else Past.OVER
        self._ids.move_to_end(request_id)
        if len(self._ids) > self._capacity:
            self._ids.popitem(last=False)

    def look_up(self, request_id: bytes) -> Past:
        """What is known of the id."""
        return self._ids.get(request_id, Past.UNKNOWN)

    def __len__(self) -> int:
        return len(self._ids)
