"""A target that speaks the OpenAI API: chat completions, streamed."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlsplit

from kvd.bench.event_stream import Exchange
from kvd.bench.measuring import Answer, Ask, BenchError
from kvd.bench.prompts import Messages

_READY_TIMEOUT_S = 2.0
_OK = 200


class OpenAiServer:
    """Any OpenAI-compatible server.

    Args:
        url: its base, with or without ``/v1``.
        model: the name that requests carry; empty: the first that the server lists.
        timeout_s: how long it may be silent within a request.
    """

    def __init__(self, url: str, *, model: str = "", timeout_s: float = 600.0, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise BenchError(f"{url!r} is no http:// or https:// address", kind="usage")
        self.url = url
        self._base = parts._replace(path="", query="", fragment="")
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._model = model
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def ask(self, ask: Ask) -> Answer:
        """See ``Server``. Servers that don't know ``ignore_eos`` may stop early; their shorter answers are counted as they are."""
        body = {
            "model": await self._model_name(),
            "messages": ask.messages,
            "max_tokens": ask.max_tokens,
            "temperature": 0 if ask.seed is None else 1,
            "n": ask.n,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if ask.n == 1:
            del body["n"]
        if ask.seed is not None:
            body["seed"] = ask.seed
        exchange = Exchange(self._base, self._timeout_s)
        answer = Answer(time.perf_counter())
        texts: list[str] = []
        try:
            status = await exchange.open("POST", f"{self._root}/v1/chat/completions", json.dumps(body).encode(), self._headers)
            if status != _OK:
                raise BenchError(f"{self.url} answered {status}: {await exchange.error_text()}", kind="refused")
            async for event in exchange.events():
                self._take(event, ask, answer, texts)
        finally:
            await exchange.close()
        answer.ended_s = time.perf_counter()
        answer.text = "".join(texts)
        answer.completion_tokens = answer.completion_tokens or sum(answer.pieces)
        if not answer.prompt_tokens:
            raise BenchError(f"{self.url} tells no token counts: it must know stream_options.include_usage", kind="refused")
        return answer

    def _take(self, event: dict[str, Any], ask: Ask, answer: Answer, texts: list[str]) -> None:
        if event.get("error"):
            raise BenchError(f"{self.url} failed in the middle of an answer: {event['error']}")
        if usage := event.get("usage"):
            answer.prompt_tokens = usage.get("prompt_tokens") or 0
            answer.completion_tokens = usage.get("completion_tokens") or 0
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            details = usage.get("completion_tokens_details") or {}
            answer.accepted_tokens, rejected = (details.get(f"{which}_prediction_tokens") for which in ("accepted", "rejected"))
            answer.drafted_tokens = None if answer.accepted_tokens is None else answer.accepted_tokens + (rejected or 0)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
            # A piece without text is a token whose character is not complete; before the first text it is only the announcement of the role.
            if text or (answer.arrivals and not choice.get("finish_reason")):
                answer.took(ask, 1)
                texts.append(text)

    async def _model_name(self) -> str:
        if not self._model:
            listed = await self._get("/v1/models")
            try:
                self._model = str(listed["data"][0]["id"])
            except (LookupError, TypeError) as error:
                raise BenchError(f"{self.url} lists no models; name one with --model", kind="refused") from error
        return self._model

    async def is_ready(self) -> bool:
        """``/health`` answers 200 or, where there is none, ``/v1/models`` does."""
        for path in ("/health", "/v1/models"):
            exchange = Exchange(self._base, _READY_TIMEOUT_S)
            try:
                status = await exchange.open("GET", self._root + path)
            except BenchError:
                return False
            finally:
                await exchange.close()
            if status != 404:
                return status == _OK
        return False

    async def version(self) -> str:
        """What ``/version`` (vLLM) or ``/props`` (llama-server) say, else the model's owner."""
        for path, key in (("/version", "version"), ("/props", "build_info")):
            try:
                if found := (await self._get(path)).get(key):
                    return str(found)
            except BenchError:
                continue
        try:
            return str((await self._get("/v1/models"))["data"][0].get("owned_by", "unknown"))
        except (BenchError, LookupError, AttributeError):
            return "unknown"

    async def _get(self, path: str) -> dict[str, Any]:
        exchange = Exchange(self._base, self._timeout_s)
        try:
            status = await exchange.open("GET", self._root + path, headers=self._headers)
            data = await exchange.body()
        finally:
            await exchange.close()
        if status != _OK:
            raise BenchError(f"{self.url} answered {status} to {path}", kind="refused")
        try:
            found = json.loads(data)
        except ValueError as error:
            raise BenchError(f"{self.url} answered {path} with no JSON", kind="refused") from error
        return found if isinstance(found, dict) else {}

    async def pin(self, name: str, messages: Messages) -> bool:  # noqa: ARG002  the protocol's
        """The API has no such thing."""
        return False

    async def pid(self) -> int | None:
        """The API has no such thing."""
        return None

    async def figures(self) -> dict[str, float]:
        """Nothing besides."""
        return {}

    async def aclose(self) -> None:
        """Each request has a connection of its own: nothing is open."""
