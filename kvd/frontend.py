"""The edge as a thread of the daemon or as a process of its own.

Process mode keeps templates, tokenizers and msgpack off the engine's interpreter lock. ``python -m kvd.frontend`` is spawned with one end
of a socket pair; on it travel length-prefixed messages, msgspec-encoded: the set-up and its answer, then lists of events down and lists
of commands up. The child ends when its parent does (end of file); when the child ends the parent's ``on_failure`` is called and the daemon
restarts. Neither torch nor lmdb is imported in the child.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvd.commands import Command, Event, OpFailed, RequestFailed, Stopped, Submit
from kvd.config import EngineConfig, ObserveConfig, TransportConfig
from kvd.observe.logging import configure, get_logger
from kvd.transport.errors import EndpointError
from kvd.transport.inproc import InprocInbox, InprocOutbox
from kvd.transport.ports import Text
from kvd.transport.server import TransportServer
from kvd.types import ErrorCode

_DRAIN_TIMEOUT_S = EngineConfig().drain_timeout_s
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 1 << 30
_IDLE_WAIT_S = 0.5
_CHILD_INBOX_CAPACITY = 4096
_CHILD_END_S = 4.0
"""How long a child that was told to end may take: it flushes its sockets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What the child is told: no code, no pickle."""

    transport: TransportConfig
    observe: ObserveConfig
    text_source: str
    instance: bytes
    drain_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """The child's answer: where it listens, or why it does not."""

    endpoints: tuple[str, ...] = ()
    error: str = ""


class Frontend(Protocol):
    """A running edge."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The URLs that clients connect to."""

    def is_alive(self) -> bool: ...

    def stop(self, timeout_s: float) -> bool:
        """End, after flushing what is queued if ``Stopped`` was put into the outbox; whether it ended in time (a process is killed then)."""


def start_frontend(
    config: TransportConfig,
    *,
    text_source: str,
    inbox: InprocInbox,
    outbox: InprocOutbox,
    instance: bytes,
    observe: ObserveConfig,
    on_failure: Callable[[str], None],
    drain_timeout_s: float = _DRAIN_TIMEOUT_S,
) -> Frontend:
    """Open the endpoints and start serving them, by a thread or a process as ``config.frontend`` says.

    ``text_source`` is what ``kvd.text.model.load_text_model`` takes; it is loaded after the endpoints are open, off the caller's thread.
    ``drain_timeout_s`` is for drains that state none. ``on_failure`` is called, from another thread, if the edge dies or the text model can't be loaded.

    Raises:
        EndpointError: an endpoint can't be opened.
    """
    setup = _Setup(transport=config, observe=observe, text_source=text_source, instance=instance, drain_timeout_s=drain_timeout_s)
    if config.frontend == "process":
        return _ProcessFrontend(setup, inbox, outbox, on_failure)
    return _ThreadFrontend(setup, inbox, outbox, on_failure)


def _load_text(source: str) -> Text:
    from kvd.text.model import load_text_model

    return load_text_model(source)


def _make_server(setup: _Setup, inbox: InprocInbox, outbox: InprocOutbox, on_failure: Callable[[str], None]) -> TransportServer:
    return TransportServer(
        setup.transport,
        load_text=lambda: _load_text(setup.text_source),
        inbox=inbox,
        outbox=outbox,
        instance=setup.instance,
        drain_timeout_s=setup.drain_timeout_s,
        on_failure=on_failure,
    )


class _ThreadFrontend:
    def __init__(self, setup: _Setup, inbox: InprocInbox, outbox: InprocOutbox, on_failure: Callable[[str], None]) -> None:
        self._server = _make_server(setup, inbox, outbox, on_failure)
        self._endpoints = self._server.bind()
        self._server.start()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._endpoints

    def is_alive(self) -> bool:
        return self._server.is_alive()

    def stop(self, timeout_s: float) -> bool:
        return self._server.stop(timeout_s)


