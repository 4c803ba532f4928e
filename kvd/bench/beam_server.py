"""A kvd daemon that is asked for beams, or for as many samples, to see what copy-on-write block tables save of the blocks that lone sequences would need."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Literal

from kvd_client.errors import KvdError
from kvd_client.requests import GenerateOptions

from kvd.bench.kvd_server import KvdServer
from kvd.bench.measuring import Answer, Ask, BenchError

Way = Literal["beams", "samples"]
WAYS: tuple[Way, ...] = ("samples", "beams")
_POLL_S = 0.02


class BeamServer(KvdServer):
    """``beams``: each request is a beam search over ``width`` beams, of which the best is answered. ``samples``: it has ``width`` answers drawn at temperature 1.

    Each request has a salt of its own, so that what is shared is shared by the sequences of one request, whatever was asked of the daemon before.
    """

    def __init__(self, endpoint: str, way: Way, width: int, *, timeout_s: float = 600.0) -> None:
        super().__init__(endpoint, timeout_s=timeout_s)
        self._way = way
        self._width = width
        self._under_way = 0
        self._references = 0
        self._saved = 0
        self._salts = itertools.count()
        self._poller: asyncio.Task[None] | None = None

    async def ask(self, ask: Ask) -> Answer:
        """As a whole: beams are told at their end."""
        self._under_way += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        answer = Answer(time.perf_counter())
        options: GenerateOptions = {
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "cache_salt": f"{self._way}-{self._width}-{next(self._salts)}",
        }
        if self._way == "beams":
            options["beam_width"] = self._width
        else:
            options["n"], options["seed"] = self._width, 1
        try:
            done = await self._client.chat(ask.messages, **options)
        except KvdError as error:
            raise BenchError(f"{self.url}: {error}", kind="unavailable" if error.retryable else "refused") from error
        finally:
            self._under_way -= 1
        answer.ended_s = time.perf_counter()
        answer.arrivals.append(answer.ended_s)
        answer.pieces.append(done.usage.completion_tokens)
        answer.text = done.text
        answer.prompt_tokens, answer.completion_tokens = done.usage.prompt_tokens, done.usage.completion_tokens
        answer.cached_tokens, answer.restored_tokens = done.usage.cached_tokens, done.usage.restored_tokens
        return answer

    async def figures(self) -> dict[str, float]:
        """The part of the blocks that sharing saved since the last call: (places in block tables - blocks) over places, over all moments looked at."""
        references, saved = self._references, self._saved
        self._references = self._saved = 0
        return {"blocks_saved": saved / references} if references else {}

    async def _poll(self) -> None:
        while self._under_way:
            try:
                blocks = (await self._client.status()).get("blocks") or {}
            except KvdError:
                return
            self._references += int(blocks.get("references", 0))
            self._saved += int(blocks.get("references", 0)) - int(blocks.get("used", 0))
            await asyncio.sleep(_POLL_S)
