"""What the API's requests hold, and how it becomes a kvd request.

Unknown fields are ignored, as ``user`` and other notes for accounting are. Fields that are known to change the answer and can't be honoured are
refused by name. Ranges are the daemon's to check: its refusal names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from kvd_client.requests import GenerateOptions

from kvd.gateway.constraints import constraint_options
from kvd.gateway.errors import ApiError, invalid_field
from kvd.gateway.outputs import OutputFields, ToolFields, output_options, tool_options
from kvd.gateway.refused import check_refused

_MAX_PROMPTS = 64
_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat's is what fits the model."""
_SEED_MASK = (1 << 64) - 1
_MAX_INT = (1 << 63) - 1
_MAX_TOKEN_ID = (1 << 32) - 1


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class SpeculationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An extension, as the daemon's protocol has it: a mode alone, or these; without a mode the daemon's own holds."""

    mode: str | None = None
    num_draft: int | None = None
    acceptance: str | None = None

    def options(self) -> dict[str, Any]:
        """As the client takes them."""
        given = {"speculation": self.mode, "num_draft": self.num_draft, "draft_acceptance": self.acceptance}
        return {name: value for name, value in given.items() if value is not None}


class Fields(OutputFields, frozen=True, kw_only=True):
    """What both endpoints take. ``top_k`` to ``cache_salt`` are extensions under vLLM's names."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    priority: int | None = None
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    speculation: str | SpeculationFields | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def is_stream(self) -> bool:
        return bool(self.stream)

    @property
    def wants_stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatFields(Fields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolFields] | None = None
    tool_choice: str | dict[str, Any] | None = None


