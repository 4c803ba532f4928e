"""Who talks to the daemon: one entry for each peer, the longest silent first; and who did, for answers may be under way to them."""

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
    """At most ``max_clients``, ordered by when they were last heard, and as many of those that have left.

    Whoever left goes on where it was when it is heard again: what was begun for it is still answered to its peer.
    """

    def __init__(self, max_clients: int) -> None:
        self._max_clients = max_clients
        self._clients: OrderedDict[bytes, Client] = OrderedDict()
        self._left: OrderedDict[bytes, Client] = OrderedDict()
        self._lost: list[Client] = []

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, peer: bytes) -> Client | None:
        """The peer's entry, if it has one."""
        return self._clients.get(peer)

    def last(self, peer: bytes) -> Client | None:
        """The peer's entry, or the one that it had."""
        return self._clients.get(peer) or self._left.get(peer)

    def hear(self, peer: bytes, caller: Caller, now: float) -> tuple[Client, Client | None]:
        """The peer has been heard: its entry, and the entry that had to make room for it (which has left)."""
        client = self._clients.get(peer)
        forgotten = None
        if client is None:
            if len(self._clients) >= self._max_clients:
                forgotten = self._clients.popitem(last=False)[1]
                self._leave(forgotten)
            back = self._left.pop(peer, None)
            client = self._clients[peer] = back or Client(peer, now, caller)
        client.last_seen_s = now
        self._clients.move_to_end(peer)
        return client, forgotten

    def remove(self, peer: bytes) -> Client | None:
        """The peer leaves: its entry, if it has one."""
        client = self._clients.pop(peer, None)
        if client is not None:
            self._leave(client)
        return client

    def end(self, peer: bytes) -> None:
        """The peer is somebody else from now on."""
        self._clients.pop(peer, None)
        self._left.pop(peer, None)

    def take_lost(self) -> list[Client]:
        """Those of whom nothing is known from now on: nothing may be sent to their peers any more, it could be somebody else's."""
        lost, self._lost = self._lost, []
        return lost

    def take_silent(self, before_s: float) -> list[Client]:
        """Every client not heard since ``before_s`` leaves."""
        silent = []
        while self._clients:
            peer, client = next(iter(self._clients.items()))
            if client.last_seen_s >= before_s:
                break
            del self._clients[peer]
            self._leave(client)
            silent.append(client)
        return silent

    def _leave(self, client: Client) -> None:
        self._left[client.peer] = client
        if len(self._left) > self._max_clients:
            peer = next((peer for peer, each in self._left.items() if not each.num_open), next(iter(self._left)))
            self._lost.append(self._left.pop(peer))
