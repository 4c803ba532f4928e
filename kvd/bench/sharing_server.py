"""A kvd daemon that is asked for several answers to one prompt in three ways, to see what sharing is worth."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Literal

from kvd_client.errors import KvdError

from kvd.bench.kvd_server import KvdServer
from kvd.bench.measuring import Answer, Ask

Sharing = Literal["off", "prefixes", "copy-on-write"]
SHARING: tuple[Sharing, ...] = ("off", "prefixes", "copy-on-write")
_POLL_S = 0.05


class SharingServer(KvdServer):
    """``off``: a request for each answer, every one under a salt of its own, so that nothing is found. ``prefixes``: a request for each answer. ``copy-on-write``:
    one request with ``n`` answers, which share the prompt's last, unfinished block too until they write.
    """

    def __init__(self, endpoint: str, sharing: Sharing, *, timeout_s: float = 600.0) -> None:
        super().__init__(endpoint, timeout_s=timeout_s)
        self._sharing = sharing
        self._salts = itertools.count()
        self._under_way = 0
        self._peak_blocks: float | None = 0.0
        self._poller: asyncio.Task[None] | None = None

    async def ask(self, ask: Ask) -> Answer:
        """All answers of a prompt as one: pieces of all of them, counts added up."""
        self._under_way += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            if self._sharing == "copy-on-write" or ask.n == 1:
                return await self._stream(ask, cache_salt=self._salt())
            answers = await asyncio.gather(*(self._stream(replace(ask, n=1), cache_salt=self._salt()) for _ in range(ask.n)))
        finally:
            self._under_way -= 1
        return _as_one(answers)

    def _salt(self) -> bytes:
        return next(self._salts).to_bytes(8, "little") if self._sharing == "off" else b""

    async def figures(self) -> dict[str, float]:
        """The most blocks that requests held at once since the last call; nothing where the daemon did not tell all the time."""
        peak, self._peak_blocks = self._peak_blocks, 0.0
        return {"peak_blocks": peak} if peak else {}

    async def _poll(self) -> None:
        while self._under_way:
            try:
                blocks = (await self._client.status()).get("blocks") or {}
            except KvdError:
                self._peak_blocks = None
                return
            if self._peak_blocks is not None:
                self._peak_blocks = max(self._peak_blocks, float(blocks.get("used", 0)))
            await asyncio.sleep(_POLL_S)


def _as_one(answers: list[Answer]) -> Answer:
    pieces = sorted(pair for each in answers for pair in zip(each.arrivals, each.pieces, strict=True))
    first = answers[0]
    return Answer(
        min(each.asked_s for each in answers),
        [at for at, _ in pieces],
        [size for _, size in pieces],
        max(each.ended_s for each in answers),
        first.text,
        sum(each.prompt_tokens for each in answers),
        sum(each.completion_tokens for each in answers),
        sum(each.cached_tokens or 0 for each in answers),
        sum(each.restored_tokens or 0 for each in answers),
    )