class CompletionFields(Fields, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def scores_alone(self) -> bool:
        """Nothing is to be generated: the prompt comes back, with what it is worth. One token is, for the daemon's sake, and not told."""
        return bool(self.echo) and self.max_tokens == 0


F = TypeVar("F", bound=Fields)


def read_fields(body: bytes, kind: type[F]) -> F:
    """A request's fields.

    Raises:
        ApiError: no JSON object, a field of the wrong type, or one that can't be honoured.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, "the body is not a JSON object")
    check_refused(raw, is_chat=issubclass(kind, ChatFields))
    try:
        fields = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error
    _check_integers(fields)
    if fields.num_choices < 1:
        raise ApiError(400, f"n is {fields.n}; it must be at least 1", param="n")
    if fields.best_of is not None and fields.best_of < fields.num_choices:
        raise ApiError(400, f"best_of is {fields.best_of}; it must be at least n ({fields.num_choices})", param="best_of")
    if not fields.use_beam_search:
        for name, neutral in (("length_penalty", (None, 1)), ("early_stopping", (None, False))):
            if getattr(fields, name) not in neutral:
                raise ApiError(400, f"{name} is for beams; set use_beam_search", param=name)
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options are for streams; set stream", param="stream_options")
    return fields


def chat_options(fields: ChatFields) -> GenerateOptions:
    """Options of ``kvd_client``'s ``chat``.

    Raises:
        ApiError: fields contradict each other.
    """
    options = _options(fields)
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if fields.logprobs:
        options["logprobs"] = fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    if fields.chat_template_kwargs:
        _check_packs("chat_template_kwargs", fields.chat_template_kwargs)
        options["template_args"] = fields.chat_template_kwargs
    if fields.tools:
        _check_packs("tools", [tool.function for tool in fields.tools])
    options |= tool_options(fields.tools, fields.tool_choice)  # type: ignore[typeddict-item]  # names and types are those of GenerateOptions
    return options


def completion_options(fields: CompletionFields) -> GenerateOptions:
    """Options of ``kvd_client``'s ``generate``.

    Raises:
        ApiError: fields contradict each other.
    """
    options = _options(fields)
    options["max_tokens"] = _COMPLETION_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    if fields.logprobs is not None:
        options["logprobs"] = fields.logprobs
    if fields.echo:
        options["echo"] = True
        if fields.logprobs is not None:
            if fields.prompt_logprobs is not None:
                raise ApiError(400, "logprobs with echo tell the prompt's too; leave prompt_logprobs away", param="prompt_logprobs")
            options["prompt_logprobs"] = fields.logprobs
    if fields.scores_alone:
        if fields.is_stream:
            raise ApiError(400, "max_tokens is 0, so that there is nothing to stream; leave stream away", param="max_tokens")
        options["max_tokens"] = 1
        options["text"] = False  # so that the prompt's text is all that there is
    return options


def chat_messages(fields: ChatFields) -> list[dict[str, Any]]:
    """The conversation as the daemon takes it: content parts joined to text, OpenAI's ``developer`` under the name that chat templates know.

    Raises:
        ApiError: it is empty, or holds something that is not text or can't be sent.
    """
    if not fields.messages:
        raise ApiError(400, "messages is empty", param="messages")
    return [_message(message, number) for number, message in enumerate(fields.messages)]


def completion_prompts(fields: CompletionFields) -> Sequence[str | list[int]]:
    """One prompt or several.

    Raises:
        ApiError: none, too many, or ids that are none.
    """
    prompt = fields.prompt
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(each) for each in prompt}
    if len(kinds) > 1:
        raise ApiError(400, "prompt mixes strings and token ids", param="prompt")
    if kinds == {int}:
        _check_ids(prompt)  # type: ignore[arg-type]  # of ids alone
        return (prompt,)  # type: ignore[return-value]  # of ids alone
    if not 1 <= len(prompt) <= _MAX_PROMPTS:
        raise ApiError(400, f"prompt holds {len(prompt)} prompts; there must be 1 to {_MAX_PROMPTS}", param="prompt")
    if kinds == {list}:
        for ids in prompt:
            _check_ids(ids)  # type: ignore[arg-type]  # each is a list of ids
    return prompt  # type: ignore[return-value]  # each is a string, or each a list of ids


_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "cache_salt",
    "priority",
    "deadline_s",
    "queue_timeout_s",
    "stop",
)
"""Fields that the daemon knows under the same name."""


def _options(fields: Fields) -> GenerateOptions:
    options: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(fields, name)) is not None}
    if fields.top_k == -1:  # vLLM's word for all
        options["top_k"] = 0
    if fields.use_beam_search:
        options |= _beam_options(fields)
    elif fields.best_of is not None and fields.best_of > fields.num_choices:
        options["best_of"] = fields.best_of
    options |= constraint_options(fields)
    options |= output_options(fields, is_stream=fields.is_stream, has_stop=bool(fields.stop))
    if isinstance(fields.speculation, str):
        options["speculation"] = fields.speculation
    elif fields.speculation is not None:
        options |= fields.speculation.options()
    if fields.seed is not None:
        options["seed"] = fields.seed & _SEED_MASK  # OpenAI's seeds are signed
    return options  # type: ignore[return-value]  # names and types are those of GenerateOptions


def _beam_options(fields: Fields) -> dict[str, Any]:
    """Under vLLM's names: ``best_of`` is the beam's width, ``n`` by default."""
    options: dict[str, Any] = {"beam_width": fields.num_choices if fields.best_of is None else fields.best_of}
    if fields.length_penalty is not None:
        options["length_penalty"] = fields.length_penalty
    if fields.early_stopping is not None:
        if fields.early_stopping not in (True, False, "never"):
            raise ApiError(400, "early_stopping must be true, false or 'never'", param="early_stopping")
        options["early_stopping"] = fields.early_stopping
    return options


def _check_integers(fields: Fields) -> None:
    """What does not fit 64 bits can't be sent to the daemon. It knows the ranges of all else."""
    for name in fields.__struct_fields__:
        value = getattr(fields, name)
        top = _SEED_MASK if name == "seed" else _MAX_INT
        for number in value if name.endswith("token_ids") and value else (value,):
            if isinstance(number, int) and not -_MAX_INT - 1 <= number <= top:
                raise ApiError(400, f"{name} is {number!s:.40}; it must be an integer of at most 64 bits", param=name)


def _check_ids(prompt: Sequence[int]) -> None:
    for token_id in (min(prompt, default=0), max(prompt, default=0)):
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            raise ApiError(400, f"prompt has the token id {token_id!s:.40}; ids are from 0 to {_MAX_TOKEN_ID}", param="prompt")


def _check_packs(name: str, value: Any) -> None:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise ApiError(400, f"{name} holds an integer of more than 64 bits", param=name) from error


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    for value in message.values():
        if not isinstance(value, str):
            _check_packs("messages", value)
    content = message.get("content")
    role = message.get("role")
    if isinstance(content, str) and role != "developer":
        return message
    if isinstance(content, list):
        content = "\n".join(_part(part, number) for part in content)
    elif content is None:
        content = ""
    return {**message, "content": content, "role": "system" if role == "developer" else role}


def _part(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ApiError(400, f"messages[{number}].content holds a part that is not text; this server takes text alone", param="messages")
