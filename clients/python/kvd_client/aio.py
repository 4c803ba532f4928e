"""The asyncio client: the same session and the same thread as the synchronous one, with futures and async iterators on top."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from kvd_client import operations
from kvd_client.calls import Call, CreditWindow, Deliver, Delivery, Reply
from kvd_client.endpoints import default_endpoint
from kvd_client.errors import ClientClosed, KvdError
from kvd_client.io_thread import IoThread, load_curve_keys
from kvd_client.many import MAX_IN_FLIGHT, complete_all_async, prompt_bodies
from kvd_client.protocol.messages import HelloReply
from kvd_client.requests import ChatMessages, GenerateOptions, Prompt, generation_call, prompt_body
from kvd_client.results import AdapterInfo, CheckpointResult, Chunk, Completion, ForgetResult, PingResult, PinResult, PromptEcho
from kvd_client.session import Session
from kvd_client.session_config import SessionConfig


class AsyncClient:
    """A connection to a kvd daemon, for asyncio.

    Arguments, timeouts, errors and the behaviour over a restart are those of :class:`kvd_client.client.Client`. Calls run side by side over one
    connection; cancelling the task that waits for a call aborts it in the daemon. May be used from several event loops: each call belongs to the
    loop that it was made on. Making a client needs no running loop and never blocks.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = 60.0,
        wait_until_ready: bool = True,
        heartbeat_interval_s: float = 5.0,
        heartbeat_timeout_s: float = 20.0,
        server_key: str | None = None,
        client_key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.endpoint = endpoint or default_endpoint()
        self.timeout_s = timeout_s
        config = SessionConfig(
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            heartbeat_interval_s=heartbeat_interval_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            wait_until_ready=wait_until_ready,
            endpoint=self.endpoint,
        )
        curve = load_curve_keys(server_key, client_key_file) if server_key else None
        self._session = Session(config)
        self._io = IoThread(self.endpoint, self._session, curve)
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}
        self._finalizer = weakref.finalize(self, self._io.close)

    @property
    def server(self) -> HelloReply | None:
        """The daemon as it last greeted this client, which a restarted one does by itself; None before the first greeting.

        Model facts are empty if the daemon did not know them at that time: ``hello`` asks again.
        """
        return self._session.server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every call of this client with ``ClientClosed``, and its connection. Calling it again does nothing."""
        await asyncio.to_thread(self._finalizer)

    # --------------------------------------------------------------------------------------------------- generation

    @overload
    async def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    async def generate(
        self, prompt: Prompt, *, stream: Literal[True], timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream: ...
    async def generate(
        self, prompt: Prompt, *, stream: bool = False, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion | AsyncStream:
        """Continue raw text or token ids, without a chat template.

        Args:
            prompt: text or token ids.
            stream: return at once, with an async iterator over the answer as it comes; else wait for the whole.
            timeout_s: until the call must be over, a stream's reading included; None: the client's own.
            options: see :class:`kvd_client.requests.GenerateOptions`.
        """
        return await self._generate(*prompt_body(prompt), stream, timeout_s, options)

    @overload
    async def chat(
        self, messages: ChatMessages, *, stream: Literal[False] = False, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    async def chat(
        self, messages: ChatMessages, *, stream: Literal[True], timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream: ...
    async def chat(
        self, messages: ChatMessages, *, stream: bool = False, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion | AsyncStream:
        """Answer a conversation, rendered with the model's chat template.

        Args:
            messages: ``{"role": …, "content": …}`` maps, oldest first.
            stream: return at once, with an async iterator over the answer as it comes; else wait for the whole.
            timeout_s: until the call must be over, a stream's reading included; None: the client's own.
            options: see :class:`kvd_client.requests.GenerateOptions`.
        """
        return await self._generate(*prompt_body(None, messages), stream, timeout_s, options)

    async def generate_many(
        self,
        prompts: Sequence[Prompt | ChatMessages],
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Answer several prompts over this connection, and return the completions in their order.

        Args:
            prompts: texts, token ids, or chat messages, which go through the model's chat template.
            max_in_flight: so many run at once; the daemon batches them.
            timeout_s: for all of them together; None: the client's own.
            options: see :class:`kvd_client.requests.GenerateOptions`; the same for each.

        Raises:
            KvdError: the first that failed; the others are aborted.
        """

        async def complete(kind: str, body: bytes, left_s: float) -> Completion:
            completion = await self._generate(kind, body, False, left_s, options)
            assert isinstance(completion, Completion)
            return completion

        bodies = prompt_bodies(prompts, max_in_flight)
        whole_s = self.timeout_s if timeout_s is None else timeout_s
        return await complete_all_async(bodies, complete, max_in_flight=max_in_flight, timeout_s=whole_s)

    # --------------------------------------------------------------------------------------------------- operations

    async def pin(
        self,
        name: str,
        prompt: Prompt | None = None,
        *,
        messages: ChatMessages | None = None,
        priority: int = 50,
        ttl_s: float = 0.0,
        cache_salt: str | bytes = b"",
        adapter: str = "",
        template_args: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> PinResult:
        """Compute a prefix, keep it in memory and on disk, and bring it back first after every restart; see ``Client.pin``."""
        operation = operations.pin(
            name,
            prompt,
            messages,
            priority=priority,
            ttl_s=ttl_s,
            cache_salt=cache_salt,
            adapter=adapter,
            template_args=template_args or {},
        )
        return operations.pin_result(name, await self._call(operation, timeout_s))

    async def unpin(self, name: str, *, timeout_s: float | None = None) -> None:
        """Forget a pin; its blocks stay cached like others. Raises ``NotFound`` where there is none of this name."""
        await self._call(operations.unpin(name), timeout_s)

    async def forget(
        self,
        prompt: Prompt | None = None,
        *,
        messages: ChatMessages | None = None,
        cache_salt: str | bytes | None = None,
        tenant: str | None = None,
        everything: bool = False,
        template_args: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> ForgetResult:
        """Have a prefix, a salt or all of this client's tenant leave memory and disk for good; see ``Client.forget``."""
        operation = operations.forget(
            prompt, messages, tenant=tenant, cache_salt=cache_salt, everything=everything, template_args=template_args or {}
        )
        return operations.forget_result(await self._call(operation, timeout_s))

    async def load_adapter(self, name: str, *, timeout_s: float | None = None) -> AdapterInfo:
        """Have a LoRA adapter of the daemon's directory read, again if it is loaded; returns when requests that name it run with what was read.

        Args:
            name: of its subdirectory.
            timeout_s: see the class.

        Raises:
            NotFound: there is no such subdirectory.
            AdapterUnusable: it can't be used; the message says why.
            AdapterCapacity: as many as may be loaded are in use.
        """
        return operations.adapter_result(await self._call(operations.load_adapter(name), timeout_s))

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> AdapterInfo:
        """Let an adapter go: at once, or when the requests that run with it are over (``state`` is ``in use`` then).

        Raises:
            NotFound: none is loaded under this name.
        """
        return operations.adapter_result(await self._call(operations.unload_adapter(name), timeout_s))

    async def adapters(self, *, timeout_s: float | None = None) -> tuple[AdapterInfo, ...]:
        """The LoRA adapters that requests may name, loaded or on disk."""
        return operations.adapters_result(await self._call(operations.list_adapters(), timeout_s))

    async def prefixes(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The pins and the hottest prefixes: tokens, hits, residency, age."""
        return (await self._call(operations.prefixes(), timeout_s)).data

    async def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """State, model, requests, blocks, store and rehydration. Answered in every state of the daemon."""
        return (await self._call(operations.status(), timeout_s)).data

    async def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Counters since the daemon's start, and rates. Answered in every state of the daemon."""
        return (await self._call(operations.stats(), timeout_s)).data

    async def checkpoint(self, *, timeout_s: float | None = None) -> CheckpointResult:
        """Have every hot block written to disk; returns when that is durable."""
        return operations.checkpoint_result(await self._call(operations.checkpoint(), timeout_s))

    async def drain(self, drain_timeout_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Stop the daemon gracefully; returns when it has stopped accepting. Running requests are aborted after ``drain_timeout_s``."""
        await self._call(operations.drain(drain_timeout_s), timeout_s)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: ChatMessages | None = None,
        template_args: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """The token ids of a text, or of a rendered conversation."""
        return operations.tokenize_result(await self._call(operations.tokenize(prompt, messages, template_args or {}), timeout_s))

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """The bytes that each of at most 4096 token ids stands for; several may share one character, special tokens have none."""
        return operations.detokenize_result(await self._call(operations.detokenize(token_ids), timeout_s))

    async def ping(self, *, timeout_s: float | None = None) -> PingResult:
        """Whether the daemon's edge answers, its state, and how long that takes. Answered in every state."""
        return operations.ping_result(await self._call(operations.ping(), timeout_s))

    async def hello(self, *, timeout_s: float | None = None) -> HelloReply:
        """The daemon's version, instance, limits and model. Answered in every state; model facts are empty until they are known."""
        return operations.hello_result(await self._call(operations.hello(), timeout_s))

    async def wait_ready(self, *, timeout_s: float | None = None) -> PingResult:
        """Wait for a daemon at the endpoint, and until it is ready for requests."""
        return operations.ping_result(await self._call(operations.wait_ready(), timeout_s))

    # ------------------------------------------------------------------------------------------------------- private

    async def _generate(
        self, kind: str, body: bytes, stream: bool, timeout_s: float | None, options: GenerateOptions
    ) -> Completion | AsyncStream:
        deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        call, credit = generation_call(kind, body, options, stream=stream, deliver=self._deliver_to(deliveries))
        self._open(call, timeout_s)
        if stream:
            return AsyncStream(self._io, call, deliveries, credit)
        completion = await self._last(call, deliveries)
        assert isinstance(completion, Completion)
        return completion

    async def _call(self, operation: operations.Operation, timeout_s: float | None) -> Reply:
        deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        call = operation.call(self._deliver_to(deliveries))
        self._open(call, timeout_s)
        reply = await self._last(call, deliveries)
        assert isinstance(reply, Reply)
        return reply

    def _deliver_to(self, deliveries: asyncio.Queue[Delivery]) -> Deliver:
        """Into the running loop. The queue is bounded by the stream's credit."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            for other in [other for other in tuple(self._mailboxes) if other.is_closed()]:
                self._mailboxes.pop(other, None)
            mailbox = self._mailboxes[loop] = _Mailbox(loop)
        return partial(mailbox.put, deliveries)

    def _open(self, call: Call, timeout_s: float | None) -> None:
        call.timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._io.open(call)

    async def _last(self, call: Call, deliveries: asyncio.Queue[Delivery]) -> Delivery:
        try:
            delivery = await deliveries.get()
        except BaseException:  # the task was cancelled
            self._io.cancel(call)
            raise
        if isinstance(delivery, KvdError):
            raise delivery
        return delivery


class _Mailbox:
    """Brings deliveries from the client's thread into one event loop, and wakes it once for all that come together: the tokens of a step do."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[asyncio.Queue[Delivery], Delivery]] = deque()
        self._is_woken = False

    def put(self, deliveries: asyncio.Queue[Delivery], delivery: Delivery) -> None:
        """From the client's thread."""
        self._waiting.append((deliveries, delivery))
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:  # the loop is closed: nobody waits any more
                if not self._loop.is_closed():
                    raise

    def _hand_out(self) -> None:
        self._is_woken = False  # before the first look: what comes after the last one wakes the loop again
        waiting = self._waiting
        while waiting:
            deliveries, delivery = waiting.popleft()
            deliveries.put_nowait(delivery)


class AsyncStream(AsyncIterator[Chunk]):
    """An answer as it comes: an async iterator over its chunks.

    Read it to its end, or ``aclose`` it (or leave an ``async with`` block, cancel the reading task, or drop it): then the daemon aborts the request.
    Not more than ``window_tokens`` wait unread; while they do, the daemon does not compute further ones. After the end :attr:`completion` is the whole.
    """

    def __init__(self, io: IoThread, call: Call, deliveries: asyncio.Queue[Delivery], window_tokens: int) -> None:
        self._io = io
        self._call = call
        self._deliveries = deliveries
        self._window = CreditWindow(window_tokens)
        self._completion: Completion | None = None
        self._is_over = False

    @property
    def prompt(self) -> PromptEcho | None:
        """What ``echo`` or ``prompt_logprobs`` asked for, once the first chunk has come."""
        return self._call.answer.prompt if self._call.answer is not None else None

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has been read to its end.

        Raises:
            RuntimeError: it has not.
        """
        if self._completion is None:
            raise RuntimeError("the stream has not been read to its end")
        return self._completion

    async def __anext__(self) -> Chunk:
        """The next piece; waits for it.

        Raises:
            KvdError: the request failed, once; afterwards the iterator is at its end.
        """
        if self._is_over:
            raise StopAsyncIteration
        try:
            delivery = await self._deliveries.get()
        except BaseException:  # the task was cancelled
            self._cancel()
            raise
        return self._take(delivery)

    async def batch(self) -> list[Chunk]:
        """The next piece and everything that has come with it; waits for the first. Empty at the end.

        Raises:
            KvdError: as for the iterator.
        """
        if self._is_over:
            return []
        try:
            delivery = await self._deliveries.get()
        except BaseException:  # the task was cancelled
            self._cancel()
            raise
        chunks = []
        while isinstance(delivery, Chunk):
            chunks.append(self._take(delivery))
            if self._deliveries.empty():
                return chunks
            delivery = self._deliveries.get_nowait()
        if chunks and isinstance(delivery, KvdError):
            self._deliveries.put_nowait(delivery)  # for the next call; nothing comes after an error
            return chunks
        with contextlib.suppress(StopAsyncIteration):
            self._take(delivery)
        return chunks

    def _take(self, delivery: Delivery) -> Chunk:
        """What a delivery means; raises what ends the stream."""
        if isinstance(delivery, Chunk):
            if granted := self._window.read(len(delivery.token_ids)):
                self._io.grant(self._call, granted)
            return delivery
        self._is_over = True
        if isinstance(delivery, KvdError):
            raise delivery
        assert isinstance(delivery, Completion)
        self._completion = delivery
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request if it still runs. A task that waits for the next chunk gets ``ClientClosed``."""
        if not self._is_over:
            self._cancel()
            self._deliveries.put_nowait(ClientClosed("the stream was closed"))

    def _cancel(self) -> None:
        self._is_over = True
        self._io.cancel(self._call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._is_over:
            self._cancel()
