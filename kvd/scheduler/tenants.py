"""Fairness between tenants: the virtual token counter (VTC) of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

A tenant's counter grows with the service that it gets: the prompt tokens that are computed for it, when a request is seated (what the cache holds costs nothing), and
its output tokens, each as much as ``output_token_weight`` prompt tokens. Whose counter is lowest is served next. A tenant that comes with nothing waiting is lifted to the
lowest counter of those who wait, or, if nobody does, to that of the last who did: nobody saves up for a burst by having been idle.

Output tokens are booked when somebody asks for the counters, and at a sequence's end: a decoded token costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.scheduler.account import Tenant
from kvd.scheduler.request import Sequence

_MAX_IDLE = 1024


class Tenants:
    """All accounts. Idle ones beyond 1,024 are closed, the lowest counters first: those would be lifted anyway."""

    def __init__(self, output_token_weight: float) -> None:
        self._output_token_weight = output_token_weight
        self._tenants: dict[str, Tenant] = {}
        self._num_idle = 0

    def open(self, name: str) -> Tenant:
        """The account of a tenant that has a further request."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        elif not tenant.num_live:
            self._num_idle -= 1
        tenant.num_live += 1
        return tenant

    def close(self, tenant: Tenant) -> None:
        """A request of the tenant is over."""
        tenant.num_live -= 1
        if not tenant.num_live:
            self._num_idle += 1
            if self._num_idle > _MAX_IDLE:
                idle = sorted((each for each in self._tenants.values() if not each.num_live), key=lambda each: each.counter)
                for each in idle[: len(idle) // 2]:
                    del self._tenants[each.name]
                    self._num_idle -= 1

    def num_waiting(self, name: str) -> int:
        """Sequences of the tenant in the queue."""
        tenant = self._tenants.get(name)
        return 0 if tenant is None else tenant.num_waiting

    @property
    def num_live(self) -> int:
        """Tenants with a request."""
        return len(self._tenants) - self._num_idle

    def charge_outputs(self, sequences: Iterable[Sequence]) -> None:
        """Book what these sequences have sampled since they were last booked."""
        weight = self._output_token_weight
        for sequence in sequences:
            num_tokens = sequence.num_known - sequence.num_charged
            if num_tokens:
                sequence.num_charged = sequence.num_known
                sequence.request.tenant.counter += weight * num_tokens

    def check_invariants(self) -> None:
        """The idle are counted."""
        assert self._num_idle == sum(not each.num_live for each in self._tenants.values()), "idle tenants are miscounted"
        assert self._num_idle <= _MAX_IDLE, "too many idle tenants are remembered"
