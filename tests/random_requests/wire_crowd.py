"""Clients on bare sockets that see every message the daemon sends them, read slowly, go away in the middle, and hold it to the protocol's word."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from kvd_client.calls import Answer
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    Abort,
    Checkpoint,
    Credit,
    Failed,
    Finished,
    Forget,
    Generate,
    Hello,
    HelloReply,
    LoadAdapter,
    Pin,
    Ping,
    Pong,
    Prompt,
    Result,
    Tokenize,
    Tokens,
    UnloadAdapter,
    Unpin,
)
from request_drawing import Ask, Op
from request_rules import is_held
from two_tenants import TwoTenants

HEARTBEAT_S = 5.0
SLOW_S = 0.02
TWICE_S = 0.004
_OP_CODES = {
    "pin": {Code.PIN_TOO_SHORT, Code.PIN_CAPACITY, Code.OVERLOADED, Code.NOT_FOUND, Code.KV_CAPACITY},
    "unpin": {Code.NOT_FOUND},
    "forget": {Code.PIN_TOO_SHORT, Code.OVERLOADED},
    "load": {Code.NOT_FOUND, Code.ADAPTER_CAPACITY},
    "unload": {Code.NOT_FOUND},
    "tokenize": {Code.OVERLOADED},
    "checkpoint": set(),
}
_OF_OPERATORS = ("load", "unload", "checkpoint")
"""What a tenant's client is refused."""


class BreachError(Exception):
    """The daemon broke its word."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One generation and all that came of it."""

    ask: Ask
    request_id: bytes
    message: Generate
    frames: list[bytes]
    answer: Answer
    allowed: int
    """Tokens that the daemon may have sent; 0: as many as it likes."""
    terminal: Finished | Failed | None = None
    num_messages: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)
    is_aborted: bool = False
    may_be_duplicate: bool = False
    """It was sent twice, and the second one may have come after its end."""

    def forget(self) -> None:
        """Be as if it had not been sent yet: its first run failed in a way that lets its id be sent again, and it was."""
        self.terminal, self.num_messages = None, 0
        self.num_tokens.clear()
        self.answer = Answer(max(1, self.message.n), stream=True, prompt_logprobs=self.message.prompt_logprobs is not None)

    @property
    def token_ids(self) -> dict[int, tuple[int, ...]]:
        return {choice: tuple(state.token_ids) for choice, state in self.answer._choices.items()}


@dataclass(slots=True, eq=False)
class Operation:
    op: Op
    op_id: bytes
    frames: list[bytes]
    terminal: Result | Failed | None = None
    data: Any = None


