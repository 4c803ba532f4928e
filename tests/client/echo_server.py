"""The daemon's own transport over a small engine that echoes prompts, one token a step, for client tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from kvd.commands import (
    Abort,
    ChoiceDone,
    Command,
    Event,
    FinishChoice,
    Grant,
    Hello,
    OpDone,
    PinPrefix,
    Query,
    RequestDone,
    RequestUsage,
    Snapshot,
    Stopped,
    Submit,
    TokensOut,
    Unpin,
)
from kvd.config import TransportConfig
from kvd.transport.inproc import InprocInbox, InprocOutbox
from kvd.transport.server import TransportServer
from kvd.types import pack_tokens, unpack_tokens

EOS = 256


class ByteText:
    """Ids 0 to 255 are ASCII, 256 ends a text."""

    vocab_size = 257
    eos_token_ids = (EOS,)
    digest = bytes(32)

    def fewest_tokens(self, text: bytes) -> int:
        return len(text)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        date: str,
        args: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        check_length: Callable[[int], None] | None = None,
    ) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def system_prefix(self, messages: list[dict[str, Any]], *, date: str, args: Mapping[str, Any]) -> list[int]:
        return self.encode_chat(messages, date=date, args=args)

    def detokenizer(self, prompt_ids: Sequence[int]) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    def push(self, token_ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in token_ids if token_id < EOS).decode("latin-1")

    def flush(self) -> str:
        return ""


class EchoServer:
    """``max_steps`` holds every stream after so many tokens, until it is raised."""

    def __init__(self, endpoint: str, *, state: str = "ready", max_steps: int = 1 << 30, **config: Any) -> None:
        self.max_steps = max_steps
        self.commands: list[Command] = []
        self.sent: dict[bytes, int] = {}
        self._requests: dict[bytes, tuple[Submit, list[int]]] = {}
        self._credit: dict[bytes, int] = {}
        self._inbox, self._outbox = InprocInbox(4096), InprocOutbox()
        self.failures: list[str] = []
        self.instance = os.urandom(16)
        self._server = TransportServer(
            TransportConfig(listen=(endpoint,), **config),
            load_text=ByteText,
            inbox=self._inbox,
            outbox=self._outbox,
            instance=self.instance,
            drain_timeout_s=1.0,
            on_failure=self.failures.append,
        )
        self.url = self._server.bind()[0]
        self._outbox.put([Hello(self.instance, "echo", bytes(32), 257, 4096, 16, 4)])
        self.enter(state)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._server.start()
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def enter(self, state: str) -> None:
        self._outbox.put([Snapshot(state, {"state": state}, {"steps": 0}, 0.1)])

    def die(self) -> None:
        """End without a word to anybody."""
        self._end()
        assert self._server.stop(15)

    def leave(self) -> None:
        """End as after a drain."""
        self._end()
        self._outbox.put([Stopped()])
        assert self._server.join(60)

    def _end(self) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.failures

    def _run(self) -> None:
        while not self._stop.is_set():
            if not any(self._can_step(request_id) for request_id in self._requests):
                self._inbox.wait(0.005)
            for command in self._inbox.drain():
                self.commands.append(command)
                self._outbox.put(self._handle(command))
            for request_id in [each for each in self._requests if self._can_step(each)]:
                self._outbox.put(self._step(request_id))

    def _can_step(self, request_id: bytes) -> bool:
        return self._credit[request_id] > 0 and self.sent[request_id] < self.max_steps

    def _handle(self, command: Command) -> list[Event]:
        match command:
            case Submit():
                self._requests[command.request_id] = (command, list(unpack_tokens(command.token_ids)))
                self._credit[command.request_id] = command.credit_tokens
                self.sent[command.request_id] = 0
            case Grant():
                self._credit[command.request_id] += command.num_tokens
            case Abort(request_id):
                return self._done(request_id, "aborted")
            case FinishChoice(request_id):
                return self._done(request_id, "stop")
            case Query():
                return [OpDone(command.op_id, {"state": "ready", "what": command.what})]
            case PinPrefix():
                return [OpDone(command.op_id, {"name": command.recipe.name, "tokens": len(command.recipe.token_ids) // 4})]
            case Unpin():
                return [OpDone(command.op_id, {"name": command.name})]
        return []

    def _step(self, request_id: bytes) -> list[Event]:
        command, prompt = self._requests[request_id]
        position = self.sent[request_id]
        self.sent[request_id] += 1
        self._credit[request_id] -= 1
        events: list[Event] = [TokensOut(request_id, 0, position, pack_tokens([prompt[position % len(prompt)]]))]
        return events + self._done(request_id, "length") if position + 1 == command.max_tokens else events

    def _done(self, request_id: bytes, reason: str) -> list[Event]:
        if self._requests.pop(request_id, None) is None:
            return []
        return [ChoiceDone(request_id, 0, reason), RequestDone(request_id, RequestUsage(prompt_tokens=1))]
