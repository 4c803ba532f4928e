"""The sd_notify protocol: datagrams to the socket that the service manager names in ``NOTIFY_SOCKET``.

Without that variable every call does nothing. Source: sd_notify(3), "Notes".
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Tells the service manager how far the daemon is. A failing send is not an error: the manager's timeouts decide then.

    Args:
        address: of the manager's datagram socket, a path or ``@name`` for the abstract namespace; empty: no manager.
        watchdog_usec: the manager's watchdog interval in microseconds; 0: none.
    """

    def __init__(self, address: str = "", watchdog_usec: int = 0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_usec / 1e6
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Notifier:
        """The manager of this process, by ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``."""
        watchdog_usec = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return cls(environ.get("NOTIFY_SOCKET", ""), int(watchdog_usec) if watchdog_usec.isdigit() and is_ours else 0)

    @property
    def enabled(self) -> bool:
        """Whether there is a manager to tell."""
        return self._socket is not None

    def ready(self) -> None:
        """The start is over."""
        self._send("READY=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send("STATUS=" + text.replace("\n", " "))

    def stopping(self) -> None:
        """The daemon drains."""
        self._send("STOPPING=1")

    def extend_timeout(self, usec: int) -> None:
        """The start or stop takes ``usec`` microseconds more, from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={usec}")

    def watchdog(self) -> None:
        """The engine loop has gone round; called by nothing but the loop, so it never blocks."""
        self._send("WATCHDOG=1", timeout_s=0.0)

    def end_watchdog(self) -> None:
        """The engine loop is over, on purpose; from here on the manager's stop timeout is the bound."""
        self._send("WATCHDOG_USEC=0")

    def watchdog_interval_s(self) -> float | None:
        """Half of the manager's interval, the time between two ``watchdog()`` calls that it recommends; None: no watchdog."""
        return self._watchdog_s / 2 if self._watchdog_s > 0 else None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, line: str, *, timeout_s: float = 1.0) -> None:
        if self._socket is None:
            return
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendto(line.encode(), self._address)
        except OSError:
            return
