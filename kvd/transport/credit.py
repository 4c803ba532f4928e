"""Stream credit: what the client takes, what the daemon lets the engine produce, and what is under way between them."""

from __future__ import annotations

_UNLIMITED = 1 << 62


class StreamCredit:
    """Credit of one request, in tokens over all its choices.

    The engine never has more than ``window`` tokens granted beyond what the client's socket took, nor more in all than the client allowed.
    So what waits for a client that does not read is bounded by the window whatever the client promised, and its
    request stalls in the engine rather than filling memory here.
    """

    __slots__ = ("_allowed", "_delivered", "_granted", "_window")

    def __init__(self, window: int, client_credit: int) -> None:
        """``client_credit`` 0: the client left it to the daemon, and everything the socket takes is renewed."""
        self._window = window
        self._allowed = client_credit or _UNLIMITED
        self._granted = 0
        self._delivered = 0

    @property
    def num_outstanding(self) -> int:
        """Tokens granted to the engine that the socket has not taken yet."""
        return self._granted - self._delivered

    def allow(self, num_tokens: int) -> None:
        """The client takes so many more."""
        self._allowed = min(self._allowed + num_tokens, _UNLIMITED)

    def delivered(self, num_tokens: int) -> None:
        """The socket took a message of so many tokens."""
        self._delivered += num_tokens

    def dropped(self, num_tokens: int) -> None:
        """So many tokens came from the engine and were not sent (they followed a stop string): they cost the client nothing."""
        self._delivered += num_tokens
        self.allow(num_tokens)

    def take_grant(self) -> int:
        """Tokens to grant the engine now; 0 while that is not worth a command. Renews when half of the window is used up."""
        room = min(self._window - self.num_outstanding, self._allowed - self._granted)
        if room <= 0 or 2 * self.num_outstanding > self._window:
            return 0
        self._granted += room
        return room
