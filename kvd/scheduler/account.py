"""One tenant's account in the virtual token counter (see ``tenants``)."""

from __future__ import annotations


class Tenant:
    """One tenant's account. Compared by identity."""

    __slots__ = ("counter", "name", "num_live", "num_waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.counter = 0.0
        """Service so far, in prompt tokens, lifted as said above."""
        self.num_waiting = 0
        """Sequences in the queue."""
        self.num_live = 0
        """Requests that are not over."""