class _Channel:
    """Length-prefixed messages over a stream socket. One thread sends, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: bytes) -> None:
        """Raises OSError when the other side is gone."""
        self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """The next message; None when the other side is gone."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > _MAX_MESSAGE_BYTES:
            return None
        return self._read(length)

    def close(self) -> None:
        """Wake whoever receives, on both sides."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was faster
            pass
        finally:
            self._connection.close()

    def _read(self, length: int) -> bytes | None:
        data = bytearray(length)
        view = memoryview(data)
        done = 0
        while done < length:
            try:
                received = self._connection.recv_into(view[done:])
            except OSError:
                return None
            if not received:
                return None
            done += received
        return bytes(data)


class _ProcessFrontend:
    def __init__(self, setup: _Setup, inbox: InprocInbox, outbox: InprocOutbox, on_failure: Callable[[str], None]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._on_failure = on_failure
        self._is_ending = threading.Event()
        self._log = get_logger("frontend")
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "kvd.frontend", "--fd", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._channel = _Channel(ours)
        bound = self._set_up(setup)
        if bound.error:
            self._channel.close()
            self._process.wait()
            raise EndpointError(bound.error)
        self._endpoints = bound.endpoints
        self._threads = [
            threading.Thread(target=run, name=f"kvd-frontend-{run.__name__}", daemon=True) for run in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._endpoints

    @property
    def pid(self) -> int:
        """The child's."""
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float) -> bool:
        self._is_ending.set()
        self._outbox.put([Stopped()])
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        finally:
            self._channel.close()
            for thread in self._threads:
                thread.join()
        return True

    def _set_up(self, setup: _Setup) -> _Bound:
        try:
            self._channel.send(msgspec.msgpack.encode(setup, enc_hook=str))
        except OSError:
            return _Bound(error="the frontend process did not start")
        answer = self._channel.receive()
        if answer is None:
            return _Bound(error=f"the frontend process did not start: exit status {self._process.wait()}")
        return msgspec.msgpack.decode(answer, type=_Bound)

    def _send(self) -> None:
        """Outbox to child."""
        has_stopped = False
        while not has_stopped:
            self._outbox.wait(_IDLE_WAIT_S)
            events = self._outbox.drain()
            if events:
                has_stopped = any(isinstance(event, Stopped) for event in events)
                if has_stopped:
                    self._is_ending.set()
                try:
                    self._channel.send(msgspec.msgpack.encode(events))
                except OSError:
                    return  # the receiving thread reports it
            elif not self.is_alive():
                return

    def _receive(self) -> None:
        """Child to inbox; at its end of file, the child is gone."""
        decoder = msgspec.msgpack.Decoder(list[Command])
        while (message := self._channel.receive()) is not None:
            for command in decoder.decode(message):
                if not self._inbox.put(command):
                    self._outbox.put([_refusal(command)])
        if not self._is_ending.is_set():
            status = self._process.wait()
            self._log.error("frontend_died", status=status)
            self._on_failure(f"the frontend process ended with status {status}")


def _refusal(command: Command) -> Event:
    """What a full engine inbox means to the child, whose own inbox had room."""
    message = "too many commands wait for the engine"
    if isinstance(command, Submit):
        return RequestFailed(command.request_id, ErrorCode.OVERLOADED, message, 0.5)
    return OpFailed(getattr(command, "op_id", b""), ErrorCode.OVERLOADED, message, 0.5)


# ---------------------------------------------------------------------------------------------- the child


def run_child(connection: socket.socket) -> int:
    """The frontend process: serve until the parent says ``Stopped`` or is gone. Returns the exit status."""
    channel = _Channel(connection)
    message = channel.receive()
    if message is None:
        return os.EX_PROTOCOL
    setup = msgspec.msgpack.decode(message, type=_Setup)
    configure(level=setup.observe.log_level, log_format=setup.observe.log_format, log_prompts=setup.observe.log_prompts)
    inbox, outbox = InprocInbox(_CHILD_INBOX_CAPACITY), InprocOutbox()
    failed = threading.Event()

    def fail(message: str) -> None:
        get_logger("frontend").error("frontend_failed", error=message)
        failed.set()
        channel.close()

    server = _make_server(setup, inbox, outbox, fail)
    try:
        endpoints = server.bind()
    except EndpointError as error:
        channel.send(msgspec.msgpack.encode(_Bound(error=str(error))))
        return os.EX_CONFIG
    channel.send(msgspec.msgpack.encode(_Bound(endpoints=endpoints)))
    server.start()
    sender = threading.Thread(target=_send_commands, args=(channel, inbox, server), name="kvd-frontend-commands", daemon=True)
    sender.start()
    has_stopped = _take_events(channel, outbox)
    if not has_stopped:
        server.stop(_CHILD_END_S)
    server.join(_CHILD_END_S)
    return os.EX_SOFTWARE if failed.is_set() else os.EX_OK


def _take_events(channel: _Channel, outbox: InprocOutbox) -> bool:
    """Parent to outbox; whether it ended with ``Stopped`` rather than with the parent."""
    decoder = msgspec.msgpack.Decoder(list[Event])
    while (message := channel.receive()) is not None:
        events = decoder.decode(message)
        outbox.put(events)
        if any(isinstance(event, Stopped) for event in events):
            return True
    return False


def _send_commands(channel: _Channel, inbox: InprocInbox, server: TransportServer) -> None:
    while server.is_alive():
        inbox.wait(_IDLE_WAIT_S)
        commands = inbox.drain()
        if commands:
            try:
                channel.send(msgspec.msgpack.encode(commands))
            except OSError:
                return  # the parent is gone, as the receiving side sees too


def main() -> int:
    """``python -m kvd.frontend --fd N``: started by the daemon alone."""
    parser = argparse.ArgumentParser(prog="python -m kvd.frontend", description="The daemon's edge as a process; started by the daemon.")
    parser.add_argument("--fd", type=int, required=True, help="the daemon's socket")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the daemon's to handle; it tells the child
        signal.signal(number, signal.SIG_IGN)
    return run_child(socket.socket(fileno=arguments.fd))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a text thread may be inside a long tokenisation
