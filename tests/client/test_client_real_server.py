"""The clients against the daemon's own transport, with an engine that echoes prompts; and the daemon's restarts as clients see them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq.auth
from echo_server import EchoServer
from kvd_client import AsyncClient, Client, errors

pytestmark = pytest.mark.socket


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/kvd.sock"


@pytest.fixture
def client(endpoint: str) -> Iterator[Client]:
    with Client(endpoint, timeout_s=30.0) as client:
        yield client


def text_of(prompt: str, num_tokens: int) -> str:
    return (prompt * num_tokens)[:num_tokens]


def until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(4000):
        if condition():
            return
        waited.wait(0.005)
    raise AssertionError("it never came")


def test_every_call_of_the_client_is_understood(endpoint: str, client: Client) -> None:
    with EchoServer(endpoint) as server:
        assert client.wait_ready().instance == server.instance.hex()
        assert client.hello().limits.max_model_len == 4096
        assert client.generate("abc", max_tokens=7).text == "abcabca"
        assert client.generate([104, 105], max_tokens=4, stop=["ih"]).text == "h"
        assert client.chat([{"role": "user", "content": "x"}], max_tokens=7).text == "<user>x"
        with client.generate("abc", stream=True, max_tokens=1000, window_tokens=16) as stream:
            assert "".join(chunk.text for chunk in stream) == text_of("abc", 1000)
        assert stream.completion.usage.completion_tokens == 1000
        assert client.tokenize("hi") == (104, 105)
        assert client.pin("p", messages=[{"role": "system", "content": "s" * 40}]).details["tokens"] == 48
        client.unpin("p")
        assert client.prefixes()["what"] == "prefixes"
        assert client.status()["state"] == "ready"
        assert "transport" in client.stats()


@pytest.mark.parametrize(
    ("kind", "ask"),
    [
        (errors.BadRequest, lambda client: client.generate("x", temperature=-1.0)),
        (errors.BadRequest, lambda client: client.generate("")),
        (errors.PromptTooLong, lambda client: client.generate([1] * 5000)),
        (errors.PinTooShort, lambda client: client.pin("p", "short")),
        (errors.TooLarge, lambda client: client.generate("x" * 3000)),
        (errors.BadRequest, lambda client: client.generate([300])),
    ],
)
def test_refusals_of_the_daemon_are_typed(endpoint: str, client: Client, kind: type[errors.KvdError], ask: Callable[[Client], Any]) -> None:
    with EchoServer(endpoint, max_message_bytes=2048 if kind is errors.TooLarge else 1 << 20):
        with pytest.raises(kind) as caught:
            ask(client)
        assert not caught.value.retryable
        assert client.generate("ok", max_tokens=2).text == "ok"


MANY = [1] * 5000


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.generate("x", banned_token_ids=[1] * 4097, timeout_s=30),
        lambda client: client.generate("x", logit_bias=dict.fromkeys(range(4097), 1.0), timeout_s=30),
        lambda client: client.generate("x", allowed_token_ids=MANY, timeout_s=30),
        lambda client: client.generate("x", stop_token_ids=MANY, timeout_s=30),
        lambda client: client.generate("x", stop=["x"] * 5000, timeout_s=30),
        lambda client: client.generate("x", bad_words=["x"] * 5000, timeout_s=30),
        lambda client: client.generate("x", stream=True, bad_words=["x"] * 5000, timeout_s=30),
        lambda client: client.chat([{"role": "user", "content": "x"}], template_args={"a": MANY}, timeout_s=30),
        lambda client: client.chat([{"role": "user", "content": "x"}], template_args={"a": {1: 2}}, timeout_s=30),
        lambda client: client.pin("p", "x", template_args={"a": MANY}, timeout_s=30),
        lambda client: client.tokenize(messages=[{"role": "user", "content": "x"}], template_args={"a": MANY}, timeout_s=30),
        lambda client: client.unpin("x" * 70_000, timeout_s=30),
        lambda client: client.unpin("\ud800", timeout_s=30),
    ],
)
def test_what_the_daemon_could_not_read_is_refused_at_once(endpoint: str, client: Client, ask: Callable[[Client], Any]) -> None:
    with EchoServer(endpoint):
        with pytest.raises(errors.BadRequest):
            ask(client)
        assert client.generate("ok", max_tokens=2).text == "ok"


def test_what_the_daemon_could_not_read_is_refused_at_once_asynchronously(endpoint: str) -> None:
    async def ask() -> None:
        async with AsyncClient(endpoint, timeout_s=30) as client:
            with pytest.raises(errors.BadRequest, match="banned_token_ids has an array of 5000 items"):
                await client.generate("x", banned_token_ids=MANY)
            with pytest.raises(errors.BadRequest, match="template_args has"):
                await client.pin("p", "x", template_args={"a": MANY})

    with EchoServer(endpoint):
        asyncio.run(ask())


def test_a_restart_is_waited_through_and_a_begun_stream_is_not(endpoint: str, client: Client) -> None:
    with ThreadPoolExecutor() as pool:
        with EchoServer(endpoint, max_steps=3) as server:
            begun = client.generate("ab", stream=True, max_tokens=6)
            assert [next(begun).text for _ in range(3)] == ["a", "b", "a"]
            whole = pool.submit(client.generate, "ab", max_tokens=6)
            until(lambda: list(server.sent.values()) == [3, 3])
        with pytest.raises(errors.Interrupted):
            next(begun)
        with EchoServer(endpoint, state="starting") as server:
            until(lambda: client.ping().state == "starting")
            assert not whole.done()
            server.enter("ready")
            assert whole.result().text == "ababab"


def test_a_daemon_that_leaves_in_good_order_hands_its_requests_to_the_next(endpoint: str, client: Client) -> None:
    with ThreadPoolExecutor() as pool:
        server = EchoServer(endpoint, max_steps=2)
        waiting = [pool.submit(client.generate, "xyz", max_tokens=5) for _ in range(4)]
        until(lambda: list(server.sent.values()) == [2] * 4)
        server.leave()
        with EchoServer(endpoint):
            assert [call.result().text for call in waiting] == ["xyzxy"] * 4


def test_aborts_reach_the_engine(endpoint: str, client: Client) -> None:
    from kvd.commands import Abort

    with EchoServer(endpoint, max_steps=2) as server:
        stream = client.generate("ab", stream=True, max_tokens=100)
        next(stream)
        stream.close()
        until(lambda: any(isinstance(command, Abort) for command in server.commands))
        assert client.generate("ok", max_tokens=2).text == "ok"


def test_a_slow_reader_stalls_the_engine_for_its_own_stream_alone(endpoint: str, client: Client) -> None:
    with EchoServer(endpoint) as server:
        slow = client.generate("ab", stream=True, max_tokens=500, window_tokens=10)
        until(lambda: list(server.sent.values()) == [10])
        assert len(client.generate("cd", max_tokens=500).token_ids) == 500
        assert max(server.sent.values()) == 500
        assert min(server.sent.values()) == 10
        assert "".join(chunk.text for chunk in slow) == text_of("ab", 500)


def test_eight_threads_and_an_event_loop_at_once(endpoint: str, client: Client) -> None:
    def work(thread: int) -> None:
        for i in range(20):
            prompt = f"{thread}.{i};"
            assert client.generate(prompt, max_tokens=12).text == text_of(prompt, 12)
            with client.generate(prompt, stream=True, max_tokens=12, window_tokens=3) as stream:
                assert "".join(chunk.text for chunk in stream) == text_of(prompt, 12)

    async def work_async() -> None:
        async with AsyncClient(endpoint, timeout_s=30.0) as async_client:

            async def one(i: int) -> str:
                return "".join([chunk.text async for chunk in await async_client.generate(f"<{i}>", stream=True, max_tokens=9)])

            texts = await asyncio.gather(*(one(i) for i in range(50)))
            assert texts == [text_of(f"<{i}>", 9) for i in range(50)]

    with EchoServer(endpoint), ThreadPoolExecutor(9) as pool:
        jobs = [pool.submit(work, thread) for thread in range(8)]
        asyncio.run(work_async())
        for job in jobs:
            job.result()


def test_the_kill_of_many_daemons_loses_no_waiting_call(endpoint: str, client: Client) -> None:
    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(client.generate, f"{i:02}", max_tokens=40) for i in range(16)]
        for _ in range(3):
            with EchoServer(endpoint, max_steps=5) as server:
                until(lambda server=server: list(server.sent.values()) == [5] * 16)
        with EchoServer(endpoint):
            assert [call.result().text for call in calls] == [text_of(f"{i:02}", 40) for i in range(16)]


def test_curve_keys_as_the_daemon_wants_them(tmp_path: Path) -> None:
    for name in ("daemon", "friend", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    server_key, _ = zmq.auth.load_certificate(tmp_path / "daemon.key")
    friend, _ = zmq.auth.load_certificate(tmp_path / "friend.key")
    (tmp_path / "clients").write_text(friend.decode() + "\n")
    (tmp_path / "secret").write_text((tmp_path / "daemon.key_secret").read_text())
    (tmp_path / "secret").chmod(0o600)
    with EchoServer("tcp://127.0.0.1:0", curve_key_file=str(tmp_path / "secret"), curve_clients_file=str(tmp_path / "clients")) as server:
        with Client(server.url, timeout_s=30.0, server_key=server_key.decode(), client_key_file=tmp_path / "friend.key_secret") as client:
            assert client.generate("ok", max_tokens=2).text == "ok"
        with (
            Client(server.url, timeout_s=30.0, server_key=server_key.decode(), client_key_file=tmp_path / "stranger.key_secret") as client,
            pytest.raises(errors.AuthenticationFailed),
        ):
            client.status()
