"""Connections on which nothing comes end, those on which something goes on do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from http_server import listening

pytestmark = pytest.mark.socket

KEEP_ALIVE_S = 0.3
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

Test = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def slow(_scope: Any, _receive: Any, send: Any) -> None:
    """Takes longer than an idle connection has."""
    await asyncio.sleep(2 * KEEP_ALIVE_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


def run(test: Test) -> None:
    async def main() -> None:
        async with listening(slow, keep_alive_s=KEEP_ALIVE_S) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await test(reader, writer)
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("part", [b"", b"GET / HTTP/1.1\r\nHo"])
def test_a_connection_without_a_request_ends(part: bytes):
    async def test(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part)
        assert await reader.read() == b""

    run(test)


@pytest.mark.parametrize("part", [b"", b"G"])
def test_one_without_a_further_request_ends(part: bytes):
    async def test(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        writer.write(part)
        with contextlib.suppress(ConnectionResetError):  # it had ended, and the part came after
            assert await reader.read() == b""

    run(test)


def test_requests_that_came_together_are_all_answered():
    async def test(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET * 3)
        assert (await reader.read()).count(b"HTTP/1.1 200") == 3

    run(test)
