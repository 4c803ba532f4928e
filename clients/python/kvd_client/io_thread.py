"""The one thread that owns a client's socket and its session; every other thread talks to it through a queue.

One thread with a poller serves the synchronous and the asyncio client alike: a ZeroMQ socket belongs to one thread, and its file
descriptor is edge-triggered, which event loops expect of no descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from kvd_client.calls import Call
from kvd_client.errors import ClientClosed, InternalError
from kvd_client.protocol.codes import Code
from kvd_client.session import Session

_MAX_POLL_S = 60.0
_ABORT_LINGER_MS = 100
"""How long close() may take to get the last aborts out; a socket without any closes at once."""
_RECONNECT_MS, _MAX_RECONNECT_MS = 20, 500
_MAX_MESSAGE_BYTES = 64 << 20
_HIGH_WATER_MESSAGES = 100_000
"""Unread messages in the library. Credit bounds them long before; a daemon must never find the pipe full."""
_HANDSHAKE_FAILURES: dict[int, tuple[str, bool]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ("the daemon refused this client's CURVE key", True),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ("the endpoint demands CURVE and the client has no server_key, or the other way round", True),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ("the handshake fails; with CURVE, the server_key may be another daemon's", False),
}
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_HANDSHAKE_FAILURES)

_log = logging.getLogger("kvd_client")

Command = Callable[[Session, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Z85 keys for a CURVE endpoint: the daemon's public key and the client's pair."""

    server: bytes
    public: bytes
    secret: bytes


def load_curve_keys(server_key: str, client_key_file: str | os.PathLike[str] | None) -> CurveKeys:
    """Keys for a daemon whose public key is known.

    Args:
        server_key: the daemon's public key, 40 Z85 characters.
        client_key_file: the client's secret key file as ``zmq.auth.create_certificates`` writes it; None: a pair made now, for daemons
            that allow every client.

    Raises:
        ValueError: a key is malformed, or the file holds no secret key.
        OSError: the file can't be read.
    """
    if len(server_key) != 40:
        raise ValueError(f"a CURVE key has 40 characters, the server key has {len(server_key)}")
    public: bytes
    secret: bytes | None
    if client_key_file is None:
        public, secret = zmq.curve_keypair()
    else:
        if not Path(client_key_file).exists():
            raise FileNotFoundError(errno.ENOENT, "no such key file", str(client_key_file))
        public, secret = zmq.auth.load_certificate(client_key_file)
    if secret is None:
        raise ValueError(f"{client_key_file} holds no secret key; is it the public one?")
    return CurveKeys(server=server_key.encode(), public=public, secret=secret)


class IoThread:
    """Runs a session over a DEALER socket.

    Args:
        endpoint: a ZeroMQ endpoint, ``ipc://PATH`` or ``tcp://HOST:PORT``.
        curve: keys, where the endpoint demands CURVE.

    Raises:
        ValueError: the endpoint is malformed.
    """

    def __init__(self, endpoint: str, session: Session, curve: CurveKeys | None = None) -> None:
        self._endpoint = endpoint
        self._session = session
        self._curve = curve
        self._routing_id = b"c" + os.urandom(16)
        self._lock = threading.RLock()  # a stream's destructor may submit in the middle of submit
        self._commands: deque[Command] = deque()
        self._is_woken = False
        self._is_stopping = False
        self._is_over = False
        self._pid = os.getpid()
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._context = zmq.Context()
        try:
            self._open_socket()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._wake_in.close()
            self._wake_out.close()
            raise ValueError(f"bad endpoint {endpoint!r}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="kvd-client-io", daemon=True)
        self._thread.start()

    def open(self, call: Call) -> None:
        """Begin a call. Any thread.

        Raises:
            ClientClosed: in a process forked after the client was made: its thread and socket are the parent's.
        """
        if os.getpid() != self._pid:
            raise ClientClosed("this client belongs to the process that made it")
        self._submit(lambda session, now: session.open(call, now))

    def cancel(self, call: Call) -> None:
        """Forget a call, and abort it in the daemon. Any thread, destructors too."""
        if os.getpid() == self._pid:
            self._submit(lambda session, _: session.cancel(call))

    def grant(self, call: Call, num_tokens: int) -> None:
        """The reader of a stream has taken so many tokens. Any thread."""
        self._submit(lambda session, _: session.grant(call, num_tokens))

    def _submit(self, command: Command) -> None:
        """Have a command run on the thread soon, after those before it."""
        with self._lock:
            if self._is_over:
                command(self._session, time.monotonic())
                return
            self._commands.append(command)
            if not self._is_woken:
                self._wake()
                self._is_woken = True  # after it: were Ctrl-C in between, nobody else would wake it

    def close(self) -> None:
        """End every call with :class:`ClientClosed`, abort what runs, close the socket. Any thread, more than once."""
        if os.getpid() != self._pid:
            return
        self._is_stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it is over
            self._wake_out.send(b"\0")

    # ------------------------------------------------------------------------------------------- on the thread alone

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except Exception as error:
            _log.exception("the client's thread failed")
            message = f"the client's thread failed: {error!r}"
            self._session.fail_all(lambda: InternalError(message, code=Code.INTERNAL))
        finally:
            self._finish()

    def _turn(self) -> None:
        """Wait for something to happen, and see to everything that has."""
        for descriptor, _ in self._poller.poll(self._poll_ms()):
            if descriptor == self._wake_in.fileno():
                self._wake_in.recv(4096)
        session = self._session
        self._receive()
        while self._monitor.poll(0):
            self._on_monitor(recv_monitor_message(self._monitor)["event"])
        with self._lock:
            self._is_woken = False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command(session, time.monotonic())
        session.tick(time.monotonic())
        if session.wants_fresh_socket:
            session.wants_fresh_socket = False
            self._close_socket(0)
            self._open_socket()
        self._send()

    def _poll_ms(self) -> int:
        due = self._session.next_tick_at()
        wait_s = _MAX_POLL_S if due is None else min(max(due - time.monotonic(), 0.0), _MAX_POLL_S)
        flags = zmq.POLLIN | zmq.POLLOUT if self._session.outgoing else zmq.POLLIN
        self._poller.modify(self._socket, flags)
        return int(wait_s * 1000) + 1 if wait_s else 0

    def _receive(self) -> None:
        """Take everything that has arrived, so that the session's timers judge on the whole picture."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._session.receive(frames, time.monotonic())

    def _send(self) -> None:
        outgoing = self._session.outgoing
        while outgoing:
            try:
                self._socket.send_multipart(outgoing[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            outgoing.popleft()

    def _on_monitor(self, event: int) -> None:
        now = time.monotonic()
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._session.connected(now)
        elif event == zmq.EVENT_DISCONNECTED:
            self._receive()
            self._session.disconnected(now)
        else:
            reason, is_final = _HANDSHAKE_FAILURES[event]
            self._session.handshake_failed(now, reason, is_final=is_final)

    def _open_socket(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self._routing_id)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        if self._curve is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._curve.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._curve.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wake_in.fileno(), zmq.POLLIN)
        self._socket.connect(self._endpoint)

    def _close_socket(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _finish(self) -> None:
        with self._lock:
            self._session.close()
            while self._commands:
                self._commands.popleft()(self._session, time.monotonic())
            self._is_over = True  # later commands run at once, on whichever thread: there is no other, and no call is left
        has_aborts = bool(self._session.outgoing)
        self._send()
        self._close_socket(_ABORT_LINGER_MS if has_aborts else 0)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
