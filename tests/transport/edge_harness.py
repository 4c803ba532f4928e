"""Drives a session without sockets or threads: text jobs run inline, the echo engine steps when told."""

from __future__ import annotations

from typing import Any

from edge_fakes import ENGINE_HELLO, INSTANCE, ByteText, EchoEngine
from kvd_client.protocol.codec import decode_server, encode
from kvd_client.protocol.messages import Failed, Finished, Generate, Message, ServerMessage, Tokens

from kvd.commands import Command, Snapshot
from kvd.config import TransportConfig
from kvd.transport.bodies import run_text_job
from kvd.transport.edge import Outgoing
from kvd.transport.session import Session


def request_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Harness:
    def __init__(self, *, ready: bool = True, deliver: bool = True, text: ByteText | None = None, **config: Any) -> None:
        self.now = 100.0
        self.config = TransportConfig(**config)
        self.engine = EchoEngine()
        self.commands: list[Command] = []
        self.inbox_full = False
        self.deliver = deliver
        self.undelivered: list[Outgoing] = []
        self.received: list[tuple[bytes, ServerMessage, list[bytes]]] = []
        self.session = Session(self.config, put=self._put, instance=INSTANCE, version="1.2.3", drain_timeout_s=30.0)
        self.text = text or ByteText()
        if ready:
            self.session.set_text(self.text)
            self.session.on_events([ENGINE_HELLO, Snapshot("ready", {"state": "ready", "from": "snapshot"}, {"a": 1})], self.now)

    def _put(self, command: Command) -> bool:
        if self.inbox_full:
            return False
        self.commands.append(command)
        return True

    def send(self, message: Message | list[bytes], *bodies: bytes, peer: bytes = b"peer") -> None:
        frames = message if isinstance(message, list) else encode(message, *bodies)
        self.session.receive(peer, frames, self.now)
        self.settle()

    def generate(self, number: int = 1, body: bytes = b"abc", *, peer: bytes = b"peer", **fields: Any) -> bytes:
        fields = {"input": "text", "max_tokens": 5, **fields}
        self.send(Generate(request_id=request_id(number), **fields), body, peer=peer)
        return request_id(number)

    def settle(self) -> None:
        """Run text jobs and deliver what is to be sent."""
        for job in self.session.take_text_jobs():
            self.session.on_text(run_text_job(job, self.text, "2026-01-01"), self.now)
        for out in self.session.take_outgoing():
            message, bodies = decode_server(out.frames)
            self.received.append((out.peer, message, bodies))
            if self.deliver:
                self.session.on_sent(out)
            else:
                self.undelivered.append(out)

    def engine_takes(self) -> None:
        """Let the engine handle the commands that wait."""
        commands, self.commands = self.commands, []
        for command in commands:
            self.session.on_events(self.engine.handle(command), self.now)
        self.settle()

    def run(self, max_steps: int = 2000) -> None:
        """Let the engine work until it has nothing to do."""
        for _ in range(max_steps):
            self.engine_takes()
            events = self.engine.step()
            if not events and not self.commands:
                return
            self.session.on_events(events, self.now)
            self.settle()
        raise AssertionError("the engine does not come to rest")

    def take(self, peer: bytes = b"peer") -> list[tuple[ServerMessage, list[bytes]]]:
        mine = [(message, bodies) for who, message, bodies in self.received if who == peer]
        self.received = [each for each in self.received if each[0] != peer]
        return mine

    def take_messages(self, peer: bytes = b"peer") -> list[ServerMessage]:
        return [message for message, _ in self.take(peer)]


def text_of(received: list[tuple[ServerMessage, list[bytes]]], number: int = 1, choice: int = 0) -> str:
    """A choice's whole text: of the stream and of its tail."""
    pieces = [
        bodies[1].decode()
        for message, bodies in received
        if isinstance(message, Tokens) and message.request_id == request_id(number) and message.choice == choice
    ]
    for message, _ in received:
        if isinstance(message, Finished) and message.request_id == request_id(number):
            pieces.append(message.choices[choice].text_tail)
    return "".join(pieces)


def only_failed(received: list[ServerMessage]) -> Failed:
    (message,) = received
    assert isinstance(message, Failed), message
    return message
