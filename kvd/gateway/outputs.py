"""Which tokens may come out, what is told of the prompt, and tools: fields of OpenAI's and vLLM's, and how they become kvd's options."""

from __future__ import annotations

from typing import Any

import msgspec

from kvd.gateway.constraints import ConstraintFields
from kvd.gateway.errors import ApiError, unsupported

_MAX_ID = (1 << 32) - 1
_MAX_ID_DIGITS = len(str(_MAX_ID))


class OutputFields(ConstraintFields, frozen=True, kw_only=True):
    """The fields that both endpoints take. ``banned_token_ids`` is an extension of kvd's own, the others but ``logit_bias`` are vLLM's."""

    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None


class ToolFields(msgspec.Struct, frozen=True, kw_only=True):
    """A function as OpenAI describes it."""

    type: str
    function: dict[str, Any]


def output_options(fields: OutputFields, *, is_stream: bool, has_stop: bool) -> dict[str, Any]:
    """Options of ``kvd_client``'s ``generate`` and ``chat``.

    Raises:
        ApiError: one can't be honoured.
    """
    options: dict[str, Any] = {}
    if fields.logit_bias:
        options["logit_bias"] = _logit_bias(fields.logit_bias)
    if fields.allowed_token_ids is not None and not fields.allowed_token_ids:
        raise ApiError(
            400, "allowed_token_ids is empty: no token could be sampled; leave it away where any may be", param="allowed_token_ids"
        )
    for name in ("allowed_token_ids", "banned_token_ids", "bad_words"):
        if value := getattr(fields, name):
            options[name] = value
    if fields.include_stop_str_in_output and has_stop:
        options["include_stop"] = True
    if fields.truncate_prompt_tokens is not None:
        if fields.truncate_prompt_tokens == 0:
            raise ApiError(400, "truncate_prompt_tokens is 0; it must be at least 1, or -1 for what fits", param="truncate_prompt_tokens")
        options["truncate_prompt"] = fields.truncate_prompt_tokens
    if fields.prompt_logprobs is not None:
        if is_stream:
            raise unsupported("prompt_logprobs", "a stream has no place for them; leave stream away")
        options["prompt_logprobs"] = fields.prompt_logprobs
    return options


def tool_options(tools: list[ToolFields] | None, tool_choice: str | dict[str, Any] | None) -> dict[str, Any]:
    """The tools that the model is told of; it may write calls as its template has them, which stay text.

    Raises:
        ApiError: a call is demanded, which a free answer can't promise.
    """
    if tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "an answer is text, and no call can be demanded; use none or auto, or response_format for a form")
    if not tools or tool_choice == "none":
        return {}
    return {"tools": [{"type": tool.type, "function": tool.function} for tool in tools]}


def _logit_bias(by_name: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in by_name.items():
        token_id = _token_id(name)
        if token_id in bias:
            raise ApiError(400, f"logit_bias has the token id {token_id} twice; each may stand there once", param="logit_bias")
        bias[token_id] = value
    return bias


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit()) or len(name) > _MAX_ID_DIGITS or int(name) > _MAX_ID:
        raise ApiError(400, f"logit_bias has the key {name!r:.40}; keys are token ids", param="logit_bias")
    return int(name)
