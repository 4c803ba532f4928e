"""A client's session with a fake clock and no socket: every frame is handed in and read back by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

from kvd_client import operations
from kvd_client.calls import Answer, Call
from kvd_client.protocol import codec
from kvd_client.protocol.messages import ChoiceEnd, Finished, Hello, HelloReply, Limits, Timings, Tokens, Usage
from kvd_client.requests import GenerateOptions, generate_message
from kvd_client.results import pack_tokens
from kvd_client.session import SETTLE_S, Session
from kvd_client.session_config import SessionConfig

LIMITS = Limits(max_message_bytes=1000, max_model_len=100, max_choices=4, max_stop_strings=4, default_credit=8)
ONE, TWO = b"1" * 16, b"2" * 16


class Bench:
    """A session, its clock, and the daemon's side of its wire."""

    def __init__(self, **config: Any) -> None:
        ids = itertools.count(1)
        self.session = Session(SessionConfig(**config), new_id=lambda: next(ids).to_bytes(16, "big"))
        self.now = 100.0

    def connect(self, instance: bytes = ONE, state: str = "ready") -> list[Any]:
        """Connect and greet; what was sent after the hello."""
        self.session.connected(self.now)
        assert [type(message) for message in self.sent()] == [Hello]
        self.receive(hello_reply(instance, state))
        return self.sent()

    def lose(self) -> None:
        self.session.disconnected(self.now)
        self.pass_time(SETTLE_S)

    def sent(self) -> list[Any]:
        messages = [codec.decode_client(frames)[0] for frames in self.session.outgoing]
        self.session.outgoing.clear()
        return messages

    def receive(self, message: Any, *bodies: bytes) -> None:
        self.session.receive(codec.encode(message, *bodies), self.now)

    def pass_time(self, seconds: float) -> None:
        """Step from timer to timer, as a driver does."""
        end = self.now + seconds
        while (due := self.session.next_tick_at()) is not None and due <= end:
            self.now = max(due, self.now)
            self.session.tick(self.now)
        self.now = end

    def generate(self, *, stream: bool = False, timeout_s: float = math.inf, **options: Any) -> tuple[Call, list[Any]]:
        message = generate_message("text", stream=stream, options=GenerateOptions(**options))
        deliveries: list[Any] = []
        call = Call(message, b"hi", deliver=deliveries.append, timeout_s=timeout_s, answer=Answer(message.n, stream=stream))
        self.session.open(call, self.now)
        return call, deliveries

    def operate(self, operation: operations.Operation, timeout_s: float = math.inf) -> list[Any]:
        deliveries: list[Any] = []
        call = operation.call(deliveries.append)
        call.timeout_s = timeout_s
        self.session.open(call, self.now)
        return deliveries

    def tokens(self, request_id: bytes, token_ids: list[int], first_index: int, text: str = "", choice: int = 0) -> None:
        self.receive(Tokens(request_id=request_id, choice=choice, first_index=first_index), pack_tokens(token_ids), text.encode())


def hello_reply(instance: bytes = ONE, state: str = "ready", protocol: tuple[int, int] = (1, 1)) -> HelloReply:
    return HelloReply(instance=instance, version="0", protocol=protocol, state=state, limits=LIMITS)


def finished(request_id: bytes, *counts: int, tail: str = "", reason: str = "stop") -> Finished:
    ends = tuple(ChoiceEnd(choice=i, finish_reason=reason, num_tokens=count, text_tail=tail) for i, count in enumerate(counts))
    return Finished(request_id=request_id, choices=ends, usage=Usage(prompt_tokens=3), timings=Timings(ttft_ms=1.5), seed=7)
