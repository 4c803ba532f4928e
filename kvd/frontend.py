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
from typing import Protocol, TypeVar

import msgspec

from kvd.commands import Abort, Command, Event, OpDone, OpFailed, RequestFailed, Stopped
from kvd.config import EngineConfig, ObserveConfig, TransportConfig
from kvd.observe.logging import configure, get_logger
from kvd.transport.errors import EndpointError, EndpointInUseError
from kvd.transport.inproc import InprocInbox, InprocOutbox
from kvd.transport.ports import Text
from kvd.transport.server import TransportServer
from kvd.types import ErrorCode

_DRAIN_TIMEOUT_S = EngineConfig().drain_timeout_s
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 1 << 30
_IDLE_WAIT_S = 0.5
_CHILD_INBOX_CAPACITY = 4096
_CHILD_END_S = 2.0
"""How long a child that was told to end may take beyond the time in which it flushes its sockets."""
_CHILD_GONE_S = 15.0
"""How long a child whose channel is closed may take to be gone."""


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
    is_in_use: bool = False


class Frontend(Protocol):
    """A running edge."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The URLs that clients connect to."""

    def is_alive(self) -> bool: ...

    def stop(self, timeout_s: float) -> bool:
        """End, after flushing what is queued if ``Stopped`` was put into the outbox; whether it ended in time (a process is killed then).

        ``timeout_s`` leaves a few seconds beyond ``Stopped.flush_s``.
        """


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
    load_text: Callable[[], Text] | None = None,
) -> Frontend:
    """Open the endpoints and start serving them, by a thread or a process as ``config.frontend`` says.

    ``text_source`` is what ``kvd.text.model.load_text_model`` takes; it is loaded after the endpoints are open, off the caller's thread. A thread
    takes it from ``load_text``, where that is given: the caller may want the same one.
    ``drain_timeout_s`` is for drains that state none. ``on_failure`` is called, from another thread, if the edge dies or the text model can't be loaded.

    Raises:
        EndpointInUseError: another process listens on an endpoint.
        EndpointError: one can't be opened for another reason.
    """
    setup = _Setup(transport=config, observe=observe, text_source=text_source, instance=instance, drain_timeout_s=drain_timeout_s)
    if config.frontend == "process":
        return _ProcessFrontend(setup, inbox, outbox, on_failure)
    return _ThreadFrontend(setup, inbox, outbox, on_failure, load_text)


def _load_text(source: str) -> Text:
    from kvd.text.model import load_text_model

    return load_text_model(source)


def _make_server(
    setup: _Setup, inbox: InprocInbox, outbox: InprocOutbox, on_failure: Callable[[str], None], load_text: Callable[[], Text] | None = None
) -> TransportServer:
    return TransportServer(
        setup.transport,
        load_text=load_text or (lambda: _load_text(setup.text_source)),
        inbox=inbox,
        outbox=outbox,
        instance=setup.instance,
        drain_timeout_s=setup.drain_timeout_s,
        on_failure=on_failure,
    )


