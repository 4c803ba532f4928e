"""The daemon's side of the protocol, sans-IO: frames, events and time go in, frames, commands and text jobs come out.

``docs/protocol.md`` is the specification. The driver (server.py, or a test) gives every message to ``receive``, the engine's
events to ``on_events``, finished text jobs to ``on_text``, what became of sent messages to ``on_sent``, ``on_gone`` and ``on_overflow``, and the time
to ``tick``; after each of these it sends ``take_outgoing()`` and runs ``take_text_jobs()``. One thread calls all of it. Times are monotonic seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvd_client.protocol.codec import ProtocolError, decode_client, ids_in
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    ID_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Abort,
    ClientMessage,
    Credit,
    Generate,
    Hello,
    HelloReply,
    Limits,
    Ping,
    Pong,
)

from kvd.commands import (
    ChoiceDone,
    Command,
    Event,
    OpDone,
    OpFailed,
    PromptLogprobsOut,
    RequestDone,
    RequestFailed,
    Snapshot,
    Stopped,
    TokensOut,
)
from kvd.commands import Hello as EngineHello
from kvd.config import TransportConfig
from kvd.transport.bodies import TextJob, TextResult
from kvd.transport.clients import Client, Clients
from kvd.transport.counters import Counters
from kvd.transport.edge import RETRY_AFTER_S, Edge, Outgoing
from kvd.transport.errors import RequestError, bad_request
from kvd.transport.operations import Operations
from kvd.transport.ports import Text
from kvd.transport.requests import Requests
from kvd.transport.tenants import Caller
from kvd.types import ErrorCode

_ANYBODY = Caller()


class Session:
    """Every conversation of the daemon."""

    def __init__(
        self, config: TransportConfig, *, put: Callable[[Command], bool], instance: bytes, version: str, drain_timeout_s: float
    ) -> None:
        """``put`` hands a command to the engine's inbox and says whether it was taken; ``drain_timeout_s`` is for drains that state none."""
        self._edge = Edge(config=config, instance=instance, put=put, drain_timeout_s=drain_timeout_s)
        self._version = version
        self._clients = Clients(config.max_clients)
        numbers = itertools.count(1)
        self._requests = Requests(self._edge, lambda: next(numbers))
        self._operations = Operations(self._edge, lambda: next(numbers))
        self._text_sizes: dict[int, int] = {}
        self.taken_over: list[bytes] = []
        """Peers whose connection became another tenant's, or of whom it would no longer be noticed: the driver drops what still waits for them."""

    # -------------------------------------------------------------------------------- out

    @property
    def counters(self) -> Counters:
        """What has been counted; the driver adds to it what only it sees."""
        return self._edge.counters

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has ended. Everything open has had its terminal message queued."""
        return self._edge.stopped

    @property
    def flush_s(self) -> float:
        """How long what is queued may be delivered after the engine's end."""
        return self._edge.flush_s

    @property
    def num_requests(self) -> int:
        """Requests that the edge still holds."""
        return len(self._requests)

    @property
    def num_clients(self) -> int:
        """Peers with a conversation."""
        return len(self._clients)

    def take_outgoing(self) -> list[Outgoing]:
        """The messages to send, in order."""
        outgoing, self._edge.outgoing = self._edge.outgoing, []
        return outgoing

    def take_text_jobs(self) -> list[TextJob]:
        """The bodies to tokenise; jobs of one peer must run in order."""
        jobs, self._edge.text_jobs = self._edge.text_jobs, []
        for job in jobs:
            self._text_sizes[job.number] = job.num_bytes
        return jobs

    # -------------------------------------------------------------------------------- in: the text model and its threads

    def set_text(self, text: Text) -> None:
        """The tokenizer and chat template are loaded."""
        self._edge.text = text

    def on_text(self, result: TextResult, now: float) -> None:
        """A text job is done."""
        self._edge.text_done(self._text_sizes.pop(result.number))
        if result.fault is not None:
            result = TextResult(number=result.number, error=self._edge.internal_error(result.fault))
        if not self._requests.on_prompt(result, now):
            self._operations.on_prompt(result)

    # -------------------------------------------------------------------------------- in: clients

    def receive(self, peer: bytes, frames: list[bytes], now: float, caller: Caller = _ANYBODY) -> None:
        """Take a message from a peer, which is ``caller``'s by what the transport knows. Nothing that a peer sends raises."""
        counters = self._edge.counters
        counters.messages_received += 1
        counters.bytes_received += sum(map(len, frames))
        client = self._hear(peer, caller, now)
        request_id = op_id = b""
        try:
            message, bodies = self._decode(frames)
            request_id, op_id = getattr(message, "request_id", b"")[:ID_BYTES], getattr(message, "op_id", b"")[:ID_BYTES]
            self._dispatch(client, message, bodies, now)
        except ProtocolError as error:
            self._answer_unreadable(peer, error)
        except RequestError as error:
            counters.refused += 1
            self._edge.send_failed(peer, error, request_id=request_id, op_id=op_id)
        except Exception as error:  # our own fault; one message must not end the edge
            self._edge.send_failed(peer, self._edge.internal_error(error), request_id=request_id, op_id=op_id)

    def on_sent(self, out: Outgoing) -> None:
        """The peer's socket took a message."""
        self._edge.counters.messages_sent += 1
        self._edge.counters.bytes_sent += sum(map(len, out.frames))
        if out.num_tokens:
            self._requests.on_sent(out.request_id, out.num_tokens)

    def on_gone(self, peer: bytes) -> None:
        """The peer's connection is gone and did not come back: its requests are aborted, nobody is told."""
        client = self._clients.remove(peer)
        if client is not None:
            self._count_gone(client, "the connection is gone")
            self._requests.forget_client(client)
        self._forget_lost()

    def on_overflow(self, peer: bytes) -> None:
        """More waits for the peer's socket than may wait: its requests fail."""
        client = self._clients.get(peer)
        if client is not None and client.request_ids:
            self._edge.counters.clients_too_slow += 1
            self._edge.log.warning("client_too_slow", client=peer, num_requests=len(client.request_ids))
            config = self._edge.config
            message = (
                f"too much waits for this client: more than {config.max_backlog_bytes} bytes, or most of {config.max_total_backlog_bytes}"
            )
            self._requests.fail_client(client, RequestError(ErrorCode.CLIENT_TOO_SLOW, message))

    # -------------------------------------------------------------------------------- in: the engine, the time

    def on_events(self, events: Sequence[Event], now: float) -> None:
        """Take what the engine says."""
        for event in events:
            try:
                self._on_event(event, now)
            except Exception as error:  # a fault in one stream must not end the others
                failure, is_done = self._edge.internal_error(error), isinstance(event, RequestDone | RequestFailed)
                self._requests.fail_one(getattr(event, "request_id", b""), failure, engine_is_done=is_done)

    def tick(self, now: float) -> None:
        """Let time pass: clients that have been silent for too long, reports that the engine is too busy for."""
        self._operations.tick(now)
        for client in self._clients.take_silent(now - self._edge.config.client_timeout_s):
            if client.num_open:
                self._count_gone(client, "it has been silent")
            self._requests.abort_client(client, now)
        self._forget_lost()

    # -------------------------------------------------------------------------------- inside

    def _hear(self, peer: bytes, caller: Caller, now: float) -> Client:
        known = self._clients.last(peer)
        if known is not None and known.caller != caller:
            # Another tenant took the connection over by its routing id: what was begun over it is none of its business.
            self._edge.log.warning("client_taken_over", client=peer, tenant=caller.tenant, of_tenant=known.caller.tenant)
            self.on_gone(peer)
            self._clients.end(peer)
            self._forget(known)
        client, forgotten = self._clients.hear(peer, caller, now)
        if forgotten is not None and forgotten.num_open:
            self._count_gone(forgotten, "it made room for another")
            limit = self._edge.config.max_clients
            error = RequestError(ErrorCode.OVERLOADED, f"the daemon talks to {limit} clients at once", retry_after_s=RETRY_AFTER_S)
            self._requests.fail_client(forgotten, error)
        self._forget_lost()
        return client

    def _forget_lost(self) -> None:
        for client in self._clients.take_lost():
            self._forget(client)

    def _forget(self, client: Client) -> None:
        """Nothing of what it began is told to anybody."""
        self._requests.forget_client(client)
        self._operations.forget_client(client)
        self.taken_over.append(client.peer)

    def _count_gone(self, client: Client, reason: str) -> None:
        self._edge.counters.clients_gone += 1
        self._edge.log.info("client_gone", client=client.peer, reason=reason, num_requests=len(client.request_ids))

    def _decode(self, frames: list[bytes]) -> tuple[ClientMessage, list[bytes]]:
        config = self._edge.config
        if len(frames) > config.max_frames:
            raise ProtocolError(Code.TOO_LARGE, f"a message of more than {config.max_frames} frames", ids_in(frames))
        if any(len(frame) > config.max_message_bytes for frame in frames):
            raise ProtocolError(Code.TOO_LARGE, f"a frame of more than {config.max_message_bytes} bytes", ids_in(frames))
        return decode_client(frames)

    def _dispatch(self, client: Client, message: ClientMessage, bodies: list[bytes], now: float) -> None:
        match message:
            case Generate():
                self._requests.begin(client, message, bodies, now)
            case Credit():
                self._requests.grant(client, message.request_id, message.num_tokens)
            case Abort():
                self._requests.abort(client, message.request_id, now)
            case Ping():
                self._edge.send(client.peer, Pong(nonce=message.nonce, instance=self._edge.instance, state=self._edge.snapshot.state))
            case Hello():
                self._hello(client, message)
            case _:
                self._operations.begin(client, message, bodies, now)

    def _hello(self, client: Client, message: Hello) -> None:
        low, high = message.protocol
        if low > high:
            raise bad_request(f"protocol is ({low}, {high}); the range is upside down")
        if high < PROTOCOL_MIN or low > PROTOCOL_MAX:
            self._edge.counters.unsupported_version += 1
            raise RequestError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"the daemon speaks protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}, the client {low} to {high}",
            )
        config, facts = self._edge.config, self._edge.hello
        self._edge.send(
            client.peer,
            HelloReply(
                instance=self._edge.instance,
                version=self._version,
                protocol=(PROTOCOL_MIN, PROTOCOL_MAX),
                state=self._edge.snapshot.state,
                limits=Limits(
                    max_message_bytes=config.max_message_bytes,
                    max_model_len=facts.max_model_len if facts else 0,
                    max_choices=facts.max_choices if facts else 0,
                    max_stop_strings=config.max_stop_strings,
                    default_credit=config.default_credit,
                ),
                model=facts.model if facts else "",
                fingerprint=facts.fingerprint.hex() if facts else "",
                vocab_size=facts.vocab_size if facts else 0,
            ),
        )

    def _answer_unreadable(self, peer: bytes, error: ProtocolError) -> None:
        counters = self._edge.counters
        if error.code is Code.TOO_LARGE:
            counters.oversized += 1
        elif error.code is Code.UNKNOWN_TYPE:
            counters.unknown_type += 1
        else:
            counters.malformed += 1
        failure = RequestError(error.code, str(error))
        self._edge.send_failed(peer, failure, request_id=_id_in(error.header, "request_id"), op_id=_id_in(error.header, "op_id"))

    def _on_event(self, event: Event, now: float) -> None:
        if isinstance(event, RequestFailed | OpFailed) and event.code == ErrorCode.INTERNAL:
            self._edge.counters.internal_errors += 1
        match event:
            case TokensOut():
                self._requests.on_tokens(event, now)
            case PromptLogprobsOut():
                self._requests.on_prompt_logprobs(event)
            case ChoiceDone():
                self._requests.on_choice_done(event)
            case RequestDone():
                self._requests.on_done(event, now)
            case RequestFailed():
                self._requests.on_failed(event)
            case OpDone():
                self._operations.on_done(event)
            case OpFailed():
                self._operations.on_failed(event)
            case Snapshot():
                self._edge.snapshot = event
            case EngineHello():
                self._edge.hello = event
            case Stopped():
                self._on_stopped(event)

    def _on_stopped(self, event: Stopped) -> None:
        self._edge.stopped = True
        self._edge.flush_s = event.flush_s
        error = RequestError(ErrorCode.DRAINING, "the daemon has stopped", retry_after_s=1.0)
        self._requests.on_stopped(error)
        self._operations.on_stopped(error)


def _id_in(header: dict[str, object], key: str) -> bytes:
    value = header.get(key)
    return value if isinstance(value, bytes) and len(value) == ID_BYTES else b""
