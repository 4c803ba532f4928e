"""What the gateway answers when the daemon is replaced, when bodies are large, and when a client does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from http_server import Daemon, Stream, listening
from kvd_client.results import Chunk

from kvd.gateway import app as gateway_app
from kvd.gateway.answers import CompletionForm, Head, Pieces
from kvd.gateway.app import Gateway, Limits, Streaming
from kvd.gateway.token_texts import TokenTexts

pytestmark = pytest.mark.socket

LIMITS = Limits(max_requests=100, max_body_bytes=1000, request_timeout_s=60.0)


def make(daemon: Daemon, *names: str, limits: Limits = LIMITS) -> Any:
    return Gateway(daemon, served_names=names, api_keys=(), limits=limits).app()


class Exchange:
    """One request, without a socket."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sent: list[dict[str, Any]] = []
        self._is_begun = False
        self.wants_more = asyncio.Event()
        """More of the body was asked for: what came before has been taken."""

    def give(self, body: bytes, *, more: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def run(self) -> tuple[int, bytes]:
        async def send(message: dict[str, Any]) -> None:
            self._sent.append(message)

        async def receive() -> dict[str, Any]:
            if self._is_begun:
                self.wants_more.set()
            self._is_begun = True
            return await self._incoming.get()

        path = "/v1/completions"
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers, "state": {"abort": lambda: None}}
        await self._app(scope, receive, send)
        return self._sent[0]["status"], b"".join(message["body"] for message in self._sent[1:])


async def ask(app: Any, **fields: Any) -> tuple[int, Any]:
    exchange = Exchange(app)
    exchange.give(json.dumps({"prompt": "x", **fields}).encode(), more=False)
    status, body = await exchange.run()
    return status, body if fields.get("stream") and status == 200 else json.loads(body)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_another_model_after_a_restart_has_its_own_name_fingerprint_and_texts():
    async def test() -> None:
        daemon = Daemon("first")
        own_name, alias = make(daemon), make(daemon, "alias")
        for app, name in ((own_name, "first"), (alias, "alias")):
            status, answer = await ask(app, model=name, logprobs=0)
            assert (status, answer["model"], answer["choices"][0]["logprobs"]["tokens"]) == (200, name, ["first1"])
        daemon.restart("second")
        status, refusal = await ask(own_name, model="first")
        assert (status, refusal["error"]["code"]) == (404, "model_not_found")
        status, changed = await ask(alias, model="alias", logprobs=0)
        assert (status, changed["choices"][0]["logprobs"]["tokens"]) == (200, ["second1"])
        assert changed["system_fingerprint"] != answer["system_fingerprint"]

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["first", "second"])
def test_a_request_that_a_restarted_daemon_answers_is_of_the_same_model_or_fails(stream: bool, model: str):
    async def test() -> None:
        daemon = Daemon("first")
        app = make(daemon, "alias")
        daemon.before_answer = lambda: daemon.restart(model)
        status, answer = await ask(app, logprobs=0, stream=stream)
        assert status == (200 if model == "first" else 503)
        if model == "second":
            assert (answer["error"]["code"], "another model" in answer["error"]["message"]) == ("interrupted", True)

    run(test())


def test_all_bodies_together_are_bounded():
    async def test() -> None:
        app = make(Daemon())
        slow = [Exchange(app) for _ in range(8)]
        tasks = [asyncio.ensure_future(each.run()) for each in slow]
        for each in slow:
            each.give(b" " * 990, more=True)
        for each in slow:
            await each.wants_more.wait()
        status, answer = await ask(app, user="y" * 200)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        for each in slow:
            each.give(b"{", more=False)
        assert {status for status, _ in await asyncio.gather(*tasks)} == {400}
        assert (await ask(app, user="y" * 200))[0] == 200

    run(test())


def test_no_prompts_pieces_overtake_the_status():
    """A client that has not read its earlier answers holds up the first message of this one."""

    async def test() -> None:
        may_begin = asyncio.Event()
        sent: list[str] = []

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                await may_begin.wait()
            sent.append(message["type"])

        async def check(_chunks: Any, _prompt: Any) -> None:
            pass

        daemon = Daemon()
        form = CompletionForm(TokenTexts(daemon), logprobs=False, num_choices=1)
        pieces = Pieces(form, Head(id="x", model="m", fingerprint="f"), with_usage=False)
        streams = [Stream(daemon, Chunk(0, 0, (1,), "x"), Chunk(0, 1, (1,), "y")) for _ in range(3)]
        answer = asyncio.ensure_future(Streaming(streams, pieces, 1, check, send).run())
        await asyncio.sleep(0.05)
        assert sent == []
        may_begin.set()
        await answer
        assert sent == ["http.response.start"] + ["http.response.body"] * 7

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_gives_its_place_up_and_loses_its_connection(stream: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gateway_app, "_LATE_S", 0.2)

    async def test() -> None:
        daemon = Daemon()
        app = make(daemon, limits=Limits(max_requests=1, max_body_bytes=1000, request_timeout_s=0.5))
        daemon.text = "x" * (32 << 20)  # more than the kernel's buffers take
        body = json.dumps({"prompt": "x", "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        async with listening(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + body)
            assert (await reader.readline()).split()[1] == b"200"
            daemon.text = "x"
            assert (await ask(app))[0] == 429
            end_s = asyncio.get_running_loop().time() + 20
            while (await ask(app))[0] != 200:
                assert asyncio.get_running_loop().time() < end_s
                await asyncio.sleep(0.05)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(32 << 20)
            writer.close()

    run(test())
