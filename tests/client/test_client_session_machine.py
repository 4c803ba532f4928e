"""The session against a model of a daemon behind a bad network: whatever happens, every call ends once, with the right tokens or a named error."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvd_client import errors
from kvd_client.calls import Answer, Call
from kvd_client.protocol import codec
from kvd_client.protocol.messages import (
    Abort,
    ChoiceEnd,
    Failed,
    Finished,
    Generate,
    Hello,
    HelloReply,
    Limits,
    Ping,
    Pong,
    Timings,
    Tokens,
    Usage,
)
from kvd_client.results import Chunk, Completion, pack_tokens
from kvd_client.session import SETTLE_S, Session
from kvd_client.session_config import SessionConfig

LIMITS = Limits(max_message_bytes=1000, max_model_len=100, max_choices=1, max_stop_strings=1, default_credit=64)


class ModelDaemon:
    """One start of a daemon: what it runs, what it remembers. A request's token at position p is p + 10."""

    def __init__(self, instance: int, *, is_ready: bool) -> None:
        self.instance = instance.to_bytes(16, "big")
        self.is_ready = is_ready
        self.running: dict[bytes, list[int]] = {}
        """Tokens wanted and tokens sent."""
        self.over: set[bytes] = set()
        self.out: list[list[bytes]] = []

    def hear(self, frames: list[bytes]) -> None:
        message, bodies = codec.decode_client(frames)
        match message:
            case Hello():
                self.say(HelloReply(instance=self.instance, version="", protocol=(1, 1), state="ready", limits=LIMITS))
            case Ping():
                self.say(Pong(nonce=message.nonce, instance=self.instance, state="ready"))
            case Generate(request_id=request_id):
                if request_id in self.running:
                    return
                if request_id in self.over:
                    self.say(Failed(request_id=request_id, code="duplicate", message=""))
                elif not self.is_ready:
                    self.say(Failed(request_id=request_id, code="starting", message="", retryable=True, retry_after_s=0.1))
                else:
                    self.running[request_id] = [bodies[0][0], 0]
            case Abort(request_id=request_id):
                if request_id in self.running:
                    self.finish(request_id, "aborted")
                elif request_id not in self.over:
                    self.say(Failed(request_id=request_id, code="not_found", message=""))

    def step(self, request_id: bytes, num_tokens: int) -> None:
        wanted, sent = self.running[request_id]
        num_tokens = min(num_tokens, wanted - sent)
        if num_tokens:
            token_ids = [sent + 10 + i for i in range(num_tokens)]
            self.say(Tokens(request_id=request_id, choice=0, first_index=sent), pack_tokens(token_ids), b"t" * num_tokens)
            self.running[request_id][1] += num_tokens
        if self.running[request_id][1] == wanted:
            self.finish(request_id, "length")

    def finish(self, request_id: bytes, reason: str) -> None:
        _, sent = self.running.pop(request_id)
        self.over.add(request_id)
        ends = (ChoiceEnd(choice=0, finish_reason=reason, num_tokens=sent),)
        self.say(Finished(request_id=request_id, choices=ends, usage=Usage(), timings=Timings()))

    def say(self, message: Any, *bodies: bytes) -> None:
        self.out.append(codec.encode(message, *bodies))


