"""The in-process channels between the edge and the engine: what the frontends and an embedded daemon use alike."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvd.commands import Abort, Command, Event, FinishChoice, Grant

_ALWAYS_ACCEPTED = (Abort, FinishChoice, Grant)
"""Commands about accepted requests. There are a bounded number of them for each request, and a request must not hang for want of one."""


class InprocInbox:
    """Commands for the engine. Any thread may put, one thread drains; safe in a signal handler (the lock is reentrant).

    At most ``capacity`` new requests and operations wait; what concerns requests already accepted always enters.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._commands: deque[Command] = deque()
        self._num_bounded = 0
        self._changed = threading.Condition()

    def put(self, command: Command) -> bool:
        """Add a command from the edge; False if the inbox is full and the command was not taken."""
        with self._changed:
            if not isinstance(command, _ALWAYS_ACCEPTED):
                if self._num_bounded >= self._capacity:
                    return False
                self._num_bounded += 1
            self._commands.append(command)
            self._changed.notify()
        return True

    def put_internal(self, command: Command) -> None:
        """Add a command from inside the daemon (a finished write, a signal): never refused."""
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def drain(self) -> list[Command]:
        """Take everything that waits, oldest first; never blocks."""
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
            self._num_bounded = 0
        return commands

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something waits or the time is over; whether something waits."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._commands), timeout_s)


class InprocOutbox:
    """Events for the edge. Any thread may put, one thread drains. Stream credit bounds what may wait here."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None

    def on_put(self, wake: Callable[[], None] | None) -> None:
        """Call ``wake`` after each put, on the putting thread: for a consumer that sleeps in a poller rather than in ``wait``."""
        with self._changed:
            self._wake = wake

    def put(self, events: Sequence[Event]) -> None:
        """Hand events to the edge in order; never blocks."""
        with self._changed:
            self._events.extend(events)
            self._changed.notify()
            wake = self._wake
        if wake is not None:
            wake()

    def drain(self) -> list[Event]:
        """Take everything that waits, oldest first; never blocks."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
        return events

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something waits or the time is over; whether something waits."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._events), timeout_s)
