"""The same crowd through the typed client, over the death of its daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvd_client import AsyncClient, errors
from kvd_client.results import Completion
from request_drawing import Ask

CALL_TIMEOUT_S = 60.0


async def run_typed(pressed: Any, asks: Sequence[Ask], *, after_s: float) -> list[Completion | errors.KvdError | None]:
    """What each call came to; None where the caller went away. The daemon is killed after a while, and another one started."""

    async def kill() -> None:
        await asyncio.sleep(after_s)
        await asyncio.to_thread(pressed.restart)

    async with AsyncClient(pressed.process.endpoint, timeout_s=CALL_TIMEOUT_S) as first, AsyncClient(pressed.process.endpoint) as second:
        calls = [_ask(second if ask.peer else first, ask) for ask in asks]
        *outcomes, _ = await asyncio.gather(*calls, kill())
    return outcomes


async def _ask(client: AsyncClient, ask: Ask) -> Completion | errors.KvdError | None:
    options: dict[str, Any] = dict(ask.options)
    await asyncio.sleep(ask.pause_ms / 1000)
    is_chat = isinstance(ask.prompt, tuple) and isinstance(ask.prompt[0], dict)
    generate: Any = client.chat if is_chat else client.generate
    if not ask.credit:
        try:
            return await asyncio.wait_for(generate(ask.prompt, **options), 0.05 if ask.abort_after == 0 else None)
        except errors.KvdError as error:
            return error
        except TimeoutError:
            return None
    stream = await generate(ask.prompt, stream=True, window_tokens=ask.credit, timeout_s=CALL_TIMEOUT_S, **options)
    async with stream:
        num_chunks = 0
        try:
            async for _ in stream:
                num_chunks += 1
                if ask.reader == "slow":
                    await asyncio.sleep(0.01)
                if ask.reader == "gone" or num_chunks == ask.abort_after:
                    return None
        except errors.KvdError as error:
            return error
        return stream.completion
