"""Whose blocks are taken when a running sequence needs one and none is left."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.scheduler.order import Order
from kvd.scheduler.request import Request, Sequence


def choose_victim(stalled: Iterable[Request], running: Iterable[Sequence], now_s: float, ageing_s: float) -> Request | None:
    """A stalled request that holds blocks, else a running one: the last in the order. The tenants' counters must be up to date.

    Whoever is spared fills the block that it needs before it needs another, and no token that was sampled is ever lost. So each preemption stands for tokens that were
    gained, and there is no livelock, however the order changes meanwhile.
    """
    holders = [request for request in stalled if any(sequence.table is not None for sequence in request.sequences)]
    candidates = holders or list(dict.fromkeys(sequence.request for sequence in running))
    return max(candidates, key=Order(candidates, now_s, ageing_s).key, default=None)
