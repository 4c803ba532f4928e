"""Stand-ins on both sides of the edge: a byte-level text model and an engine that echoes its prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvd.commands import (
    Abort,
    CheckpointNow,
    ChoiceDone,
    Command,
    Drain,
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
from kvd.text.errors import ChatTemplateError
from kvd.transport.inproc import InprocInbox, InprocOutbox
from kvd.types import TokenLogprobs, pack_tokens, unpack_tokens

EOS = 256
INSTANCE = b"instance-of-test"
ENGINE_HELLO = Hello(
    instance=INSTANCE, model="echo", fingerprint=bytes(32), vocab_size=257, max_model_len=512, block_size_tokens=16, max_choices=4
)


class ByteDetokenizer:
    def __init__(self) -> None:
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        data = self._held + bytes(token for token in token_ids if token < EOS)
        for cut in range(4):
            try:
                text = data[: len(data) - cut].decode()
            except UnicodeDecodeError:
                continue
            self._held = data[len(data) - cut :]
            return text
        self._held = b""
        return data.decode(errors="replace")

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class ByteText:
    """Ids 0 to 255 are bytes, 256 ends a text."""

    vocab_size = 257
    eos_token_ids = (EOS,)
    digest = bytes(range(32))

    def fewest_tokens(self, text: bytes) -> int:
        return len(text)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_inside(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        date: str,
        args: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        check_length: Callable[[int], None] | None = None,
    ) -> list[int]:
        if "explode" in args:
            raise ChatTemplateError("template exploded")
        names = "".join(f"<tool>{tool['name']}" for tool in tools)
        text = names + self._render(messages) + "<assistant>"
        if check_length is not None:
            check_length(self.fewest_tokens(text.encode()))
        return self.encode(text)

    def system_prefix(self, messages: list[dict[str, Any]], *, date: str, args: Mapping[str, Any]) -> list[int]:
        return self.encode(self._render(messages))

    @staticmethod
    def _render(messages: list[dict[str, Any]]) -> str:
        try:
            return "".join(f"<{message['role']}>{message['content']}" for message in messages)
        except KeyError as error:
            raise ChatTemplateError(f"a message has no {error}") from error

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return [bytes([token]) if token < EOS else b"" for token in token_ids]

    def detokenizer(self, prompt_ids: Sequence[int]) -> ByteDetokenizer:
        return ByteDetokenizer()


class EchoEngine:
    """Answers each request with its own prompt, over and over, one token a step, within credit. Deterministic; driven by ``step``."""

    def __init__(self) -> None:
        self._requests: dict[bytes, dict[str, Any]] = {}
        self.commands: list[Command] = []
        self.silent = False

    def handle(self, command: Command) -> list[Event]:
        self.commands.append(command)
        match command:
            case Submit():
                prompt = unpack_tokens(command.token_ids)
                self._requests[command.request_id] = {
                    "command": command,
                    "prompt": prompt,
                    "credit": command.credit_tokens,
                    "open": dict.fromkeys(range(command.num_choices), 0),
                }
            case Grant() if command.request_id in self._requests:
                self._requests[command.request_id]["credit"] += command.num_tokens
            case Abort():
                request = self._requests.pop(command.request_id, None)
                if request is not None:
                    done: list[Event] = [ChoiceDone(command.request_id, choice, "aborted") for choice in request["open"]]
                    return [*done, self._done(request)]
            case FinishChoice() if command.request_id in self._requests:
                request = self._requests[command.request_id]
                if request["open"].pop(command.choice, None) is not None:
                    return [ChoiceDone(command.request_id, command.choice, "stop"), *self._close(request)]
            case PinPrefix():
                return [OpDone(command.op_id, {"name": command.recipe.name, "tokens": len(command.recipe.token_ids) // 4})]
            case Unpin() | CheckpointNow():
                return [OpDone(command.op_id, {"ok": True})]
            case Query() if not self.silent:
                return [OpDone(command.op_id, {"state": "ready", "what": command.what})]
            case Drain():
                return [OpDone(command.op_id, {"state": "draining", "timeout_s": command.timeout_s})]
        return []

    def step(self) -> list[Event]:
        events: list[Event] = []
        for request in list(self._requests.values()):
            command, prompt = request["command"], request["prompt"]
            for choice, position in list(request["open"].items()):
                if request["credit"] <= 0:
                    break
                request["credit"] -= 1
                token = prompt[position % len(prompt)]
                logprobs = None
                if command.sampling.num_logprobs is not None:
                    logprobs = (TokenLogprobs(token, -0.5, ((token, -0.5),) * command.sampling.num_logprobs),)
                events.append(TokensOut(command.request_id, choice, position, pack_tokens([token]), logprobs))
                request["open"][choice] = position + 1
                if token in command.stop_token_ids or position + 1 == command.max_tokens:
                    del request["open"][choice]
                    events.append(ChoiceDone(command.request_id, choice, "stop" if token in command.stop_token_ids else "length"))
            events += self._close(request)
        return events

    @property
    def has_work(self) -> bool:
        return any(request["credit"] > 0 for request in self._requests.values())

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def _close(self, request: dict[str, Any]) -> list[Event]:
        if request["open"]:
            return []
        self._requests.pop(request["command"].request_id, None)
        return [self._done(request)]

    def _done(self, request: dict[str, Any]) -> RequestDone:
        return RequestDone(request["command"].request_id, RequestUsage(prompt_tokens=len(request["prompt"]), cached_tokens=3, queue_ms=1.0))


class EngineThread:
    """An EchoEngine behind an inbox and an outbox."""

    def __init__(self, inbox: InprocInbox, outbox: InprocOutbox, *, state: str = "ready") -> None:
        self.engine = EchoEngine()
        self._inbox, self._outbox = inbox, outbox
        self._ending = threading.Event()
        self.set_state(state)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set_state(self, state: str) -> None:
        status = {"state": state, "from": "snapshot"}
        self._outbox.put([ENGINE_HELLO, Snapshot(state, status, {"uptime_s": 1.0}, 7.0)])

    def _run(self) -> None:
        while not self._ending.is_set():
            for command in self._inbox.drain():
                self._outbox.put(self.engine.handle(command))
            events = self.engine.step()
            if events:
                self._outbox.put(events)
            else:
                self._inbox.wait(0.02)

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()
        self._outbox.put([Stopped()])
