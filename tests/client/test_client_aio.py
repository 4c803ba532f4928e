"""The asyncio client against a scripted daemon on a real ROUTER socket."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from kvd_client import AsyncClient, errors
from kvd_client.aio import AsyncStream
from kvd_client.protocol import codec
from kvd_client.protocol.messages import (
    Abort,
    Checkpoint,
    Credit,
    Detokenize,
    Drain,
    Failed,
    Forget,
    Generate,
    Pin,
    Prefixes,
    Result,
    Stats,
    Status,
    Tokenize,
    Unpin,
)
from kvd_client.results import ForgetResult, pack_tokens
from scripted_daemon import WAIT_S, Answer, ScriptedDaemon, echo, finished, mute, tokens, wait_until

pytestmark = pytest.mark.socket


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def run(endpoint: str, test: Callable[[AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with AsyncClient(endpoint, **{"timeout_s": 20.0, **options}) as client:
            await test(client)

    asyncio.run(main())


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


def begin(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
    if isinstance(message, Generate):
        yield tokens(message.request_id, 0, 1)


def test_async_whole_and_streamed_answers(endpoint: str) -> None:
    async def test(client: AsyncClient) -> None:
        whole = await client.generate("abc")
        assert (whole.text, whole.token_ids) == (" t97 t98 t99.", (97, 98, 99))
        assert (whole.usage.drafted_tokens, whole.usage.accepted_tokens) == (0, 0), "plain numbers, where nothing was told"
        assert (whole.choices[0].cumulative_logprob, whole.choices[0].score) == (None, None)
        with pytest.raises(errors.BadRequest, match="allowed_token_ids is empty"):
            await client.generate("abc", allowed_token_ids=[])
        async with await client.chat([{"role": "user", "content": "x"}], stream=True) as stream:
            text = "".join([chunk.text async for chunk in stream])
        assert stream.completion.text == text
        assert [chunk async for chunk in stream] == []

    with ScriptedDaemon(endpoint, echo):
        run(endpoint, test)


def test_a_batch_is_what_has_come_and_nothing_is_lost(endpoint: str) -> None:
    def many(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        if isinstance(message, Generate):
            yield tokens(message.request_id, 0, 1, 2, 3)
            yield tokens(message.request_id, 3, 4)
            if bodies[0] == b"fail":
                yield (Failed(code="internal", message="no", request_id=message.request_id),)
            else:
                yield finished(message.request_id, 4)

    async def test(client: AsyncClient) -> None:
        async def has_come(stream: AsyncStream, num_deliveries: int) -> None:
            end = asyncio.get_running_loop().time() + WAIT_S
            while stream._deliveries.qsize() < num_deliveries:
                assert asyncio.get_running_loop().time() < end
                await asyncio.sleep(0.01)

        stream = await client.generate("x", stream=True)
        await has_come(stream, 3)
        batches = []
        while batch := await stream.batch():
            batches.append(batch)
        assert len(batches) == 1  # it had all come
        assert [token for chunk in batches[0] for token in chunk.token_ids] == [1, 2, 3, 4]
        assert stream.completion.token_ids == (1, 2, 3, 4)
        assert await stream.batch() == []
        failing = await client.generate("fail", stream=True)
        await has_come(failing, 3)
        assert [token for chunk in await failing.batch() for token in chunk.token_ids] == [1, 2, 3, 4]
        with pytest.raises(errors.InternalError):
            await failing.batch()
        assert await failing.batch() == []

    with ScriptedDaemon(endpoint, many):
        run(endpoint, test)


def test_async_operations(endpoint: str) -> None:
    results: dict[type, tuple[Any, ...]] = {
        Pin: ({"tokens": 32},),
        Unpin: ({},),
        Forget: ({"blocks": 3, "pins": 1},),
        Prefixes: ({"pins": []},),
        Status: ({"state": "ready"},),
        Stats: ({"evictions": 1},),
        Checkpoint: ({"blocks": 3, "bytes": 99},),
        Drain: ({},),
        Tokenize: ({"count": 2}, pack_tokens([4, 5])),
        Detokenize: ({"count": 2}, codec.pack_body([b"Gr", b"\xc3"])),
    }

    def answer(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        data, *more = results[type(message)]
        yield (Result(op_id=message.op_id), codec.pack_body(data), *more)

    async def test(client: AsyncClient) -> None:
        assert (await client.pin("p", "text", cache_salt=b"t")).details == {"tokens": 32}
        await client.unpin("p")
        assert await client.forget("text", cache_salt="n\u00e4cht") == ForgetResult(3, 1)
        assert await client.forget(messages=[{"role": "system", "content": "x"}], tenant="acme") == ForgetResult(3, 1)
        assert await client.forget(everything=True) == ForgetResult(3, 1)
        for arguments in ({}, {"messages": None}, {"tenant": "acme"}, {"everything": True, "messages": []}):
            with pytest.raises(TypeError, match="everything=True"):
                await client.forget(**arguments)
        assert await client.prefixes() == {"pins": []}
        assert await client.status() == {"state": "ready"}
        assert await client.stats() == {"evictions": 1}
        assert (await client.checkpoint()).num_bytes == 99
        assert await client.tokenize(messages=[{"role": "user", "content": "x"}]) == (4, 5)
        assert await client.detokenize([4, 5]) == (b"Gr", b"\xc3")
        await client.drain()
        assert (await client.ping()).state == "ready"
        assert (await client.hello()).version == "test"
        assert (await client.wait_ready()).state == "ready"

    with ScriptedDaemon(endpoint, answer) as daemon:
        run(endpoint, test)
        assert daemon.wait_for_kind(Pin)[0].cache_salt == b"t"
        first, second = daemon.wait_for_kind(Forget, 2)[:2]
    assert (first.input, first.cache_salt, first.tenant) == ("text", "nächt".encode(), None)
    assert (second.input, second.cache_salt, second.tenant) == ("messages", None, "acme")


def test_a_hundred_tasks_side_by_side(endpoint: str) -> None:
    async def test(client: AsyncClient) -> None:
        async def one(i: int) -> None:
            prompt = f"task {i}"
            if i % 2:
                assert (await client.generate(prompt)).token_ids == tuple(prompt.encode())
            else:
                stream = await client.generate(prompt, stream=True, window_tokens=2)
                assert tuple([token async for chunk in stream for token in chunk.token_ids]) == tuple(prompt.encode())

        await asyncio.gather(*(one(i) for i in range(100)))

    with ScriptedDaemon(endpoint, echo):
        run(endpoint, test)


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_the_task_aborts_the_request(endpoint: str, stream: bool) -> None:
    async def test(client: AsyncClient) -> None:
        async def ask() -> None:
            if stream:
                async for _ in await client.generate("x", stream=True):
                    pass
            else:
                await client.generate("x")

        task = asyncio.create_task(ask())
        (asked,) = await in_thread(daemon.wait_for_kind, Generate)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await in_thread(daemon.wait_for_kind, Abort) == [Abort(request_id=asked.request_id)]

    with ScriptedDaemon(endpoint, begin) as daemon:
        run(endpoint, test)


def test_wait_for_aborts_the_request(endpoint: str) -> None:
    async def test(client: AsyncClient) -> None:
        await client.wait_ready()  # else it might be over before it was sent, and there were nothing to abort
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate("x"), 1.0)
        await in_thread(daemon.wait_for_kind, Abort)

    with ScriptedDaemon(endpoint, mute) as daemon:
        run(endpoint, test)


@pytest.mark.parametrize("how", ["aclose", "drop", "with"])
def test_leaving_an_async_stream_aborts(endpoint: str, how: str) -> None:
    async def test(client: AsyncClient) -> None:
        stream = await client.generate("x", stream=True)
        await anext(stream)
        if how == "aclose":
            await stream.aclose()
            assert [chunk async for chunk in stream] == []
        elif how == "with":
            async with stream:
                pass
        else:
            del stream
            gc.collect()
        await in_thread(daemon.wait_for_kind, Abort)

    with ScriptedDaemon(endpoint, begin) as daemon:
        run(endpoint, test)


def test_async_closing_a_stream_frees_a_reader_that_waits(endpoint: str) -> None:
    async def test(client: AsyncClient) -> None:
        stream = await client.generate("a", stream=True)
        reader = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        await stream.aclose()
        with pytest.raises(errors.ClientClosed):
            await reader

    with ScriptedDaemon(endpoint, mute):
        run(endpoint, test)


def test_async_slow_reader_is_metered(endpoint: str) -> None:
    granted: list[int] = []

    def metered(daemon: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        granted.append(message.credit if isinstance(message, Generate) else message.num_tokens)
        for i in range(sum(granted) - granted[-1], min(sum(granted), 50)):
            yield tokens(message.request_id, i, 1)
        if sum(granted) - granted[-1] < 50 <= sum(granted):
            yield finished(message.request_id, 50)

    async def test(client: AsyncClient) -> None:
        stream = await client.generate("a", stream=True, window_tokens=10)
        await in_thread(daemon.wait_for_kind, Generate)
        for _ in range(4):
            await anext(stream)
        assert granted == [10]
        await anext(stream)
        await in_thread(daemon.wait_for_kind, Credit)
        assert granted == [10, 5]
        assert len([chunk async for chunk in stream]) == 46

    with ScriptedDaemon(endpoint, metered) as daemon:
        run(endpoint, test)


def test_async_restart(endpoint: str) -> None:
    async def test(client: AsyncClient) -> None:
        with ScriptedDaemon(endpoint, begin) as daemon:
            begun = await client.generate("a", stream=True)
            await anext(begun)
            waiting = asyncio.create_task(client.generate("ab"))
            await in_thread(daemon.wait_for_kind, Generate, 2)
        with pytest.raises(errors.Interrupted):
            await anext(begun)
        with ScriptedDaemon(endpoint, echo):
            assert (await waiting).token_ids == (97, 98)

    run(endpoint, test)


def test_async_the_greeting_of_a_restarted_daemon_needs_no_call(endpoint: str) -> None:
    async def test(client: AsyncClient) -> None:
        with ScriptedDaemon(endpoint, mute) as daemon:
            await client.wait_ready()
            assert client.server.instance == daemon.instance
        with ScriptedDaemon(endpoint, mute) as daemon:
            await in_thread(wait_until, lambda: client.server.instance == daemon.instance)

    run(endpoint, test)


def test_async_errors_and_timeouts(endpoint: str) -> None:
    def refuse(_: ScriptedDaemon, message: Any, bodies: list[bytes]) -> Iterable[Answer]:
        if isinstance(message, Generate):
            yield (Failed(request_id=message.request_id, code="overloaded", message="full", retryable=True, retry_after_s=1.5),)

    async def test(client: AsyncClient) -> None:
        with pytest.raises(errors.Overloaded) as caught:
            await client.generate("x")
        assert (caught.value.retryable, caught.value.retry_after_s) == (True, 1.5)
        with pytest.raises(errors.Timeout):
            await client.status(timeout_s=0.05)
        with pytest.raises(errors.Overloaded):
            await anext(await client.generate("x", stream=True))

    with ScriptedDaemon(endpoint, refuse):
        run(endpoint, test)


def test_closing_ends_every_waiting_task(endpoint: str) -> None:
    async def main() -> None:
        client = AsyncClient(endpoint)
        tasks = [asyncio.create_task(client.generate("x")) for _ in range(3)]
        await in_thread(daemon.wait_for_kind, Generate, 3)
        await client.aclose()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [errors.ClientClosed] * 3
        with pytest.raises(errors.ClientClosed):
            await client.status()

    with ScriptedDaemon(endpoint, mute) as daemon:
        asyncio.run(main())


def test_a_loop_that_ended_does_not_harm_the_client(endpoint: str) -> None:
    """A client outlives the loops that used it; late answers to a closed loop fall on the floor."""
    with ScriptedDaemon(endpoint, mute) as daemon:
        client = AsyncClient(endpoint, timeout_s=20.0)

        async def leave() -> None:
            stream = await client.generate("x", stream=True)
            await in_thread(daemon.wait_for_kind, Generate)
            streams.append(stream)

        streams: list[Any] = []
        asyncio.run(leave())
        (asked,) = daemon.wait_for_kind(Generate)
        daemon.say(*tokens(asked.request_id, 0, 1))
        daemon.say(*finished(asked.request_id, 1))
        assert asyncio.run(client.ping()).state == "ready"  # type: ignore[arg-type]
        wait_until(lambda: not client._io._session._calls)
        assert asyncio.run(client.ping()).state == "ready"  # type: ignore[arg-type]
        asyncio.run(client.aclose())