class _ThreadFrontend:
    def __init__(
        self,
        setup: _Setup,
        inbox: InprocInbox,
        outbox: InprocOutbox,
        on_failure: Callable[[str], None],
        load_text: Callable[[], Text] | None,
    ) -> None:
        self._server = _make_server(setup, inbox, outbox, on_failure, load_text)
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
            raise (EndpointInUseError if bound.is_in_use else EndpointError)(bound.error)
        self._endpoints = bound.endpoints
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name=f"kvd-frontend-{run.__name__}", daemon=True)
            for run in (self._send, self._receive)
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

    def _guard(self, run: Callable[[], None]) -> None:
        """Without either thread the edge would be deaf or dumb: the daemon ends and is started anew."""
        try:
            run()
        except BaseException as error:
            self._log.critical("frontend_thread_failed", error=repr(error), exc_info=error)
            self._fail(f"a thread beside the frontend process failed: {error!r}")

    def _fail(self, message: str) -> None:
        was_ending = self._is_ending.is_set()
        self._is_ending.set()
        self._channel.close()  # the other thread and the child end too
        if not was_ending:
            self._on_failure(message)

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
                    self._channel.send(_encode(events, self._instead_of))
                except OSError:
                    return  # the receiving thread reports it
            elif not self.is_alive():
                return

    def _receive(self) -> None:
        """Child to inbox; at its end of file, the child is gone."""
        decoder = msgspec.msgpack.Decoder(list[Command])
        while (message := self._channel.receive()) is not None:
            try:
                commands = decoder.decode(message)
            except (msgspec.MsgspecError, RecursionError):
                commands = self._decode_each(message)
            for command in commands:
                if not self._inbox.put(command):  # the child's own inbox had room
                    self._outbox.put([_refusal(command, ErrorCode.OVERLOADED, "too many commands wait for the engine (inbox_capacity)")])
        if not self._is_ending.is_set():
            status = self._wait_for_child()
            self._log.error("frontend_died", status=status)
            self._fail(f"the frontend process ended with status {status}")

    def _decode_each(self, message: bytes) -> list[Command]:
        """One of the commands can't be read: it fails, not those beside it."""
        commands = []
        for raw in msgspec.msgpack.decode(message, type=list[msgspec.Raw]):
            try:
                commands.append(msgspec.msgpack.decode(raw, type=Command))
            except (msgspec.MsgspecError, RecursionError) as error:
                self._outbox.put([_refusal(msgspec.msgpack.decode(raw, type=_Ids), ErrorCode.INTERNAL, _fault("decoded", error))])
        return commands

    def _instead_of(self, event: Event, error: Exception) -> list[Event]:
        """An event that can't be encoded becomes the failure of what it was about."""
        request_id = getattr(event, "request_id", b"")
        if not request_id and not isinstance(event, OpDone | OpFailed):
            raise error
        if request_id:
            self._inbox.put(Abort(request_id))
        return [_refusal(event, ErrorCode.INTERNAL, _fault("encoded", error))]

    def _wait_for_child(self) -> int:
        try:
            return self._process.wait(_CHILD_GONE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class _Ids(msgspec.Struct):
    """What can be known of a message that can't be read: whom it concerns."""

    request_id: bytes = b""
    op_id: bytes = b""


_M = TypeVar("_M")


def _encode(messages: list[_M], instead_of: Callable[[_M, Exception], list[_M]]) -> bytes:
    """A batch, with something in the place of each message that can't be encoded."""
    try:
        return msgspec.msgpack.encode(messages)
    except Exception:
        sound: list[_M] = []
        for message in messages:
            try:
                msgspec.msgpack.encode(message)
            except Exception as error:  # whatever it is, it is this message's alone
                sound += instead_of(message, error)
            else:
                sound.append(message)
        return msgspec.msgpack.encode(sound)


def _fault(done: str, error: Exception) -> str:
    get_logger("frontend").error("internal_error", error=repr(error), exc_info=error)
    return f"the daemon met a fault of its own: a message could not be {done}: {type(error).__name__}"


def _refusal(message: Command | Event | _Ids, code: ErrorCode, why: str) -> RequestFailed | OpFailed:
    """The failure of the request or operation that a message is about."""
    request_id = getattr(message, "request_id", b"")
    retry_after_s = 0.5 if code is ErrorCode.OVERLOADED else 0.0
    if request_id:
        return RequestFailed(request_id, code, why, retry_after_s)
    return OpFailed(getattr(message, "op_id", b""), code, why, retry_after_s)


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
        channel.send(msgspec.msgpack.encode(_Bound(error=str(error), is_in_use=isinstance(error, EndpointInUseError))))
        return os.EX_CONFIG
    channel.send(msgspec.msgpack.encode(_Bound(endpoints=endpoints)))
    server.start()
    sender = threading.Thread(target=_send_commands, args=(channel, inbox, outbox, server, fail), name="kvd-frontend-commands", daemon=True)
    sender.start()
    stopped = _take_events(channel, outbox)
    if stopped is None:
        stopped = Stopped()
        server.stop(stopped.flush_s)
    server.join(stopped.flush_s + _CHILD_END_S)
    return os.EX_SOFTWARE if failed.is_set() else os.EX_OK


def _take_events(channel: _Channel, outbox: InprocOutbox) -> Stopped | None:
    """Parent to outbox; ``Stopped`` if it ended so rather than with the parent."""
    decoder = msgspec.msgpack.Decoder(list[Event])
    while (message := channel.receive()) is not None:
        events = decoder.decode(message)
        outbox.put(events)
        for event in events:
            if isinstance(event, Stopped):
                return event
    return None


def _send_commands(
    channel: _Channel, inbox: InprocInbox, outbox: InprocOutbox, server: TransportServer, fail: Callable[[str], None]
) -> None:
    """Inbox to parent."""

    def instead_of(command: Command, error: Exception) -> list[Command]:
        outbox.put([_refusal(command, ErrorCode.INTERNAL, _fault("encoded", error))])
        return []

    try:
        while server.is_alive():
            inbox.wait(_IDLE_WAIT_S)
            commands = inbox.drain()
            if commands:
                channel.send(_encode(commands, instead_of))
    except OSError:
        return  # the parent is gone, as the receiving side sees too
    except BaseException as error:
        fail(f"the thread that hands over commands failed: {error!r}")


def main() -> int:
    """``python -m kvd.frontend --fd N``: started by the daemon alone."""
    parser = argparse.ArgumentParser(prog="python -m kvd.frontend", description="The daemon's edge as a process; started by the daemon.")
    parser.add_argument("--fd", type=int, required=True, help="the daemon's socket")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # they are the daemon's to handle; it tells the child
        signal.signal(number, signal.SIG_IGN)
    try:
        return run_child(socket.socket(fileno=arguments.fd))
    except BaseException as error:
        get_logger("frontend").critical("frontend_failed", error=repr(error), exc_info=error)
        return os.EX_SOFTWARE


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a text thread may be inside a long tokenisation
