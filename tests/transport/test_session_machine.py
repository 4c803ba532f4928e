"""Clients, sockets and engine doing anything in any order: every request ends once, nothing is lost, doubled or left behind."""

from __future__ import annotations

from typing import Any

from edge_fakes import ENGINE_HELLO, INSTANCE, ByteText, EchoEngine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvd_client.protocol.codec import decode_server, encode
from kvd_client.protocol.messages import Abort, Credit, Failed, Finished, Generate, Message, Ping, Tokens

from kvd.commands import Command, Snapshot, Submit
from kvd.config import TransportConfig
from kvd.transport.bodies import TextJob, run_text_job
from kvd.transport.edge import Outgoing
from kvd.transport.sending import Attempt, Sender
from kvd.transport.session import Session
from kvd.types import unpack_tokens

PEERS = (b"one", b"two", b"three")
NUMBERS = st.integers(0, 5)
WINDOW = 4


def id_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Conversations(RuleBasedStateMachine):
    """Three peers share a handful of request ids; sockets block and vanish; the engine runs when it likes."""

    @initialize(max_backlog_bytes=st.sampled_from([1500, 100_000]), inbox_capacity=st.sampled_from([2, 1000]))
    def begin(self, max_backlog_bytes: int, inbox_capacity: int) -> None:
        self.now = 0.0
        config = TransportConfig(default_credit=WINDOW, max_clients=2, client_timeout_s=30.0, dedupe_capacity=1000)
        self.inbox: list[Command] = []
        self.inbox_capacity = inbox_capacity
        self.engine = EchoEngine()
        self.session = Session(config, put=self.put, instance=INSTANCE, version="0", drain_timeout_s=1.0)
        self.session.set_text(ByteText())
        self.session.on_events([ENGINE_HELLO, Snapshot("ready", {}, {})], 0.0)
        self.sockets: dict[bytes, Attempt] = {}
        self.sender = Sender(
            attempt=self.attempt,
            on_sent=self.session.on_sent,
            on_dropped=lambda number: None,
            on_gone=self.session.on_gone,
            on_overflow=self.session.on_overflow,
            max_backlog_bytes=max_backlog_bytes,
            max_total_backlog_bytes=4 * max_backlog_bytes,
        )
        self.jobs: list[TextJob] = []
        self.asked: dict[bytes, int] = {}
        """Generates sent, by id."""
        self.ended: dict[bytes, int] = {}
        """Terminal messages queued, by id, whoever they are for."""
        self.streams: dict[tuple[bytes, bytes, int], int] = {}
        """Tokens received in the current run, by peer, id and choice."""

    def put(self, command: Command) -> bool:
        if isinstance(command, Submit) and len(self.inbox) >= self.inbox_capacity:
            return False
        if isinstance(command, Submit):
            held = {*self.engine._requests, *(c.request_id for c in self.inbox if isinstance(c, Submit))}
            aborted = {c.request_id for c in self.inbox if type(c).__name__ == "Abort"}
            assert command.request_id not in held - aborted, "one id names two requests in the engine"
            assert command.request_id not in held, "the engine has not said its last word on the id's earlier run"
        self.inbox.append(command)
        return True

    def attempt(self, out: Outgoing) -> Attempt:
        state = self.sockets.get(out.peer, Attempt.SENT)
        if state is Attempt.SENT:
            self.arrive(out)
        return state

    def arrive(self, out: Outgoing) -> None:
        message, bodies = decode_server(out.frames)
        if isinstance(message, Tokens):
            key = (out.peer, message.request_id, message.choice)
            expected = self.streams.get(key, 0)
            assert message.first_index in (0, expected), "a gap"
            self.streams[key] = message.first_index + len(unpack_tokens(bodies[0]))

    def send(self, peer: bytes, message: Message, *bodies: bytes) -> None:
        self.session.receive(peer, encode(message, *bodies), self.now)
        self.flush()

    def flush(self) -> None:
        self.jobs += self.session.take_text_jobs()
        while outgoing := self.session.take_outgoing():
            for out in outgoing:
                message, _ = decode_server(out.frames)
                if isinstance(message, Finished | Failed) and message.request_id:
                    self.ended[message.request_id] = self.ended.get(message.request_id, 0) + 1
                self.sender.send(out, self.now)

    @rule(
        peer=st.sampled_from(PEERS), number=NUMBERS, body=st.sampled_from([b"ab", b"abc!", b""]), n=st.integers(1, 2),
        credit=st.sampled_from([0, 0, 1, 100]), stop=st.sampled_from([(), ("c!",)]), max_tokens=st.integers(1, 12),
    )  # fmt: skip
    def generate(self, peer: bytes, number: int, body: bytes, **fields: Any) -> None:
        self.asked[id_of(number)] = self.asked.get(id_of(number), 0) + 1
        self.send(peer, Generate(request_id=id_of(number), input="text", **fields), body)

    @rule(peer=st.sampled_from(PEERS), number=NUMBERS)
    def abort(self, peer: bytes, number: int) -> None:
        self.asked[id_of(number)] = self.asked.get(id_of(number), 0) + 1
        self.send(peer, Abort(request_id=id_of(number)))

    @rule(peer=st.sampled_from(PEERS), number=NUMBERS, num_tokens=st.integers(1, 5))
    def credit(self, peer: bytes, number: int, num_tokens: int) -> None:
        self.asked[id_of(number)] = self.asked.get(id_of(number), 0) + 1
        self.send(peer, Credit(request_id=id_of(number), num_tokens=num_tokens))

    @rule(peer=st.sampled_from(PEERS))
    def ping(self, peer: bytes) -> None:
        self.send(peer, Ping())

    @rule(peer=st.sampled_from(PEERS), state=st.sampled_from(Attempt))
    def socket(self, peer: bytes, state: Attempt) -> None:
        self.sockets[peer] = state

    @rule()
    def tokenise_one(self) -> None:
        if self.jobs:
            self.session.on_text(run_text_job(self.jobs.pop(0), ByteText(), ""), self.now)
            self.flush()

    @rule(num_commands=st.integers(1, 3), num_steps=st.integers(0, 3))
    def engine_runs(self, num_commands: int, num_steps: int) -> None:
        for command in self.inbox[:num_commands]:
            self.session.on_events(self.engine.handle(command), self.now)
        del self.inbox[:num_commands]
        for _ in range(num_steps):
            self.session.on_events(self.engine.step(), self.now)
        self.flush()

    @rule(seconds=st.sampled_from([0.5, 3.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)
        self.sender.retry(self.now)
        self.flush()

    @invariant()
    def no_internal_error(self) -> None:
        if hasattr(self, "session"):
            assert self.session.counters.internal_errors == 0
            assert self.session.num_clients <= 2

    @invariant()
    def what_is_under_way_is_bounded(self) -> None:
        if hasattr(self, "session"):
            for request in self.session._requests._requests.values():
                assert request.credit.num_outstanding <= WINDOW

    def teardown(self) -> None:
        """When every socket takes everything and every client grants everything, all of it comes to an end."""
        if not hasattr(self, "session"):
            return
        self.inbox_capacity = 1000
        for peer in PEERS:
            self.sockets[peer] = Attempt.SENT
        for _ in range(200):
            while self.jobs:
                self.tokenise_one()
            self.engine_runs(1000, 5)
            self.sender.retry(self.now)
            self.flush()
            for request_id, request in tuple(self.session._requests._requests.items()):
                if request.message.credit and not request.is_muted:
                    self.session.receive(request.client.peer, encode(Credit(request_id=request_id, num_tokens=50)), self.now)
            self.flush()
            if not self.session.num_requests and not self.inbox:
                break
        assert self.session.num_requests == 0
        assert self.engine.num_requests == 0
        assert not self.sender.has_backlog
        assert self.session._edge.num_text_jobs == self.session._edge.num_text_bytes == 0
        for request_id, num_ended in self.ended.items():
            assert num_ended <= self.asked[request_id], "more terminal messages than messages that can cause one"
        for client in self.session._clients._clients.values():
            assert client.num_open == client.num_text_jobs == 0


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
