"""The synchronous client."""

from __future__ import annotations

import os
import queue
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from kvd_client import operations
from kvd_client.calls import Call, CreditWindow, Delivery, Io, Reply
from kvd_client.endpoints import default_endpoint
from kvd_client.errors import ClientClosed, KvdError
from kvd_client.io_thread import IoThread, load_curve_keys
from kvd_client.many import MAX_IN_FLIGHT, complete_all, prompt_bodies
from kvd_client.protocol.messages import HelloReply
from kvd_client.requests import ChatMessages, GenerateOptions, Prompt, generation_call, prompt_body
from kvd_client.results import AdapterInfo, CheckpointResult, Chunk, Completion, ForgetResult, PingResult, PinResult, PromptEcho
from kvd_client.session import Session
from kvd_client.session_config import SessionConfig


class Client:
    """A connection to a kvd daemon, for threads.

    Making one never blocks and never fails for want of a daemon; the first call waits for it. Every method may be called from any thread at any time;
    calls run side by side over one connection. A :class:`Stream` is read by one thread at a time. ``close`` (or leaving the ``with`` block)
    fails what still runs with ``ClientClosed``. A client does not survive ``fork``: make one in each process.

    Every call takes ``timeout_s``: seconds until the call must be over, waiting for a daemon, retries and the whole of a stream included; None is the
    client's own, ``math.inf`` no limit. Afterwards it raises ``Timeout`` and the daemon is told to abort. Every error is a
    :class:`kvd_client.errors.KvdError`.

    A restart of the daemon is waited through: a call that the caller has seen nothing of yet is sent to the new daemon, also after ``starting``
    and ``draining``. A stream that has given out a chunk raises ``Interrupted``; ``checkpoint`` and ``drain`` raise ``ConnectionLost``.

    Args:
        endpoint: ``ipc://PATH`` or ``tcp://HOST:PORT``; None: :func:`kvd_client.endpoints.default_endpoint`.
        timeout_s: limit of calls that name none; ``math.inf`` for no limit.
        connect_timeout_s: how long calls wait for the first answer of a daemon before ``ConnectionLost``.
        reconnect_timeout_s: the same once there has been a daemon; long enough for a restart. ``wait_ready`` heeds neither.
        wait_until_ready: whether calls wait while the daemon says ``starting`` or ``draining``; else they raise ``NotReady`` and ``Draining``.
        heartbeat_interval_s: seconds between two pings, also when nothing else is going on.
        heartbeat_timeout_s: silence after a ping that counts as a lost connection.
        server_key: the daemon's public CURVE key (Z85), for endpoints that demand CURVE.
        client_key_file: the client's secret key file, as ``zmq.auth.create_certificates`` writes it; None: a key pair made now.

    Raises:
        ValueError: the endpoint or a key is malformed.
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
        self._begin(IoThread(self.endpoint, Session(config), curve))

    @classmethod
    def over(cls, io: Io, *, endpoint: str, timeout_s: float) -> Self:
        """A client over another way to a daemon than a socket: ``kvd.LLM`` has one inside its process. ``endpoint`` is its name for messages."""
        client = cls.__new__(cls)
        client.endpoint, client.timeout_s = endpoint, timeout_s
        client._begin(io)  # noqa: SLF001 -- its own class
        return client

    def _begin(self, io: Io) -> None:
        self._io = io
        self._finalizer = weakref.finalize(self, io.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every call of this client and its connection. Calling it again does nothing."""
        self._finalizer()

    # --------------------------------------------------------------------------------------------------- generation

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[True], timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream: ...
    def generate(
        self, prompt: Prompt, *, stream: bool = False, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion | Stream:
        """Continue raw text or token ids, without a chat template.

        Args:
            prompt: text or token ids.
            stream: return at once, with an iterator over the answer as it comes; else wait for the whole.
            timeout_s: see the class.
            options: see :class:`kvd_client.requests.GenerateOptions`.
        """
        return self._generate(*prompt_body(prompt), stream, timeout_s, options)

    @overload
    def chat(
        self, messages: ChatMessages, *, stream: Literal[False] = False, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: ChatMessages, *, stream: Literal[True], timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream: ...
    def chat(
        self, messages: ChatMessages, *, stream: bool = False, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion | Stream:
        """Answer a conversation, rendered with the model's chat template.

        Args:
            messages: ``{"role": …, "content": …}`` maps, oldest first.
            stream: return at once, with an iterator over the answer as it comes; else wait for the whole.
            timeout_s: see the class.
            options: see :class:`kvd_client.requests.GenerateOptions`.
        """
        return self._generate(*prompt_body(None, messages), stream, timeout_s, options)

    def generate_many(
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
        return complete_all(
            prompt_bodies(prompts, max_in_flight),
            options,
            max_in_flight=max_in_flight,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            open_call=self._open,
            cancel=self._io.cancel,
        )

    # --------------------------------------------------------------------------------------------------- operations

    def pin(
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
        """Compute a prefix, keep it in memory and on disk, and bring it back first after every restart. Returns when that is durable.

        Args:
            name: replaces the pin of this name.
            prompt: the prefix as text or ids; or
            messages: the beginning of conversations, mostly one system message: what their renderings share is pinned.
            priority: 0 to 100; larger is rehydrated earlier.
            ttl_s: seconds after which the pin ends by itself, across restarts; 0: never.
            cache_salt: as in the requests that will use it.
            adapter: as in the requests that will use it; after a restart what stands under the name then.
            template_args: further variables of the chat template.
            timeout_s: see the class.

        Raises:
            PinTooShort: less than one block.
            PinCapacity: more than pins may hold.
        """
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
        return operations.pin_result(name, self._call(operation, timeout_s))

    def unpin(self, name: str, *, timeout_s: float | None = None) -> None:
        """Forget a pin; its blocks stay cached like others.

        Raises:
            NotFound: there is none of this name.
        """
        self._call(operations.unpin(name), timeout_s)

    def forget(
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
        """Have a prefix, a salt or all of this client's tenant leave memory and disk for good. Returns when that is durable.

        Args:
            prompt: a prefix as text or ids; or
            messages: the beginning of conversations; without either everything of the salt is forgotten.
            cache_salt: of these alone (empty: without a salt); None: a prefix without a salt, else every salt.
            tenant: another tenant than the client's own; for operators on the daemon's machine.
            everything: all of the tenant, whatever the salts; goes without prefix and ``cache_salt``, and nothing else says it.
            template_args: further variables of the chat template.
            timeout_s: see the class.

        Raises:
            TypeError: neither a prefix nor a salt nor ``everything`` is given, or ``everything`` beside one of these.
            PinTooShort: the prefix is less than one block; nothing is kept under it.
            StorageError: it is not known to have left the disk.
        """
        operation = operations.forget(
            prompt, messages, tenant=tenant, cache_salt=cache_salt, everything=everything, template_args=template_args or {}
        )
        return operations.forget_result(self._call(operation, timeout_s))

    def load_adapter(self, name: str, *, timeout_s: float | None = None) -> AdapterInfo:
        """Have a LoRA adapter of the daemon's directory read, again if it is loaded; returns when requests that name it run with what was read.

        Args:
            name: of its subdirectory.
            timeout_s: see the class.

        Raises:
            NotFound: there is no such subdirectory.
            AdapterUnusable: it can't be used; the message says why.
            AdapterCapacity: as many as may be loaded are in use.
        """
        return operations.adapter_result(self._call(operations.load_adapter(name), timeout_s))

    def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> AdapterInfo:
        """Let an adapter go: at once, or when the requests that run with it are over (``state`` is ``in use`` then).

        Raises:
            NotFound: none is loaded under this name.
        """
        return operations.adapter_result(self._call(operations.unload_adapter(name), timeout_s))

    def adapters(self, *, timeout_s: float | None = None) -> tuple[AdapterInfo, ...]:
        """The LoRA adapters that requests may name, loaded or on disk."""
        return operations.adapters_result(self._call(operations.list_adapters(), timeout_s))

    def prefixes(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The pins and the hottest prefixes: tokens, hits, residency, age."""
        return self._call(operations.prefixes(), timeout_s).data

    def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """State, model, requests, blocks, store and rehydration. Answered in every state of the daemon."""
        return self._call(operations.status(), timeout_s).data

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Counters since the daemon's start, and rates. Answered in every state of the daemon."""
        return self._call(operations.stats(), timeout_s).data

    def checkpoint(self, *, timeout_s: float | None = None) -> CheckpointResult:
        """Have every hot block written to disk; returns when that is durable."""
        return operations.checkpoint_result(self._call(operations.checkpoint(), timeout_s))

    def drain(self, drain_timeout_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Stop the daemon gracefully; returns when it has stopped accepting.

        Args:
            drain_timeout_s: after so long running requests are aborted; None: the daemon's own setting.
            timeout_s: see the class.
        """
        self._call(operations.drain(drain_timeout_s), timeout_s)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: ChatMessages | None = None,
        template_args: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """The token ids of a text, or of a rendered conversation."""
        return operations.tokenize_result(self._call(operations.tokenize(prompt, messages, template_args or {}), timeout_s))

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """The bytes that each of at most 4096 token ids stands for; several may share one character, special tokens have none."""
        return operations.detokenize_result(self._call(operations.detokenize(token_ids), timeout_s))

    def ping(self, *, timeout_s: float | None = None) -> PingResult:
        """Whether the daemon's edge answers, its state, and how long that takes. Answered in every state."""
        return operations.ping_result(self._call(operations.ping(), timeout_s))

    def hello(self, *, timeout_s: float | None = None) -> HelloReply:
        """The daemon's version, instance, limits and model. Answered in every state; model facts are empty until they are known."""
        return operations.hello_result(self._call(operations.hello(), timeout_s))

    def wait_ready(self, *, timeout_s: float | None = None) -> PingResult:
        """Wait for a daemon at the endpoint, and until it is ready for requests."""
        return operations.ping_result(self._call(operations.wait_ready(), timeout_s))

    # ------------------------------------------------------------------------------------------------------- private

    def _generate(self, kind: str, body: bytes, stream: bool, timeout_s: float | None, options: GenerateOptions) -> Completion | Stream:
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        call, credit = generation_call(kind, body, options, stream=stream, deliver=deliveries.put)
        if stream:
            answer = Stream(self._io, call, deliveries, credit)
            try:
                self._open(call, timeout_s)
            except BaseException:  # Ctrl-C, which may come when it has been handed over
                answer.close()
                raise
            return answer
        completion = self._answer(call, deliveries, timeout_s)
        assert isinstance(completion, Completion)
        return completion

    def _call(self, operation: operations.Operation, timeout_s: float | None) -> Reply:
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        call = operation.call(deliveries.put)
        reply = self._answer(call, deliveries, timeout_s)
        assert isinstance(reply, Reply)
        return reply

    def _open(self, call: Call, timeout_s: float | None) -> None:
        call.timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._io.open(call)

    def _answer(self, call: Call, deliveries: queue.SimpleQueue[Delivery], timeout_s: float | None) -> Delivery:
        try:
            self._open(call, timeout_s)
            delivery = deliveries.get()
        except BaseException:  # Ctrl-C, also when it has just been handed over
            self._io.cancel(call)
            raise
        if isinstance(delivery, KvdError):
            raise delivery
        return delivery


class Stream(Iterator[Chunk]):
    """An answer as it comes: an iterator over its chunks.

    Read it to its end, or ``close`` it (or leave a ``with`` block, or drop it): then the daemon aborts the request. Not more than
    ``window_tokens`` wait unread; while they do, the daemon does not compute further ones. After the end :attr:`completion` is the whole.
    """

    def __init__(self, io: Io, call: Call, deliveries: queue.SimpleQueue[Delivery], window_tokens: int) -> None:
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

    def __next__(self) -> Chunk:
        """The next piece; waits for it.

        Raises:
            KvdError: the request failed, once; afterwards the iterator is at its end.
        """
        if self._is_over:
            raise StopIteration
        try:
            delivery = self._deliveries.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if isinstance(delivery, Chunk):
            if granted := self._window.read(len(delivery.token_ids)):
                self._io.grant(self._call, granted)
            return delivery
        self._is_over = True
        if isinstance(delivery, KvdError):
            raise delivery
        assert isinstance(delivery, Completion)
        self._completion = delivery
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it still runs. From another thread it ends a waiting reader with ``ClientClosed``."""
        if not self._is_over:
            self._io.cancel(self._call)
            self._is_over = True  # after it: who was interrupted before may close it again
            self._deliveries.put(ClientClosed("the stream was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