class WireCrowd:
    """Peers of one daemon, for as long as it lives."""

    def __init__(self, endpoint: str, *, tenants: TwoTenants | None = None, num_peers: int = 3, seed: int = 0) -> None:
        """With ``tenants`` the first two peers are theirs."""
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._numbers = itertools.count(1)
        self._seed = seed
        self._has_tenants = tenants is not None
        self.exchanges: dict[bytes, Exchange] = {}
        """Of all crowds: a message about one that is over is a breach whenever it comes."""
        self.operations: dict[bytes, Operation] = {}
        self._at_the_end: set[Code] = set()
        """How an operation may fail besides while its daemon drains."""
        self._pongs: set[int] = set()
        self._beat_s = 0.0
        self._events: list[tuple[float, int, Any, Any]] = []
        for number in range(num_peers):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, b"r" + seed.to_bytes(8, "little") + number.to_bytes(8, "little"))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 100_000)
            if tenants is not None and number < 2:
                tenants.connect(socket, number)
            else:
                socket.connect(endpoint)
            self._sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)
            socket.send_multipart(codec.encode(Hello(client="crowd")))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def run(self, items: Sequence[Ask | Op], *, timeout_s: float) -> list[Exchange]:
        """Send them all, and read until each has ended.

        Raises:
            BreachError: a message that must not come, or one that does not come in time.
        """
        calls = self._begin(items)
        until_s = time.monotonic() + timeout_s
        while self._events or any(call.terminal is None for call in calls):
            self._turn(until_s)
            if time.monotonic() > until_s:
                open_calls = [call for call in calls if call.terminal is None]
                raise BreachError(f"{len(open_calls)} without an end after {timeout_s:.0f} s: {open_calls}")
            if not self._events and all(call.terminal is not None for call in calls):
                self._settle(until_s)  # what was sent twice may run again
        return [call for call in calls if isinstance(call, Exchange)]

    def leave(self, items: Sequence[Ask | Op], *, after_s: float) -> None:
        """Send them all, and be gone in the middle of the answers."""
        self._begin(items)
        self.read_for(after_s)
        self.close()

    def read_for(self, seconds: float) -> None:
        """Go on for so long, whatever comes."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._turn(until_s)

    def run_to_the_end(
        self, items: Sequence[Ask | Op], end: Callable[[], None], is_over: Callable[[], bool], *, after_s: float
    ) -> list[Exchange]:
        """Send them all, have the daemon end in the middle, and read what it still says."""
        calls = self._begin(items)
        self.read_for(after_s)
        self._at_the_end = {Code.DRAINING}
        end()
        until_s = time.monotonic() + 60
        while not is_over() and time.monotonic() < until_s:
            self.read_for(0.05)
        self.read_for(0.2)
        return [call for call in calls if isinstance(call, Exchange)]

    def _begin(self, items: Sequence[Ask | Op]) -> list[Exchange | Operation]:
        calls: list[Exchange | Operation] = []
        at_s = time.monotonic()
        for item in items:
            at_s += item.pause_ms / 1000
            calls.append(self._exchange(item) if isinstance(item, Ask) else self._operation(item))
            self._at(at_s, self._send, calls[-1])
        return calls

    # ---------------------------------------------------------------------------------------- sending

    def _id(self) -> bytes:
        return (self._seed << 64 | next(self._numbers)).to_bytes(16, "big")

    def _exchange(self, ask: Ask) -> Exchange:
        request_id = self._id()
        message, bodies = ask.frames_of(request_id)
        answer = Answer(max(1, message.n), stream=True, prompt_logprobs=message.prompt_logprobs is not None)
        exchange = Exchange(ask, request_id, message, codec.encode(message, *bodies), answer, max(0, message.credit))
        self.exchanges[request_id] = exchange
        return exchange

    def _operation(self, op: Op) -> Operation:
        op_id, text = self._id(), op.text.encode()
        bodies: tuple[bytes, ...] = ()
        match op.kind:
            case "pin":
                message: Any = Pin(op_id=op_id, name=op.name, input="text", cache_salt=op.salt, adapter=op.adapter)
                bodies = (text,)
            case "unpin":
                message = Unpin(op_id=op_id, name=op.name)
            case "forget":
                message, bodies = Forget(op_id=op_id, input="text", cache_salt=op.salt), (text,)
            case "load":
                message = LoadAdapter(op_id=op_id, name=op.name)
            case "unload":
                message = UnloadAdapter(op_id=op_id, name=op.name)
            case "tokenize":
                message, bodies = Tokenize(op_id=op_id, input="text"), (text,)
            case _:
                message = Checkpoint(op_id=op_id)
        operation = Operation(op, op_id, codec.encode(message, *bodies))
        self.operations[op_id] = operation
        return operation

    def _at(self, at_s: float, action: Any, subject: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), action, subject))

    def _send(self, call: Exchange | Operation) -> None:
        if isinstance(call, Operation):
            self._socket(call.op.peer).send_multipart(call.frames)
            return
        self._socket(call.ask.peer).send_multipart(call.frames)
        if call.ask.is_sent_twice:
            self._at(time.monotonic() + TWICE_S, self._send_again, call)
        if call.ask.abort_after == 0:
            self._abort(call)
        elif call.ask.reader == "gone":
            self._at(time.monotonic() + 0.15, self._abort_if_open, call)

    def _send_again(self, exchange: Exchange) -> None:
        exchange.may_be_duplicate = True
        self._socket(exchange.ask.peer).send_multipart(exchange.frames)

    def _abort(self, exchange: Exchange) -> None:
        exchange.is_aborted = True
        self._socket(exchange.ask.peer).send_multipart(codec.encode(Abort(request_id=exchange.request_id)))

    def _abort_if_open(self, exchange: Exchange) -> None:
        if exchange.terminal is None and not exchange.is_aborted:
            self._abort(exchange)

    def _grant(self, subject: tuple[Exchange, int]) -> None:
        exchange, num_tokens = subject
        if exchange.terminal is None:
            exchange.allowed += num_tokens
            self._socket(exchange.ask.peer).send_multipart(codec.encode(Credit(request_id=exchange.request_id, num_tokens=num_tokens)))

    def _socket(self, peer: int) -> zmq.Socket[bytes]:
        return self._sockets[peer % len(self._sockets)]

    # ---------------------------------------------------------------------------------------- reading

    def _turn(self, until_s: float) -> None:
        now = time.monotonic()
        while self._events and self._events[0][0] <= now:
            _, _, action, subject = heapq.heappop(self._events)
            action(subject)
        if now >= self._beat_s:
            self._beat_s = now + HEARTBEAT_S
            for socket in self._sockets:
                socket.send_multipart(codec.encode(Ping()))
        wait_s = min(until_s, self._events[0][0] if self._events else until_s) - time.monotonic()
        for socket, _ in self._poller.poll(max(0.0, min(wait_s, 1.0)) * 1000):
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(*codec.decode_server(frames))

    def _settle(self, until_s: float) -> None:
        """A ping's answer comes after everything before it."""
        nonces = {next(self._numbers) for _ in self._sockets}
        for nonce, socket in zip(sorted(nonces), self._sockets, strict=True):
            socket.send_multipart(codec.encode(Ping(nonce=nonce)))
        while not nonces <= self._pongs:
            if time.monotonic() > until_s + 10:
                raise BreachError("a ping was not answered")
            self._turn(until_s + 10)

    def _take(self, message: Any, bodies: list[bytes]) -> None:
        match message:
            case Pong():
                self._pongs.add(message.nonce)
            case HelloReply():
                pass
            case Result():
                self._take_result(message, bodies)
            case Failed() if message.op_id:
                self._take_result(message, bodies)
            case Failed() if not message.request_id:
                raise BreachError(f"a failure of nothing: {message}")
            case _:
                self._take_of_request(message, bodies)

    def _take_result(self, message: Result | Failed, bodies: list[bytes]) -> None:
        operation = self.operations.get(message.op_id)
        if operation is None or operation.terminal is not None:
            raise BreachError(f"{message} for {operation}")
        operation.terminal = message
        is_refused = self._has_tenants and operation.op.peer < 2 and operation.op.kind in _OF_OPERATORS
        may = self._at_the_end | ({Code.BAD_REQUEST} if is_refused else _OP_CODES[operation.op.kind] | {Code.OVERLOADED})
        if message.code not in may if isinstance(message, Failed) else is_refused:
            raise BreachError(f"{operation.op} failed with {message}")
        operation.data = codec.unpack_body(bodies[0]) if bodies else None

    def _take_of_request(self, message: Any, bodies: list[bytes]) -> None:
        exchange = self.exchanges.get(message.request_id)
        if exchange is None:
            raise BreachError(f"about nobody's request: {message}")
        if isinstance(message, Failed) and message.code == Code.DUPLICATE and exchange.may_be_duplicate and exchange.terminal is not None:
            exchange.may_be_duplicate = False
            return
        if exchange.terminal is not None and exchange.may_be_duplicate and _may_be_asked_again(exchange.terminal):
            exchange.may_be_duplicate = False
            exchange.forget()
        if exchange.terminal is not None:
            raise BreachError(f"{message} after the end {exchange.terminal} of {exchange.ask}")
        exchange.num_messages += 1
        match message:
            case Prompt():
                if exchange.num_tokens:
                    raise BreachError(f"of the prompt after tokens: {exchange.ask}")
                exchange.answer.take_prompt(message, bodies)
            case Tokens():
                self._take_tokens(exchange, message, bodies)
            case Finished() | Failed():
                exchange.terminal = message
        if exchange.terminal is None and exchange.ask.abort_after == exchange.num_messages:
            self._abort(exchange)

    def _take_tokens(self, exchange: Exchange, message: Tokens, bodies: list[bytes]) -> None:
        ask = exchange.ask
        num_before = exchange.num_tokens.get(message.choice, 0)
        if message.first_index != num_before:
            raise BreachError(f"token {message.first_index} after {num_before} of choice {message.choice}: {ask}")
        if len(bodies) != (2 if exchange.message.text else 1):
            raise BreachError(f"{len(bodies)} bodies of tokens: {ask}")
        num_new = len(bodies[0]) // 4
        if message.logprobs and len(message.logprobs) != num_new:
            raise BreachError(f"{len(message.logprobs)} log-probabilities of {num_new} tokens: {ask}")
        exchange.answer.take_tokens(message, bodies)
        exchange.num_tokens[message.choice] = num_before + num_new
        num_all = sum(exchange.num_tokens.values())
        if exchange.allowed and not is_held(ask) and num_all > exchange.allowed + exchange.message.n - 1:
            raise BreachError(f"{num_all} tokens against a credit of {exchange.allowed}: {ask}")
        if exchange.allowed and num_new:
            match ask.reader:
                case "eager":
                    self._grant((exchange, num_new))
                case "slow":
                    self._at(time.monotonic() + SLOW_S, self._grant, (exchange, num_new))


def _may_be_asked_again(terminal: Finished | Failed) -> bool:
    """Whether its id may be sent again: what was refused is judged again, and what failed retryably is run again."""
    return isinstance(terminal, Failed)
