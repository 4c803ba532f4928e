"""Many prompts over one connection: so many at a time, answers in the prompts' order, the first failure ends them all."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from kvd_client.calls import Call, Delivery
from kvd_client.errors import BadRequest, KvdError
from kvd_client.protocol.codes import Code
from kvd_client.requests import ChatMessages, GenerateOptions, Prompt, generation_call, prompt_body
from kvd_client.results import Completion

MAX_IN_FLIGHT = 256
"""Fewer than a daemon takes of one client."""


def prompt_bodies(prompts: Sequence[Prompt | ChatMessages], max_in_flight: int) -> list[tuple[str, bytes]]:
    """The ``input`` kind and the body of each prompt: text, token ids, or chat messages.

    Raises:
        BadRequest: one can't be sent, or nothing may be in flight.
    """
    if max_in_flight < 1:
        raise BadRequest(f"max_in_flight is {max_in_flight}; it must be at least 1", code=Code.BAD_REQUEST)
    return [prompt_body(None, prompt) if _is_chat(prompt) else prompt_body(prompt) for prompt in prompts]  # type: ignore[arg-type]  # told apart


def _is_chat(prompt: Prompt | ChatMessages) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def complete_all(
    bodies: Sequence[tuple[str, bytes]],
    options: GenerateOptions,
    *,
    max_in_flight: int,
    timeout_s: float,
    open_call: Callable[[Call, float], None],
    cancel: Callable[[Call], None],
) -> list[Completion]:
    """Ask for a completion of each body; ``timeout_s`` is for all of them together.

    Raises:
        KvdError: the first that failed; the others are aborted.
    """
    deadline_s = time.monotonic() + timeout_s
    deliveries: queue.SimpleQueue[tuple[int, Delivery]] = queue.SimpleQueue()
    calls: dict[int, Call] = {}
    completions: dict[int, Completion] = {}
    num_begun = 0
    try:
        while len(completions) < len(bodies):
            while num_begun < len(bodies) and len(calls) < max_in_flight:
                deliver = partial(_put, deliveries, num_begun)
                call, _ = generation_call(*bodies[num_begun], options, stream=False, deliver=deliver)
                calls[num_begun] = call
                open_call(call, max(0.0, deadline_s - time.monotonic()))
                num_begun += 1
            number, delivery = deliveries.get()
            del calls[number]
            completions[number] = _completion(delivery)
    except BaseException:  # Ctrl-C among them
        for call in calls.values():
            cancel(call)
        raise
    return [completions[number] for number in range(len(bodies))]


def _completion(delivery: Delivery) -> Completion:
    if isinstance(delivery, KvdError):
        raise delivery
    assert isinstance(delivery, Completion)
    return delivery


def _put(deliveries: queue.SimpleQueue[tuple[int, Delivery]], number: int, delivery: Delivery) -> None:
    deliveries.put((number, delivery))


async def complete_all_async(
    bodies: Sequence[tuple[str, bytes]],
    complete: Callable[[str, bytes, float], Awaitable[Completion]],
    *,
    max_in_flight: int,
    timeout_s: float,
) -> list[Completion]:
    """As ``complete_all``; ``complete`` asks for one completion, within so many seconds."""
    deadline_s = time.monotonic() + timeout_s
    waiting = iter(enumerate(bodies))
    completions: dict[int, Completion] = {}

    async def work() -> None:
        for number, (kind, body) in waiting:
            completions[number] = await complete(kind, body, max(0.0, deadline_s - time.monotonic()))

    workers = [asyncio.ensure_future(work()) for _ in range(min(max_in_flight, len(bodies)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [completions[number] for number in range(len(bodies))]