class ClientAndDaemon(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        ids, self.instances = itertools.count(1), itertools.count(1)
        config = SessionConfig(connect_timeout_s=1e6, reconnect_timeout_s=1e6, heartbeat_timeout_s=1e6)
        self.session = Session(config, new_id=lambda: next(ids).to_bytes(16, "big"))
        self.now = 0.0
        self.daemon = ModelDaemon(next(self.instances), is_ready=True)
        self.is_connected = False
        self.to_daemon: list[list[bytes]] = []
        self.calls: list[tuple[Call, list[Any], int]] = []
        self.cancelled: dict[int, int] = {}

    def _flush(self) -> None:
        """The session's messages enter the socket, which keeps them over a reconnect."""
        self.to_daemon.extend(self.session.outgoing)
        self.session.outgoing.clear()

    # -------------------------------------------------------------------------------------------------------- the caller

    @precondition(lambda self: len(self.calls) < 8)
    @rule(wanted=st.integers(0, 5), stream=st.booleans())
    def ask(self, wanted: int, stream: bool) -> None:
        deliveries: list[Any] = []
        call = Call(
            Generate(request_id=bytes(16), input="ids"), bytes([wanted]), deliver=deliveries.append, answer=Answer(1, stream=stream)
        )
        self.calls.append((call, deliveries, wanted))
        self.session.open(call, self.now)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.calls) - 1))
        call, deliveries, _ = self.calls[index]
        self.session.cancel(call)
        self.cancelled.setdefault(index, len(deliveries))

    # -------------------------------------------------------------------------------------------------------- the network

    @precondition(lambda self: not self.is_connected)
    @rule()
    def connect(self) -> None:
        self.is_connected = True
        self._flush()
        self.session.connected(self.now)
        self._flush()

    @precondition(lambda self: self.is_connected)
    @rule(num_read=st.integers(0, 5), num_kept=st.integers(0, 3))
    def lose_connection(self, num_read: int, num_kept: int) -> None:
        """What the daemon had sent is read in part; what the client had sent stays in its socket in part."""
        self.is_connected = False
        self._flush()
        self.to_daemon = self.to_daemon[len(self.to_daemon) - min(num_kept, len(self.to_daemon)) :]
        self.session.disconnected(self.now)
        for frames in self.daemon.out[:num_read]:
            self.session.receive(frames, self.now)
        self.daemon.out.clear()
        self.pass_time(2 * SETTLE_S)

    @precondition(lambda self: self.is_connected)
    @rule(num_read=st.integers(0, 5), num_kept=st.integers(0, 3), is_ready=st.booleans())
    def kill_daemon(self, num_read: int, num_kept: int, is_ready: bool) -> None:
        self.lose_connection(num_read, num_kept)
        self.daemon = ModelDaemon(next(self.instances), is_ready=is_ready)

    @precondition(lambda self: self.is_connected)
    @rule()
    def daemon_hears(self) -> None:
        self._flush()
        if self.to_daemon:
            self.daemon.hear(self.to_daemon.pop(0))

    @precondition(lambda self: self.is_connected)
    @rule()
    def client_hears(self) -> None:
        if self.daemon.out:
            self.session.receive(self.daemon.out.pop(0), self.now)

    # --------------------------------------------------------------------------------------------------------- the daemon

    @precondition(lambda self: self.daemon.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 3))
    def daemon_steps(self, data: st.DataObject, num_tokens: int) -> None:
        self.daemon.step(data.draw(st.sampled_from(sorted(self.daemon.running))), num_tokens)
        if not self.is_connected:
            self.daemon.out.clear()

    @rule()
    def daemon_is_ready(self) -> None:
        self.daemon.is_ready = True

    @rule(seconds=st.sampled_from([0.0, 0.06, 1.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)

    # --------------------------------------------------------------------------------------------------------- what holds

    @invariant()
    def deliveries_are_right_so_far(self) -> None:
        for index, (_, deliveries, wanted) in enumerate(self.calls):
            chunks = [delivery for delivery in deliveries if isinstance(delivery, Chunk)]
            last = [delivery for delivery in deliveries if not isinstance(delivery, Chunk)]
            token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
            assert token_ids == [10 + i for i in range(len(token_ids))]
            assert len(token_ids) <= wanted
            assert len(last) <= 1
            if last:
                assert deliveries[-1] is last[0]
                if isinstance(last[0], Completion):
                    assert last[0].token_ids == tuple(10 + i for i in range(wanted))
                    assert (last[0].finish_reason, last[0].text) == ("length", "t" * wanted)
                else:
                    assert isinstance(last[0], errors.Interrupted)
            if index in self.cancelled:
                assert len(deliveries) == self.cancelled[index]

    def teardown(self) -> None:
        """Let the daemon live and the network hold: then everything comes to its end, on both sides."""
        self.daemon.is_ready = True
        if not self.is_connected:
            self.connect()
        for _ in range(60):
            self._flush()
            while self.to_daemon:
                self.daemon_hears()
            for request_id in list(self.daemon.running):
                self.daemon.step(request_id, 3)
            while self.daemon.out:
                self.client_hears()
            self.pass_time(1.0)
        self.deliveries_are_right_so_far()
        for index, (_, deliveries, _) in enumerate(self.calls):
            is_over = bool(deliveries) and isinstance(deliveries[-1], Completion | errors.KvdError)
            assert is_over or index in self.cancelled
        assert not self.session._calls
        assert not self.daemon.running


TestClientAndDaemon = ClientAndDaemon.TestCase
TestClientAndDaemon.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
