"""Who talks to the daemon: one entry for each peer, the longest silent first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvd.transport.tenants import Caller


@dataclass(slots=True, eq=False)
class Client:
    """A peer and what it has open. ``peer`` names it for the sockets; another object for the same peer is another conversation."""

    peer: bytes
    last_seen_s: float
    caller: Caller = field(default_factory=Caller)
    request_ids: set[bytes] = field(default_factory=set)
    op_ids: set[bytes] = field(default_factory=set)
    num_text_jobs: int = 0

    @property
    def num_open(self) -> int:
        """Requests and operations without their answer."""
        return len(self.request_ids) + len(self.op_ids)


class Clients:
    """At most ``max_clients``, ordered by when they were last heard."""

    def __init__(self, max_clients: int) -> None:
        self._max_clients = max_clients
        self._clients: OrderedDict[bytes, Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, peer: bytes) -> Client | None:
        """The peer's entry, if it has one."""
        return self._clients.get(peer)

    def hear(self, peer: bytes, caller: Caller, now: float) -> tuple[Client, Client | None]:
        """The peer has been heard: its entry, and the entry that had to make room for it (already removed)."""
        client = self._clients.get(peer)
        forgotten = None
        if client is None:
            if len(self._clients) >= self._max_clients:
                forgotten = self._clients.popitem(last=False)[1]
            client = self._clients[peer] = Client(peer, now, caller)
        client.last_seen_s = now
        self._clients.move_to_end(peer)
        return client, forgotten

    def remove(self, peer: bytes) -> Client | None:
        """Take the peer's entry out."""
        return self._clients.pop(peer, None)

    def take_silent(self, before_s: float) -> list[Client]:
        """Take out every client not heard since ``before_s``."""
        silent = []
        while self._clients:
            peer, client = next(iter(self._clients.items()))
            if client.last_seen_s >= before_s:
                break
            del self._clients[peer]
            silent.append(client)
        return silent
