"""The sockets: the only module of the daemon that imports ZeroMQ. One thread owns them all and drives the session.

Facts of ZeroMQ that this stands on: a ROUTER drops silently unless ROUTER_MANDATORY; MAXMSGSIZE bounds a frame, not a message; an ipc bind takes
the path from whoever listens there (so the socket is bound in endpoints.py and handed over by USE_FD); ROUTER_NOTIFY is not in release
builds, so a vanished client shows by its silence or by EHOSTUNREACH.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from kvd_client.protocol.messages import MAX_HEADER_BYTES

from kvd.config import TransportConfig
from kvd.observe.logging import get_logger
from kvd.text.errors import TextError
from kvd.transport.bodies import TextResult
from kvd.transport.closing import hold_connections, wait_until_read
from kvd.transport.edge import Outgoing
from kvd.transport.endpoints import Endpoint, IpcEndpoint, TcpEndpoint, check_exposure, close_ipc, open_ipc, resolve_listen
from kvd.transport.errors import EndpointError, EndpointInUseError, TenantUnknownError
from kvd.transport.inproc import InprocOutbox
from kvd.transport.ports import CommandSink, Text
from kvd.transport.sending import Attempt, Sender
from kvd.transport.session import Session
from kvd.transport.tenants import Caller, caller_of_ipc_peer, caller_of_user_id
from kvd.transport.text_threads import TextThreads
from kvd.transport.zap import ZAP_DOMAIN, ZAP_ENDPOINT, CurveKeys, answer_zap, load_curve_keys

_MESSAGES_PER_TURN = 64
"""Messages taken from one socket before the others, the engine and the clock get their turn."""
_TICK_MS = 250
_RETRY_MS = 10
_TERMINAL_S = 1.5
"""The end of the flush, in which stream messages no longer stand before terminal ones."""
_LAST_LINGER_S = 0.1
_SEND_HWM = 256
_IPC_SEND_BUFFER_BYTES = 32 * 1024
"""With the high-water mark it bounds what a peer must read before a message that is sent now: a slow one gets its terminal message in time."""
_RECEIVE_HWM = 128
_HANDSHAKE_MS = 3000
_HEARTBEAT_MS = 5000
_HEARTBEAT_TIMEOUT_MS = 15000


def _anybody(_frame: zmq.Frame) -> Caller:
    return Caller()


def _operator(_frame: zmq.Frame) -> Caller:
    """Who may open a socket of mode 0660 where users are not told apart runs the daemon."""
    return Caller(is_operator=True)


def _by_key(frame: zmq.Frame) -> Caller:
    return caller_of_user_id(_metadata(frame, "User-Id"))


def _by_uid(frame: zmq.Frame, own_uid: int) -> Caller:
    return caller_of_ipc_peer(_metadata(frame, "Peer-Address"), own_uid)


def _metadata(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


@dataclass(slots=True)
class _Listener:
    """A bound socket. Its index is the first byte of its peers' names: two endpoints never confuse their clients' identities."""

    index: int
    endpoint: Endpoint
    socket: zmq.Socket[bytes]
    url: str
    inode: int = 0
    caller_of: Callable[[zmq.Frame], Caller] = _anybody
    """Whom a message is from, by its first frame."""


class TransportServer:
    """Owns sockets and their thread. ``bind``, ``start``, and at the end ``stop`` or a ``Stopped`` event from the engine."""

    def __init__(
        self,
        config: TransportConfig,
        *,
        load_text: Callable[[], Text],
        inbox: CommandSink,
        outbox: InprocOutbox,
        instance: bytes,
        drain_timeout_s: float,
        on_failure: Callable[[str], None],
    ) -> None:
        """``on_failure`` is called from one of the server's threads if the text model can't be loaded or one of the threads dies."""
        self._config = config
        self._outbox = outbox
        self._on_failure = on_failure
        self._log = get_logger("transport")
        self._session = Session(
            config, put=inbox.put, instance=instance, version=importlib.metadata.version("kvd"), drain_timeout_s=drain_timeout_s
        )
        self._sender = Sender(
            attempt=self._attempt,
            on_sent=self._session.on_sent,
            on_dropped=self._count_dropped,
            on_gone=self._session.on_gone,
            on_overflow=self._session.on_overflow,
            max_backlog_bytes=config.max_backlog_bytes,
            max_total_backlog_bytes=config.max_total_backlog_bytes,
        )
        self._text_threads = TextThreads(
            config.text_threads,
            load=load_text,
            date=config.template_date,
            on_loaded=self._text_loaded,
            on_failed=self._text_failed,
            on_result=self._text_done,
        )
        self._from_text: deque[Text | TextResult] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._listeners: list[_Listener] = []
        self._zap: zmq.Socket[bytes] | None = None
        self._curve: CurveKeys | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._wake_lock = threading.Lock()
        self._stopping = threading.Event()
        self._flush_deadline_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvd-transport", daemon=True)

    # -------------------------------------------------------------------------------- for the daemon

    def bind(self) -> tuple[str, ...]:
        """Open every endpoint; the URLs that clients connect to.

        Raises:
            EndpointError: one can't be opened; then none stays open.
        """
        try:
            self._curve = load_curve_keys(self._config.curve_key_file, self._config.curve_clients_file)
            endpoints = resolve_listen(self._config.listen)
            for endpoint in endpoints:
                check_exposure(endpoint, has_curve=self._curve is not None, allow_plain_tcp=self._config.allow_plain_tcp)
            if self._curve is not None:
                self._zap = self._context.socket(zmq.REP)
                self._zap.linger = 0
                self._zap.bind(ZAP_ENDPOINT)
            for index, endpoint in enumerate(endpoints):
                self._listeners.append(self._listen(index, endpoint))
        except BaseException:
            self._close(deadline_s=0.0)
            raise
        return tuple(listener.url for listener in self._listeners)

    def start(self) -> None:
        """Start the threads."""
        self._outbox.on_put(self._wake)
        self._text_threads.start()
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End without waiting for the engine; whether the thread ended in time."""
        self._stopping.set()
        self._wake()
        return self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the server's thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        """Whether the server's thread runs."""
        return self._thread.is_alive()

    # -------------------------------------------------------------------------------- opening

    def _listen(self, index: int, endpoint: Endpoint) -> _Listener:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects before its old connection is seen dead
        router.setsockopt(zmq.MAXMSGSIZE, self._config.max_message_bytes + MAX_HEADER_BYTES)
        router.setsockopt(zmq.SNDHWM, _SEND_HWM)
        router.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        router.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        try:
            if isinstance(endpoint, IpcEndpoint):
                return self._listen_ipc(index, endpoint, router)
            return self._listen_tcp(index, endpoint, router)
        except zmq.ZMQError as error:
            router.close()
            kind = EndpointInUseError if error.errno == errno.EADDRINUSE else EndpointError
            raise kind(f"{endpoint.url}: {error.strerror}") from error
        except BaseException:
            router.close()
            raise

    def _listen_ipc(self, index: int, endpoint: IpcEndpoint, router: zmq.Socket[bytes]) -> _Listener:
        with open_ipc(endpoint) as listener:
            inode = endpoint.path.lstat().st_ino
            router.setsockopt(zmq.SNDBUF, _IPC_SEND_BUFFER_BYTES)
            router.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
            router.bind(endpoint.url)
        caller_of = functools.partial(_by_uid, own_uid=os.geteuid()) if self._config.ipc_tenants == "uid" else _operator
        return _Listener(index, endpoint, router, endpoint.url, inode, caller_of)

    def _listen_tcp(self, index: int, endpoint: TcpEndpoint, router: zmq.Socket[bytes]) -> _Listener:
        if ":" in endpoint.host:
            router.setsockopt(zmq.IPV6, 1)
        if self._curve is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret)
            router.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.bind(endpoint.url)
        caller_of = _anybody if self._curve is None else _by_key
        return _Listener(index, endpoint, router, router.getsockopt_string(zmq.LAST_ENDPOINT), caller_of=caller_of)

    # -------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake_read, zmq.POLLIN)
            if self._zap is not None:
                poller.register(self._zap, zmq.POLLIN)
            for listener in self._listeners:
                poller.register(listener.socket, zmq.POLLIN)
            while not self._is_over():
                self._turn({each for each, _ in poller.poll(_RETRY_MS if self._sender.has_backlog else _TICK_MS)})
        except BaseException as error:
            self._log.critical("transport_failed", error=repr(error), exc_info=error)
            self._on_failure(f"the transport failed: {error!r}")
        finally:
            self._outbox.on_put(None)
            self._text_threads.stop()
            self._close(deadline_s=max(self._flush_deadline_s, time.monotonic() + _LAST_LINGER_S))

    def _turn(self, ready: set[object]) -> None:
        now = time.monotonic()
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if self._zap is not None and self._zap in ready:
            self._answer_zap(self._zap)
        self._take_engine_and_text(now)
        for listener in self._listeners:
            if listener.socket in ready:
                self._receive(listener, now)
        self._session.tick(now)
        self._sender.retry(now)
        self._send(now)

    def _take_engine_and_text(self, now: float) -> None:
        self._session.on_events(self._outbox.drain(), now)
        while self._from_text:
            arrived = self._from_text.popleft()
            if isinstance(arrived, TextResult):
                self._session.on_text(arrived, now)
            else:
                self._session.set_text(arrived)
        self._send(now)

    def _receive(self, listener: _Listener, now: float) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                first, frames = self._read(listener.socket)
            except zmq.Again:
                return
            try:
                caller = listener.caller_of(first)
            except TenantUnknownError as error:
                self._session.counters.tenants_unknown += 1
                self._log.warning("tenant_unknown", endpoint=listener.url, error=str(error))
                continue
            self._session.receive(bytes((listener.index,)) + first.bytes, frames, now, caller)
            while self._session.taken_over:
                self._sender.forget(self._session.taken_over.pop())
            self._send(now)

    def _read(self, socket: zmq.Socket[bytes]) -> tuple[zmq.Frame, list[bytes]]:
        """One message: the peer's identity and the frames after it. Of one with too many frames only as many as show that."""
        first = socket.recv(zmq.NOBLOCK, copy=False)
        frames: list[bytes] = []
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= self._config.max_frames:
                frames.append(frame.bytes)
        return first, frames

    def _send(self, now: float) -> None:
        while outgoing := self._session.take_outgoing():
            for out in outgoing:
                self._sender.send(out, now)
        for job in self._session.take_text_jobs():
            self._text_threads.submit(job)

    def _attempt(self, out: Outgoing) -> Attempt:
        socket = self._listeners[out.peer[0]].socket
        try:
            socket.send_multipart((out.peer[1:], *out.frames), zmq.NOBLOCK)
        except zmq.Again:
            return Attempt.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Attempt.UNREACHABLE
            raise
        return Attempt.SENT

    def _answer_zap(self, zap: zmq.Socket[bytes]) -> None:
        assert self._curve is not None
        reply, is_welcome = answer_zap(zap.recv_multipart(), self._curve.tenants)
        if not is_welcome:
            self._session.counters.curve_denied += 1
        zap.send_multipart(reply)

    def _is_over(self) -> bool:
        """Whether the engine has ended and the sockets have taken what was queued, or the time for that is up."""
        if not (self._stopping.is_set() or self._session.is_stopped):
            return False
        now = time.monotonic()
        if not self._flush_deadline_s:
            self._take_engine_and_text(now)  # ``stop`` may have come before the engine's last words were taken
            # Without the engine's last words nobody is owed any, and the next daemon wants the endpoints.
            self._flush_deadline_s = now + (self._session.flush_s if self._session.is_stopped else 0.0)
        if now >= self._flush_deadline_s - _TERMINAL_S:
            self._sender.drop_stream_messages()
        return not self._sender.has_backlog or now >= self._flush_deadline_s

    def _close(self, *, deadline_s: float) -> None:
        """Close everything; what the sockets have taken goes out meanwhile, at most until ``deadline_s``."""
        endpoints = [listener.endpoint for listener in self._listeners]
        held = hold_connections([str(each.path) for each in endpoints if isinstance(each, IpcEndpoint)])
        for listener in self._listeners:
            if isinstance(listener.endpoint, IpcEndpoint):
                close_ipc(listener.endpoint, listener.inode)
            listener.socket.close(max(0, int((deadline_s - time.monotonic()) * 1000)))
        if self._zap is not None:
            self._zap.close(0)
        self._context.term()
        wait_until_read(held, deadline_s)
        with self._wake_lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    # -------------------------------------------------------------------------------- from other threads

    def _wake(self) -> None:
        """End the poller's sleep."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes as well as one byte more
            if self._wake_write >= 0:
                os.write(self._wake_write, b"\0")

    def _text_loaded(self, text: Text) -> None:
        self._from_text.append(text)
        self._wake()

    def _text_failed(self, error: BaseException) -> None:
        is_mistake = isinstance(error, TextError | OSError)  # no such model: of no use are the lines of code that found it out
        self._log.error("text_failed", error=repr(error), exc_info=None if is_mistake else error)
        self._on_failure(f"the tokenizer can't be loaded, or a text thread failed: {error!r}")

    def _text_done(self, result: TextResult) -> None:
        self._from_text.append(result)
        self._wake()

    def _count_dropped(self, num_messages: int) -> None:
        self._session.counters.messages_dropped += num_messages
