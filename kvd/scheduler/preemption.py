"""Whose blocks are taken when a running sequence needs one and none is left."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.scheduler.request import Request, Sequence


def choose_victim(stalled: Iterable[Request], running: Iterable[Sequence]) -> Request | None:
    """A stalled request that holds blocks, else a running one: background work first, then the latest arrived.

    The earliest running request is chosen last. So it always gets on, and with it everyone in turn: there is no livelock.
    """
    holders = [request for request in stalled if any(sequence.table is not None for sequence in request.sequences)]
    candidates = holders or [sequence.request for sequence in running]
    return max(candidates, key=lambda request: (request.priority, request.arrival), default=None)
