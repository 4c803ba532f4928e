"""What the sockets have not taken yet: a backlog for each peer, each and all together bounded. Knows no socket; the server gives it one attempt to send."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvd.transport.edge import Outgoing

RECONNECT_GRACE_S = 2.0
"""A peer whose connection is gone may come back under the same identity for so long; what is meant for it waits."""


class Attempt(Enum):
    """What became of an attempt to send."""

    SENT = "sent"
    FULL = "full"
    UNREACHABLE = "unreachable"


@dataclass(slots=True)
class _Backlog:
    waiting: deque[Outgoing] = field(default_factory=deque)
    num_bytes: int = 0
    num_stream_messages: int = 0
    unreachable_since_s: float | None = None
    cut_ids: set[bytes] = field(default_factory=set)
    """Requests that lost stream messages since the last retry: the rest of the same batch would leave a gap (after it they have failed)."""

    def append(self, out: Outgoing) -> None:
        self.waiting.append(out)
        self.num_bytes += out.num_bytes
        self.num_stream_messages += out.is_stream

    def popleft(self) -> Outgoing:
        out = self.waiting.popleft()
        self.num_bytes -= out.num_bytes
        self.num_stream_messages -= out.is_stream
        return out

    def drop_stream_messages(self) -> int:
        """Keep only what is no part of an answer; how many messages were dropped."""
        num_dropped = self.num_stream_messages
        if num_dropped:
            self.cut_ids.update(each.request_id for each in self.waiting if each.is_stream)
            self.waiting = deque(each for each in self.waiting if not each.is_stream)
            self.num_bytes = sum(each.num_bytes for each in self.waiting)
            self.num_stream_messages = 0
        return num_dropped

    def drop_all(self) -> int:
        """Keep nothing; how many messages were dropped."""
        num_dropped = len(self.waiting)
        self.waiting.clear()
        self.num_bytes = self.num_stream_messages = 0
        return num_dropped


class Sender:
    """Sends in order for each peer, and lets no peer hold up another."""

    def __init__(
        self,
        *,
        attempt: Callable[[Outgoing], Attempt],
        on_sent: Callable[[Outgoing], None],
        on_dropped: Callable[[int], None],
        on_gone: Callable[[bytes], None],
        on_overflow: Callable[[bytes], None],
        max_backlog_bytes: int,
        max_total_backlog_bytes: int,
    ) -> None:
        """``on_overflow`` says that a peer's stream messages were dropped, so its requests must fail."""
        self._attempt = attempt
        self._on_sent = on_sent
        self._on_dropped = on_dropped
        self._on_gone = on_gone
        self._on_overflow = on_overflow
        self._max_backlog_bytes = max_backlog_bytes
        self._max_total_bytes = max_total_backlog_bytes
        self._total_bytes = 0
        self._backlogs: dict[bytes, _Backlog] = {}

    @property
    def has_backlog(self) -> bool:
        """Whether ``retry`` has something to do."""
        return bool(self._backlogs)

    @property
    def total_bytes(self) -> int:
        """Bytes that wait for all peers."""
        return self._total_bytes

    def backlog_bytes(self, peer: bytes) -> int:
        """Bytes that wait for a peer."""
        backlog = self._backlogs.get(peer)
        return backlog.num_bytes if backlog else 0

    def send(self, out: Outgoing, now: float) -> None:
        """Send a message or let it wait."""
        backlog = self._backlogs.get(out.peer)
        if backlog is None:
            attempt = self._attempt(out)
            if attempt is Attempt.SENT:
                self._on_sent(out)
                return
            backlog = self._backlogs[out.peer] = _Backlog(unreachable_since_s=now if attempt is Attempt.UNREACHABLE else None)
        self._wait(out, backlog)

    def retry(self, now: float) -> None:
        """Try again what waits."""
        for peer, backlog in tuple(self._backlogs.items()):
            backlog.cut_ids.clear()
            while backlog.waiting:
                attempt = self._attempt(backlog.waiting[0])
                if attempt is not Attempt.SENT:
                    self._blocked(peer, backlog, attempt, now)
                    break
                out = backlog.popleft()
                self._total_bytes -= out.num_bytes
                backlog.unreachable_since_s = None
                self._on_sent(out)
            else:
                del self._backlogs[peer]

    def forget(self, peer: bytes) -> None:
        """Drop everything that waits for a peer: the connection is somebody else's now."""
        backlog = self._backlogs.pop(peer, None)
        if backlog is not None:
            self._total_bytes -= backlog.num_bytes
            self._on_dropped(backlog.drop_all())

    def drop_stream_messages(self) -> None:
        """Let nothing stand before the terminal messages, for there is little time left."""
        for backlog in self._backlogs.values():
            before = backlog.num_bytes
            self._on_dropped(backlog.drop_stream_messages())
            self._total_bytes -= before - backlog.num_bytes

    def _blocked(self, peer: bytes, backlog: _Backlog, attempt: Attempt, now: float) -> None:
        if attempt is Attempt.FULL:
            backlog.unreachable_since_s = None
        elif backlog.unreachable_since_s is None:
            backlog.unreachable_since_s = now
        elif now - backlog.unreachable_since_s >= RECONNECT_GRACE_S:
            del self._backlogs[peer]
            self._total_bytes -= backlog.num_bytes
            self._on_dropped(len(backlog.waiting))
            self._on_gone(peer)

    def _wait(self, out: Outgoing, backlog: _Backlog) -> None:
        """Queue behind a blocked socket. At the bound stream messages give way to terminal ones; what is over twice the bound even so is dropped."""
        limit = self._max_backlog_bytes
        if backlog.num_bytes + out.num_bytes > limit:
            self._overflow(out.peer, backlog, out)
        while self._total_bytes + out.num_bytes > self._max_total_bytes and self._make_room(out):
            pass
        is_cut = out.is_stream and out.request_id in backlog.cut_ids
        is_over = backlog.num_bytes + out.num_bytes > 2 * limit or self._total_bytes + out.num_bytes > self._max_total_bytes
        if is_cut or is_over:
            self._on_dropped(1)
        else:
            backlog.append(out)
            self._total_bytes += out.num_bytes

    def _overflow(self, peer: bytes, backlog: _Backlog, out: Outgoing) -> None:
        """A peer's stream messages give way, to ``out`` too if it is another's."""
        before = backlog.num_bytes
        self._on_dropped(backlog.drop_stream_messages())
        self._total_bytes -= before - backlog.num_bytes
        self._on_overflow(peer)
        if out.peer == peer and out.is_stream:
            backlog.cut_ids.add(out.request_id)

    def _make_room(self, out: Outgoing) -> bool:
        """Take from the peer for which most waits: its stream messages, or all if there are none; whether there was anything to take."""
        peer, largest = max(self._backlogs.items(), key=lambda item: item[1].num_bytes)
        if not largest.num_bytes:
            return False
        if largest.num_stream_messages:
            self._overflow(peer, largest, out)
        else:
            self._total_bytes -= largest.num_bytes
            self._on_dropped(largest.drop_all())
        return True
