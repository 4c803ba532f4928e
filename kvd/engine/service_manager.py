"""What systemd, or another manager that speaks its protocol, is told of the daemon's life."""

from __future__ import annotations

from kvd.engine.loop import State
from kvd.engine.ports import Clock
from kvd.observe.notify import Notifier

_EXTEND_USEC = 30_000_000
_TELL_INTERVAL_S = 1.0


class ServiceManager:
    """The service manager's view: progress extends its timeouts, the loop's rounds feed its watchdog. Never more than a datagram a second."""

    def __init__(self, clock: Clock, notifier: Notifier) -> None:
        self._notifier = notifier
        self._clock = clock
        self._watchdog_s = self._notifier.watchdog_interval_s()
        self._next_watchdog_s = 0.0
        self._next_tell_s = 0.0

    def progress(self, text: str) -> None:
        """Something that takes long got further."""
        now = self._clock.monotonic()
        if now >= self._next_tell_s:
            self._next_tell_s = now + _TELL_INTERVAL_S
            self._notifier.status(text)
            self._notifier.extend_timeout(_EXTEND_USEC)

    def on_round(self, state: State) -> None:
        """The engine loop has gone round."""
        if state is not State.READY:
            self.progress("computing pins" if state is State.REHYDRATING else "draining")
        if self._watchdog_s is not None and (now := self._clock.monotonic()) >= self._next_watchdog_s:
            self._next_watchdog_s = now + self._watchdog_s / 2
            self._notifier.watchdog()

    def on_state(self, state: State, text: str) -> None:
        """The daemon's state has changed."""
        self._notifier.status(text)
        if state is State.READY:
            self._notifier.ready()
        elif state is State.DRAINING:
            self._notifier.stopping()

    def on_last_checkpoint(self, timeout_s: float) -> None:
        """The loop is over and feeds no watchdog any more; what is left of the stop takes at most ``timeout_s`` and the closing of each part."""
        self._notifier.status("writing the last checkpoint")
        self._notifier.end_watchdog()
        self._notifier.extend_timeout(int(timeout_s * 1e6) + _EXTEND_USEC)
