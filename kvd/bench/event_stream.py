"""One streamed HTTP/1.1 answer, read as server-sent events: no library, since what the driver costs is taken from the server on the same machine."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult

from kvd.bench.measuring import BenchError

_MAX_LINE = 1 << 22
_MAX_ERROR_BYTES = 4000
_DONE = b"[DONE]"


class Exchange:
    """One request over a connection of its own.

    Args:
        base: scheme, host and port of the server.
        timeout_s: how long the server may be silent.
    """

    def __init__(self, base: SplitResult, timeout_s: float) -> None:
        self._base = base
        self._timeout_s = timeout_s
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._is_chunked = False
        self._left: int | None = None

    async def open(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> int:
        """Send the request and read the answer's head; the status code.

        Raises:
            BenchError: nobody answers, or not in HTTP.
        """
        host, port = self._base.hostname or "127.0.0.1", self._base.port or (443 if self._base.scheme == "https" else 80)
        security = ssl.create_default_context() if self._base.scheme == "https" else None
        try:
            async with asyncio.timeout(self._timeout_s):
                self._reader, self._writer = await asyncio.open_connection(host, port, limit=_MAX_LINE, ssl=security)
                lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close", f"Content-Length: {len(body)}"]
                lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
                self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await self._writer.drain()
                return await self._head()
        except TimeoutError as error:
            raise BenchError(f"{self._base.geturl()} did not answer within {self._timeout_s:g} s", kind="unavailable") from error
        except (OSError, ValueError, EOFError) as error:
            raise BenchError(f"{self._base.geturl()} can't be asked: {error}", kind="unavailable") from error

    async def _head(self) -> int:
        first = (await self._reader.readline()).split(None, 2)
        if len(first) < 2 or not first[0].startswith(b"HTTP/") or not first[1].isdigit():
            raise ValueError("this is no HTTP server, or it closed the connection")
        while (line := await self._reader.readline()) not in (b"\r\n", b"\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            if name.lower() == "transfer-encoding":
                self._is_chunked = "chunked" in value.lower()
            elif name.lower() == "content-length":
                self._left = int(value)
        return int(first[1])

    async def _piece(self) -> bytes:
        """Some further bytes of the body; none at its end."""
        async with asyncio.timeout(self._timeout_s):
            if not self._is_chunked:
                data = await self._reader.read(1 << 16 if self._left is None else min(self._left, 1 << 16))
                if self._left is not None:
                    self._left -= len(data)
                return data
            size = int((await self._reader.readline()).split(b";")[0], 16)
            data = await self._reader.readexactly(size)
            await self._reader.readline()
            return data

    async def body(self, limit: int = _MAX_LINE) -> bytes:
        """The rest of the answer, at most about ``limit`` bytes."""
        parts: list[bytes] = []
        try:
            while sum(map(len, parts)) < limit and (piece := await self._piece()):
                parts.append(piece)
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            raise BenchError(f"{self._base.geturl()} broke off its answer: {error or 'silence'}") from error
        return b"".join(parts)

    async def error_text(self) -> str:
        """What an answer with an error status says."""
        text = (await self.body(_MAX_ERROR_BYTES)).decode(errors="replace")
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            text = json.loads(text)["error"]["message"]
        return " ".join(str(text).split())[:500]

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The data of each event, until ``[DONE]``.

        Raises:
            BenchError: the stream ended before it said so, fell silent, or holds what is no JSON object.
        """
        rest = b""
        try:
            while piece := await self._piece():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data == _DONE:
                            return
                        yield _object_of(data)
        except TimeoutError as error:
            raise BenchError(f"{self._base.geturl()} fell silent for {self._timeout_s:g} s in the middle of an answer") from error
        except (OSError, ValueError, EOFError) as error:
            raise BenchError(f"{self._base.geturl()} broke off a stream: {error}") from error
        raise BenchError(f"{self._base.geturl()} ended a stream without [DONE]")

    async def close(self) -> None:
        """Let the connection go."""
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()


def _object_of(data: bytes) -> dict[str, Any]:
    if not isinstance(found := json.loads(data), dict):
        raise ValueError(f"{data[:40]!r} is no JSON object")  # noqa: TRY004  as of what is no JSON at all
    return found
