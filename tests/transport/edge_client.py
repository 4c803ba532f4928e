"""A bare DEALER that speaks the protocol, for tests of the server."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import zmq
from kvd_client.protocol.codec import decode_server, encode
from kvd_client.protocol.messages import Finished, Generate, Message, ServerMessage, Tokens

_numbers = itertools.count(1)


class RawClient:
    def __init__(self, url: str, *, identity: bytes | None = None, **options: Any) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.ROUTING_ID, identity or b"T" + os.urandom(15))
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(url)

    def send(self, message: Message | list[bytes], *bodies: bytes) -> None:
        self.socket.send_multipart(message if isinstance(message, list) else encode(message, *bodies))

    def receive(self, timeout_s: float = 60.0) -> tuple[ServerMessage, list[bytes]]:
        if not self.socket.poll(int(timeout_s * 1000)):
            raise TimeoutError("nothing came")
        return decode_server(self.socket.recv_multipart())

    def ask(self, message: Message | list[bytes], *bodies: bytes, timeout_s: float = 60.0) -> tuple[ServerMessage, list[bytes]]:
        self.send(message, *bodies)
        return self.receive(timeout_s)

    def is_quiet(self, for_s: float = 0.3) -> bool:
        return not self.socket.poll(int(for_s * 1000))

    def generate(self, body: bytes = b"abc", **fields: Any) -> tuple[str, Finished]:
        """A request from beginning to end: the text of its first choice and its terminal message."""
        request_id = next(_numbers).to_bytes(8, "big") + os.urandom(8)
        self.send(Generate(**{"request_id": request_id, "input": "text", "max_tokens": 5, **fields}), body)
        return self.finish(request_id)

    def finish(self, request_id: bytes) -> tuple[str, Finished]:
        text = ""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            message, bodies = self.receive()
            if getattr(message, "request_id", None) != request_id:
                continue
            if isinstance(message, Tokens):
                text += bodies[1].decode() if message.choice == 0 else ""
            else:
                assert isinstance(message, Finished), message
                return text + message.choices[0].text_tail, message
        raise TimeoutError("no terminal message")

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()
