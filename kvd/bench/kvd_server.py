"""A target that is a kvd daemon, through the client library."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path
from typing import Unpack

from kvd_client import AsyncClient
from kvd_client.endpoints import default_endpoint
from kvd_client.errors import KvdError
from kvd_client.requests import GenerateOptions

from kvd.bench.measuring import Answer, Ask, BenchError
from kvd.bench.prompts import Messages

_PING_S = 1.0
_PEER_CREDENTIALS = struct.Struct("3i")


class KvdServer:
    """A kvd daemon at an endpoint; without one, the client library's default.

    Args:
        endpoint: ``ipc://`` or ``tcp://``.
        timeout_s: of one request.
        server_key: the daemon's public CURVE key, of a tcp endpoint.
        client_key_file: own secret CURVE key.
    """

    def __init__(
        self, endpoint: str | None, *, timeout_s: float = 600.0, server_key: str | None = None, client_key_file: Path | None = None
    ) -> None:
        self.url = endpoint or default_endpoint()
        try:
            self._client = AsyncClient(
                self.url, timeout_s=timeout_s, connect_timeout_s=min(timeout_s, 5.0), server_key=server_key, client_key_file=client_key_file
            )
        except (ValueError, OSError) as error:
            raise BenchError(str(error), kind="usage") from error

    async def ask(self, ask: Ask) -> Answer:
        """See ``Server``."""
        return await self._stream(ask)

    async def _stream(self, ask: Ask, **more: Unpack[GenerateOptions]) -> Answer:
        """With further options of the client."""
        options: GenerateOptions = {"max_tokens": ask.max_tokens, "n": ask.n, "ignore_eos": True, **more}
        if ask.seed is None:
            options["temperature"] = 0.0
        else:
            options["temperature"], options["seed"] = 1.0, ask.seed
        answer = Answer(time.perf_counter())
        texts: list[str] = []
        try:
            stream = await self._client.chat(ask.messages, stream=True, **options)
            async for chunk in stream:
                if chunk.token_ids:
                    answer.took(ask, len(chunk.token_ids))
                texts.append(chunk.text)
        except KvdError as error:
            raise BenchError(f"{self.url}: {error}", kind="unavailable" if error.retryable else "refused") from error
        answer.ended_s = time.perf_counter()
        usage = stream.completion.usage
        answer.text = "".join(texts)
        answer.prompt_tokens, answer.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        answer.cached_tokens, answer.restored_tokens = usage.cached_tokens, usage.restored_tokens
        if usage.drafted_tokens:
            answer.drafted_tokens, answer.accepted_tokens = usage.drafted_tokens, usage.accepted_tokens
        return answer

    async def is_ready(self) -> bool:
        """Whether it pings back as ``ready``."""
        try:
            return (await self._client.ping(timeout_s=_PING_S)).state == "ready"
        except KvdError:
            return False

    async def version(self) -> str:
        """The daemon's version, its model, and the kernels that compute it."""
        try:
            hello = await self._client.hello()
            status = await self._client.status()
        except KvdError as error:
            raise BenchError(f"{self.url}: {error}", kind="unavailable") from error
        model = Path(str(status.get("model") or "no model")).name
        return f"kvd {hello.version}, {model}, {status.get('kernels') or 'unknown kernels'}"

    async def pin(self, name: str, messages: Messages) -> bool:
        """Pin what these messages begin with."""
        try:
            await self._client.pin(name, messages=messages)
        except KvdError as error:
            raise BenchError(f"{self.url}: {error}", kind="refused") from error
        return True

    async def pid(self) -> int | None:
        """The process that listens at an ipc endpoint (SO_PEERCRED); of a tcp endpoint nobody knows."""
        if not self.url.startswith("ipc://"):
            return None
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.url.removeprefix("ipc://"))
                pid, _, _ = _PEER_CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size))
            except OSError:
                return None
        return int(pid)

    async def figures(self) -> dict[str, float]:
        """Nothing besides."""
        return {}

    async def aclose(self) -> None:
        """Close the client."""
        await self._client.aclose()
