"""A daemon for client tests: a real ROUTER socket that speaks the protocol and answers as a script says.

The script is a function from a client's message to the answers; it runs on the daemon's thread. ``seen`` holds what came.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

import zmq
from kvd_client.protocol import codec
from kvd_client.protocol.messages import ChoiceEnd, Finished, Generate, Hello, HelloReply, Limits, Ping, Pong, Timings, Tokens, Usage
from kvd_client.results import pack_tokens

Answer = tuple[Any, ...]
"""A message and its bodies."""

Script = Callable[["ScriptedDaemon", Any, list[bytes]], Iterable[Answer]]

WAIT_S = 60.0


class ScriptedDaemon:
    def __init__(
        self, endpoint: str, script: Script, *, state: str = "ready", instance: bytes | None = None, **socket_options: Any
    ) -> None:
        self.endpoint = endpoint
        self.state = state
        self.instance = instance or os.urandom(16)
        self.seen: list[Any] = []
        self._changed = threading.Condition()
        self._script = script
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 500
        self._socket.sndhwm = 0  # a ROUTER drops beyond it without a word
        for name, value in socket_options.items():
            self._socket.setsockopt(getattr(zmq, name), value)
        self._socket.bind(endpoint)
        self.identities: set[bytes] = set()
        self._say: list[tuple[bytes, Answer]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Close the socket, as the kernel does for a killed process."""
        self._stop.set()
        self._thread.join()

    def say(self, *answer: Any) -> None:
        """Send a message to the only client, unasked."""
        (identity,) = self.identities
        self._say.append((identity, answer))

    def wait_for(self, wanted: Callable[[list[Any]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: wanted(self.seen), WAIT_S), self.seen

    def wait_for_kind(self, kind: type, count: int = 1) -> list[Any]:
        self.wait_for(lambda seen: sum(isinstance(message, kind) for message in seen) >= count)
        return [message for message in self.seen if isinstance(message, kind)]

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(5):
                identity, *frames = self._socket.recv_multipart()
                message, bodies = codec.decode_client(frames)
                self.identities.add(identity)
                for answer in self._answers(message, bodies):
                    self._send(identity, answer)
                with self._changed:
                    self.seen.append(message)
                    self._changed.notify_all()
            while self._say:
                self._send(*self._say.pop(0))
        self._socket.close()
        self._context.term()

    def _answers(self, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        if isinstance(message, Hello):
            limits = Limits(max_message_bytes=1 << 20, max_model_len=1000, max_choices=4, max_stop_strings=4, default_credit=64)
            reply = HelloReply(instance=self.instance, version="test", protocol=(1, 1), state=self.state, limits=limits, model="m")
            return [(reply,)]
        if isinstance(message, Ping):
            return [(Pong(nonce=message.nonce, instance=self.instance, state=self.state),)]
        return self._script(self, message, bodies)

    def _send(self, identity: bytes, answer: Answer) -> None:
        message, *bodies = answer
        self._socket.send_multipart([identity, *codec.encode(message, *bodies)])


def tokens(request_id: bytes, first_index: int, *token_ids: int, choice: int = 0) -> Answer:
    text = "".join(f" t{token_id}" for token_id in token_ids)
    return (Tokens(request_id=request_id, choice=choice, first_index=first_index), pack_tokens(token_ids), text.encode())


def finished(request_id: bytes, *counts: int, tail: str = "", reason: str = "length") -> Answer:
    ends = tuple(ChoiceEnd(choice=i, finish_reason=reason, num_tokens=count, text_tail=tail) for i, count in enumerate(counts))
    return (Finished(request_id=request_id, choices=ends, usage=Usage(prompt_tokens=2), timings=Timings(total_ms=3.0), seed=9),)


def echo(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
    """Answers each generation with as many tokens as its prompt has bytes: their values."""
    if isinstance(message, Generate):
        for i, value in enumerate(bodies[0]):
            yield tokens(message.request_id, i, value)
        yield finished(message.request_id, len(bodies[0]), tail=".")


def mute(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
    return []


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
