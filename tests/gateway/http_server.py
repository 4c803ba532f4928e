"""The gateway's HTTP side in the test's own process: its connections, and a daemon that answers as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import uvicorn
from kvd_client.protocol.messages import HelloReply, Limits, Timings, TokenLogprob, Usage
from kvd_client.results import AdapterInfo, Choice, Chunk, Completion
from uvicorn.server import ServerState

from kvd.gateway.server import Connection


@contextlib.asynccontextmanager
async def listening(app: Any, *, keep_alive_s: float = 30.0) -> AsyncIterator[int]:
    """The app behind the gateway's connections; the port."""
    config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, timeout_keep_alive=keep_alive_s)
    config.load()
    state = ServerState()

    def connection() -> Connection:
        return Connection(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in list(state.connections):
            each.transport.abort()
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Daemon:
    """What a gateway sees of a daemon through its client. ``restart`` puts another in its place, as it is greeted by the client."""

    def __init__(self, model: str = "first") -> None:
        self.text = "x"
        self.before_answer: Callable[[], None] = lambda: None
        self.adapter_names: list[str] = []
        self.unusable: list[str] = []
        self.num_adapter_lists = 0
        self.asked_adapters: list[str] = []
        self.restart(model)

    def restart(self, model: str) -> None:
        limits = Limits(max_message_bytes=1 << 20, max_model_len=1000, max_choices=4, max_stop_strings=4, default_credit=64)
        self.server = HelloReply(
            instance=os.urandom(16), version="test", protocol=(1, 1), state="ready", limits=limits, model=model, fingerprint=model * 12
        )

    async def hello(self, *, timeout_s: float) -> HelloReply:
        assert timeout_s > 0
        return self.server

    async def detokenize(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(f"{self.server.model}{token_id}".encode() for token_id in token_ids)

    async def adapters(self, *, timeout_s: float) -> tuple[AdapterInfo, ...]:
        assert timeout_s > 0
        self.num_adapter_lists += 1
        return tuple(AdapterInfo(name, "unusable" if name in self.unusable else "on disk") for name in self.adapter_names)

    async def generate(self, _: Any, *, stream: bool, adapter: str = "", **options: Any) -> Any:
        self.asked_adapters.append(adapter)
        logprobs = (TokenLogprob(token_id=1, logprob=-0.5),) if "logprobs" in options else ()
        if stream:
            return Stream(self, Chunk(0, 0, (1,), self.text, logprobs))
        self.before_answer()
        return completion(self.text, logprobs)


class Stream:
    """One chunk at a time."""

    prompt = None

    def __init__(self, daemon: Daemon, *chunks: Chunk) -> None:
        self.completion = completion("x", ())
        self._daemon = daemon
        self._chunks = list(chunks)

    async def batch(self) -> list[Chunk]:
        self._daemon.before_answer()
        return [self._chunks.pop(0)] if self._chunks else []

    async def aclose(self) -> None:
        pass


def completion(text: str, logprobs: tuple[TokenLogprob, ...]) -> Completion:
    choice = Choice(0, text, (1,), "stop", logprobs)
    return Completion(b"", (choice,), Usage(prompt_tokens=1, completion_tokens=1), Timings(), 0)
