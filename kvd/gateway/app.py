"""The HTTP application: routes, authentication, limits, and a request's life from its body to its last byte.

Each request is answered by two tasks at most: the answer's own and, for several prompts, one for each; beside them a watch for the client's
end of the connection, which aborts what runs in the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from kvd_client.aio import AsyncClient, AsyncStream
from kvd_client.errors import KvdError
from kvd_client.protocol.messages import HelloReply, TokenLogprob
from kvd_client.requests import GenerateOptions
from kvd_client.results import Choice, Chunk, Completion, PromptEcho
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvd.gateway.adapter_names import AdapterNames
from kvd.gateway.answers import DONE, ChatForm, CompletionForm, Form, Head, Pieces, without_output
from kvd.gateway.blame import blaming
from kvd.gateway.errors import ApiError, api_error
from kvd.gateway.fields import (
    ChatFields,
    CompletionFields,
    Fields,
    chat_messages,
    chat_options,
    completion_options,
    completion_prompts,
    read_fields,
)
from kvd.gateway.token_texts import TokenTexts

READY = "ready"
ABORT = "abort"
"""Where a request's state has the function that ends its connection at once."""
_JSON = "application/json"
_BODY_TIMEOUT_S = 30.0
_HEALTH_TIMEOUT_S = 2.0
_RETRY_S = 1.0
_MAX_FULL_BODIES = 8
"""Bodies of the largest size that all requests together may hold; decoded, one may take many times its bytes."""
_LATE_S = 3.0
"""How long after the time for the whole answer the client may still be taking its end: by then the daemon has failed it."""
_OK = msgspec.json.encode({"status": "ok"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the HTTP side; the daemon has its own behind them."""

    max_requests: int
    max_body_bytes: int
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Served:
    """A model, as the daemon says that it serves it, and the texts of its tokens."""

    hello: HelloReply
    texts: TokenTexts


class Gateway:
    """Answers HTTP requests with one connection to a daemon.

    Args:
        client: the daemon. It should not wait until a daemon is ready: an HTTP client is told to try again.
        served_names: names that requests may ask for; empty: the daemon's own name for its model.
        api_keys: those that are accepted as ``Authorization: Bearer``; empty: no authentication.
        limits: see there.
    """

    def __init__(self, client: AsyncClient, *, served_names: Sequence[str], api_keys: Sequence[str], limits: Limits) -> None:
        self._client = client
        self._served_names = tuple(served_names)
        self._api_keys = tuple(key.encode() for key in api_keys)
        self._limits = limits
        self._served: _Served | None = None
        self._adapters = AdapterNames()
        self._num_requests = 0
        self._num_body_bytes = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/chat/completions", _Endpoint(self, self._chat), methods=["POST"]),
            Route("/v1/completions", _Endpoint(self, self._complete), methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_fault}
        return Starlette(routes=routes, exception_handlers=handlers)

    # ------------------------------------------------------------------------------------------------------- reports

    async def _health(self, _request: Request) -> Response:
        """200 when a request would be served."""
        try:
            ping = await self._client.ping(timeout_s=_HEALTH_TIMEOUT_S)
        except KvdError as error:
            raise api_error(error) from error
        if ping.state != READY:
            raise _unavailable(f"the daemon is {ping.state}", ping.state)
        return Response(_OK, media_type=_JSON)

    async def _models(self, request: Request) -> Response:
        self._authenticate(request.scope)
        hello = (await self._greeting(fresh=True)).hello
        base = self._names(hello)
        models = [self._model_facts(name, hello) for name in base]
        adapters = await self._adapters.usable(self._client)
        models += [self._model_facts(name, hello, parent=base[0]) for name in adapters if name not in base]
        return Response(msgspec.json.encode({"object": "list", "data": models}), media_type=_JSON)

    async def _model(self, request: Request) -> Response:
        self._authenticate(request.scope)
        name = request.path_params["name"]
        _, served, adapter = await self._require_model(name)
        parent = self._names(served.hello)[0] if adapter else None
        return Response(msgspec.json.encode(self._model_facts(name, served.hello, parent=parent)), media_type=_JSON)

    def _model_facts(self, name: str, hello: HelloReply, parent: str | None = None) -> dict[str, Any]:
        facts = {"id": name, "object": "model", "created": 0, "owned_by": "kvd", "max_model_len": hello.limits.max_model_len}
        return facts if parent is None else {**facts, "parent": parent}

    def _names(self, hello: HelloReply) -> tuple[str, ...]:
        return self._served_names or (hello.model,)

    async def _greeting(self, *, fresh: bool = False) -> _Served:
        """What the daemon serves. Only a restart changes it, and the client is greeted anew by the restarted daemon.

        Raises:
            ApiError: no daemon answers, or it does not know its model yet.
        """
        if self._served is None or fresh or not self._is_running(self._served):
            try:
                hello = await self._client.hello(timeout_s=_HEALTH_TIMEOUT_S)
            except KvdError as error:
                raise api_error(error) from error
            if not hello.model:
                raise _unavailable(f"the daemon is {hello.state}", hello.state)
            known = self._served
            # Another model's texts are others; requests that still run keep those that they began with.
            texts = known.texts if known is not None and known.hello.fingerprint == hello.fingerprint else TokenTexts(self._client)
            self._served = _Served(hello, texts)
        return self._served

    def _is_running(self, served: _Served) -> bool:
        """Whether no other daemon has greeted since."""
        server = self._client.server
        return server is not None and server.instance == served.hello.instance

    async def _require_model(self, name: str | None) -> tuple[str, _Served, str]:
        """The model's name as the answer gives it, and the LoRA adapter that it stands for, if it does."""
        served = await self._greeting()
        if name is None:
            return self._names(served.hello)[0], served, ""
        if name in self._names(served.hello):
            return name, served, ""
        adapters = await self._adapters.names(self._client, wanted=name)
        if name in adapters:
            return name, served, name
        served = await self._greeting(fresh=True)
        if name not in self._names(served.hello):
            known = ", ".join([*self._names(served.hello), *adapters])
            raise ApiError(404, f"the model {name!r:.80} does not exist; served: {known}", code="model_not_found", param="model")
        return name, served, ""

    # ---------------------------------------------------------------------------------------------------- generation

    async def answer(self, take: _Take, scope: Scope, receive: Receive, send: Send) -> None:
        """One generation request, from its headers to its last byte.

        Raises:
            ApiError: before anything was sent.
        """
        self._authenticate(scope)
        if self._num_requests >= self._limits.max_requests:
            raise _overloaded(f"{self._num_requests} requests run, the most that this gateway takes")
        self._num_requests += 1
        num_bytes = 0

        def hold(more: int) -> None:
            nonlocal num_bytes
            num_bytes += more
            self._num_body_bytes += more
            if self._num_body_bytes > self._limits.max_body_bytes * _MAX_FULL_BODIES:
                raise _overloaded(f"all requests together hold {self._num_body_bytes} bytes, more than this gateway takes")

        try:
            body = await self._body(scope, receive, hold)
            if body is None:
                return
            job = asyncio.ensure_future(take(body, send))
            watch = asyncio.ensure_future(_disconnected(receive))
            watch.add_done_callback(lambda _: job.cancel())
            # A client that has stopped reading holds up `send`, where no deadline of the daemon's is seen.
            too_late = asyncio.get_running_loop().call_later(self._limits.request_timeout_s + _LATE_S, scope["state"][ABORT])
            try:
                await job
            except asyncio.CancelledError:
                if not watch.done() or watch.cancelled():  # not the client's end: the server stops
                    raise
            finally:
                too_late.cancel()
                watch.cancel()
        except KvdError as error:
            raise api_error(error) from error
        finally:
            self._num_requests -= 1
            self._num_body_bytes -= num_bytes

    async def _chat(self, body: bytes, send: Send) -> None:
        fields = read_fields(body, ChatFields)
        options, messages = chat_options(fields), chat_messages(fields)
        make_form = partial(ChatForm, logprobs=bool(fields.logprobs), prompt_logprobs=fields.prompt_logprobs is not None)
        with blaming(fields):
            await self._generate(fields, make_form, [partial(self._client.chat, messages, **options)], options, send)

    async def _complete(self, body: bytes, send: Send) -> None:
        fields = read_fields(body, CompletionFields)
        options, prompts = completion_options(fields), completion_prompts(fields)
        make_form = partial(
            CompletionForm,
            logprobs=fields.logprobs is not None,
            num_choices=fields.num_choices,
            echo=bool(fields.echo),
            prompt_logprobs=fields.prompt_logprobs is not None,
        )
        asks = [partial(self._client.generate, prompt, **options) for prompt in prompts]
        with blaming(fields):
            await self._generate(fields, make_form, asks, options, send, scores_alone=fields.scores_alone)

    async def _generate(
        self,
        fields: Fields,
        make_form: Callable[[TokenTexts], Form],
        asks: Sequence[_Ask],
        options: GenerateOptions,
        send: Send,
        *,
        scores_alone: bool = False,
    ) -> None:
        name, served, adapter = await self._require_model(fields.model)
        more = {"adapter": adapter} if adapter else {}
        form = make_form(served.texts)
        head = Head(id=form.id_prefix + uuid.uuid4().hex, model=name, fingerprint=f"fp_{served.hello.fingerprint[:12]}")
        check = partial(self._check, served, "logprobs" in options)
        if fields.is_stream:
            streams: list[AsyncStream] = [await ask(stream=True, **more) for ask in asks]
            pieces = Pieces(form, head, with_usage=fields.wants_stream_usage)
            await Streaming(streams, pieces, fields.num_choices, check, send).run()
            return
        completions: list[Completion] = await _all([ask(stream=False, **more) for ask in asks])
        if scores_alone:
            completions = [without_output(completion) for completion in completions]
        for completion in completions:
            await check(completion.choices, completion.prompt)
        await _send_whole(send, 200, form.whole(head, completions))

    async def _check(
        self, served: _Served, wants_logprobs: bool, parts: Sequence[Chunk | Choice], prompt: PromptEcho | None = None
    ) -> None:
        """What must hold before parts of an answer are written. The texts of their tokens are known afterwards.

        Raises:
            ApiError: the daemon cut them short, or they may be another model's: a restarted daemon is asked anew for what the one before it
                had not begun to answer.
        """
        if any(part.finish_reason == "aborted" for part in parts):
            # The API has no word for it: it is a failure that may be tried again.
            raise _unavailable("the answer was cut short: the daemon shuts down", "draining")
        if wants_logprobs:
            await served.texts.learn(each for part in parts for each in part.logprobs)
        if prompt is not None and (wants_logprobs or prompt.logprobs):
            first = [TokenLogprob(token_id=token_id, logprob=0.0) for token_id in prompt.token_ids[:1]]
            await served.texts.learn([*first, *prompt.logprobs])
        if not self._is_running(served) and (await self._greeting()).hello.fingerprint != served.hello.fingerprint:
            raise _unavailable("the daemon was restarted with another model", "interrupted")

    # ------------------------------------------------------------------------------------------------------ the edge

    def _authenticate(self, scope: Scope) -> None:
        if not self._api_keys:
            return
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # Every key is compared, each in constant time: the answer's time tells nothing.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._api_keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(401, "no valid API key; send it as Authorization: Bearer KEY", code="invalid_api_key")

    async def _body(self, scope: Scope, receive: Receive, hold: Callable[[int], None]) -> bytes | None:
        """The whole body, each part told to ``hold`` as it comes; None if the client went away before its end."""
        headers = dict(scope["headers"])
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != _JSON.encode():  # a browser sends this type to a foreign page's server only after asking it
            raise ApiError(415, f"the body's type must be {_JSON}")
        too_large = ApiError(413, f"the body is larger than {self._limits.max_body_bytes} bytes", code="too_large")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise too_large
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    parts.append(part)
                    num_bytes += len(part)
                    hold(len(part))
                    if num_bytes > self._limits.max_body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {_BODY_TIMEOUT_S:.0f} s") from error


_Take = Callable[[bytes, Send], Awaitable[None]]
_Ask = Callable[..., Awaitable[Any]]
"""Begins a generation: ``stream`` says whether its result is a whole answer or a stream."""
_Check = Callable[[Sequence[Chunk | Choice], PromptEcho | None], Awaitable[None]]


class _Endpoint:
    """An ASGI endpoint; what it raises before it has answered becomes the answer."""

    def __init__(self, gateway: Gateway, take: _Take) -> None:
        self._gateway = gateway
        self._take = take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.answer(self._take, scope, receive, send)


class Streaming:
    """Server-sent events. The status waits for the first token, so that a refusal has a status of its own."""

    def __init__(self, streams: Sequence[AsyncStream], pieces: Pieces, num_choices: int, check: _Check, send: Send) -> None:
        """One stream for each prompt; ``check`` is asked before anything of one is sent."""
        self._streams = streams
        self._pieces = pieces
        self._num_choices = num_choices
        self._check = check
        self._send = send
        self._beginning = asyncio.Lock()
        self._has_begun = False

    async def run(self) -> None:
        """Send everything.

        Raises:
            KvdError, ApiError: before anything was sent; later failures are the stream's last event.
        """
        try:
            if len(self._streams) == 1:
                await self._forward(0)
            else:
                await _all([self._forward(number) for number in range(len(self._streams))])
            last = self._pieces.end([stream.completion for stream in self._streams])
        except (KvdError, ApiError) as error:
            if not self._has_begun:
                raise
            failure = error if isinstance(error, ApiError) else api_error(error)
            last = b"data: " + failure.body() + b"\n\n" + DONE
        finally:
            for stream in self._streams:
                await stream.aclose()
        await self._begin()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _forward(self, number: int) -> None:
        stream, first_choice = self._streams[number], number * self._num_choices
        is_first = True
        while chunks := await stream.batch():
            if is_first:
                is_first = False
                await self._check(chunks, stream.prompt)
                self._pieces.begin(number, stream.prompt)
            else:
                await self._check(chunks, None)
            if body := self._pieces.of(chunks, first_choice):
                if not self._has_begun:
                    await self._begin()
                await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _begin(self) -> None:
        """The status and headers, which other prompts' pieces wait for: a client that does not read yet holds up the first of them."""
        async with self._beginning:
            if not self._has_begun:
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self._has_begun = True


async def _all(asked: Sequence[Awaitable[Any]]) -> list[Any]:
    """Every result; the first failure cancels the others."""
    if len(asked) == 1:
        return [await asked[0]]
    tasks = [asyncio.ensure_future(each) for each in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _send_whole(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", _JSON.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})  # when the client has taken most of it


def _overloaded(message: str) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", retry_after_s=_RETRY_S)


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, retry_after_s=_RETRY_S)


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers(), media_type=_JSON)


async def _on_api_error(_request: Request, error: ApiError) -> Response:
    return _error_response(error)


async def _on_fault(_request: Request, _error: Exception) -> Response:
    """The server logs it."""
    return _error_response(ApiError(500, "the gateway met a fault of its own; its log says more", kind="server_error", code="internal"))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    message = f"there is no {request.method} {request.url.path} here" if error.status_code in {404, 405} else error.detail
    response = _error_response(ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None))
    response.headers.update(error.headers or {})
    return response
