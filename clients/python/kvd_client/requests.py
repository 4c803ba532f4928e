"""From Python arguments to messages: what ``Client`` and ``AsyncClient`` share of building calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from kvd_client.calls import Answer, Call, Deliver
from kvd_client.choosing import take_beam
from kvd_client.constraining import take_constraint
from kvd_client.drafting import take_speculation
from kvd_client.errors import BadRequest, TooLarge
from kvd_client.output_options import take_rules, take_stop_ids, take_tools
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Forget, Generate, Message, Pin, Sampling, Tokenize
from kvd_client.results import pack_tokens
from kvd_client.token_ids import checked_ids

ChatMessages = Sequence[Mapping[str, Any]]
"""``{"role": "system" | "user" | "assistant" | …, "content": str, …}`` maps, oldest first."""

Prompt = str | Sequence[int]
"""Text, tokenised as it is, or token ids."""

DEFAULT_WINDOW_TOKENS = 512

M = TypeVar("M", bound=Message)


class GenerateOptions(TypedDict, total=False):
    """Parameters of ``generate`` and ``chat``; those left out have the defaults given here.

    Sampling, as in the OpenAI API and its peers: ``temperature`` (1.0; 0 is greedy), ``top_k`` (0: all), ``top_p`` (1.0), ``min_p`` (0.0),
    ``repetition_penalty`` (1.0), ``presence_penalty`` (0.0), ``frequency_penalty`` (0.0), ``seed`` (None: the daemon draws one, see
    ``Completion.seed``), ``logprobs`` (None: none; 0: of the sampled token; k: of the k most likely besides). ``logit_bias`` (a mapping from token ids to
    what is added to their logits, or pairs), ``allowed_token_ids`` (no others; not empty), ``banned_token_ids``, ``bad_words`` (a text or several that must not come out).

    Length and end: ``max_tokens`` (None: what fits the model), ``min_tokens`` (0), ``stop`` (a string or several; part of the text only with ``include_stop``),
    ``stop_token_ids``, ``ignore_eos`` (False).

    The prompt: ``truncate_prompt`` (0: no; so many of its last tokens are kept, -1: what fits), ``echo`` (False) and ``prompt_logprobs`` (None; as ``logprobs``)
    for :attr:`~kvd_client.results.Completion.prompt`, ``tools`` (mappings for the chat template; the answer is text).

    ``n`` (1) asks for so many answers that share the prompt's computation. ``best_of`` (0: ``n``): sample so many and return the ``n`` most likely. ``beam_width``
    (None: no beam search), ``length_penalty`` (1.0), ``early_stopping`` (False, True or ``"never"``): beam search as in transformers' ``generate``; the
    ``n`` best beams are returned. Answers of either come as a whole at the end, also in a stream. ``text`` (True): False sends ids alone. ``cache_salt`` (empty): only
    requests with the same salt share cached prefixes. ``cache_priority`` (50; 0 to 100): blocks of the lowest leave the daemon's memory first;
    ``cache_ttl_s`` (0: no end): seconds from the request's end after which that priority counts no more. ``template_args``: further variables
    of the chat template. ``window_tokens`` (512): how
    many tokens of a stream may wait unread before the daemon stops computing them.

    ``priority`` (0; -10 to 10): the class in which it waits, lower is sooner. ``deadline_s`` (0: none): seconds from the daemon's receipt after which it fails with
    :class:`~kvd_client.errors.DeadlineExceeded`, waiting or running. ``queue_timeout_s`` (0: none): seconds after which it fails with
    :class:`~kvd_client.errors.QueueTimeout` if it has not begun to run.

    At most one of ``json_schema`` (a mapping or JSON text), ``regex``, ``choice`` (strings), ``lark`` (a grammar) and ``json`` (True: any JSON value): what the whole
    answer must match, see docs/structured-output.md of the daemon. An answer that ``max_tokens`` cuts off is only the beginning of a match.

    ``speculation`` (None: as the daemon is set up; ``"auto"``, ``"off"``, ``"ngram"`` or ``"draft"``): how tokens are proposed ahead of the model; ``num_draft`` (0: the
    daemon's default) of them at most in a step. ``draft_acceptance`` (``"coupled"``: the answer is the one without; or ``"rejection"``: one of the same distribution,
    without a seed). The latter two say how, and switch nothing on by themselves; see docs/speculation.md of the daemon.

    ``adapter`` (empty: the base model): the name of a LoRA adapter of the daemon's; it is loaded if it is not.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    bad_words: str | Sequence[str]
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    truncate_prompt: int
    echo: bool
    prompt_logprobs: int | None
    tools: Sequence[Mapping[str, Any]]
    n: int
    best_of: int
    beam_width: int | None
    length_penalty: float
    early_stopping: bool | Literal["never"]
    text: bool
    cache_salt: str | bytes
    cache_priority: int
    cache_ttl_s: float
    template_args: Mapping[str, Any]
    window_tokens: int
    priority: int
    deadline_s: float
    queue_timeout_s: float
    adapter: str
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    lark: str | None
    json: bool
    speculation: Literal["auto", "off", "ngram", "draft"] | None
    num_draft: int
    draft_acceptance: Literal["coupled", "rejection"]


_SAMPLING = frozenset(Sampling.__struct_fields__)


def generate_message(input_kind: str, *, stream: bool, options: GenerateOptions) -> Generate:
    """The header of a generation. A stream states its credit; a whole answer leaves that to the daemon.

    Raises:
        TypeError: an unknown option.
        BadRequest: an option that can't be sent.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option {min(unknown)!r}; there are {', '.join(GenerateOptions.__annotations__)}")
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in _SAMPLING}
    fields: dict[str, Any] = {name: value for name, value in options.items() if name not in _SAMPLING}
    window_tokens = fields.pop("window_tokens", DEFAULT_WINDOW_TOKENS)
    stop = fields.pop("stop", ())
    if "cache_salt" in fields:
        fields["cache_salt"] = salt_bytes(fields["cache_salt"])
    constraint, _ = take_constraint(fields)
    tools, _ = take_tools(fields)
    take_rules(sampling, fields)
    stop_token_ids = take_stop_ids(fields)
    n = fields.get("n", 1)
    for name, value in (("n", n), ("window_tokens", window_tokens)):
        if not isinstance(value, int):
            raise BadRequest(f"{name} is {value!r:.40}; it must be an int", code=Code.BAD_REQUEST)
        if value < 1:
            raise BadRequest(f"{name} is {value}; it must be at least 1", code=Code.BAD_REQUEST)
    return checked(
        Generate(
            request_id=bytes(16),
            input=input_kind,
            sampling=Sampling(**sampling),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=stop_token_ids,
            beam=take_beam(fields),
            speculation=take_speculation(fields),
            constraint=constraint,
            tools=tools,
            # A step yields a token per choice: with less than two steps' worth the daemon would wait for every credit.
            credit=max(window_tokens, 2 * n) if stream else 0,
            template_args=dict(fields.pop("template_args", {})),
            **fields,
        )
    )


def further_bodies(options: GenerateOptions) -> tuple[bytes, ...]:
    """The body frames of a generation behind its input's.

    Raises:
        BadRequest: one can't be sent.
    """
    return (*take_constraint(dict(options))[1], *take_tools(dict(options))[1])


def generation_call(kind: str, body: bytes, options: GenerateOptions, *, stream: bool, deliver: Deliver) -> tuple[Call, int]:
    """The call of a generation whose input is ``kind`` with ``body``, and its stream credit in tokens.

    Raises:
        TypeError: an unknown option.
        BadRequest: an option that can't be sent.
    """
    message = generate_message(kind, stream=stream, options=options)
    answer = Answer(message.n, stream=stream, prompt_logprobs=message.prompt_logprobs is not None)
    return Call(message, body, *further_bodies(options), deliver=deliver, answer=answer), message.credit


def pin_message(
    name: str, input_kind: str, *, priority: int, ttl_s: float, cache_salt: str | bytes, adapter: str, template_args: Mapping[str, Any]
) -> Pin:
    """The header of a pin."""
    return checked(
        Pin(
            op_id=bytes(16),
            name=name,
            input=input_kind,
            priority=priority,
            ttl_s=ttl_s,
            cache_salt=salt_bytes(cache_salt),
            adapter=adapter,
            template_args=dict(template_args),
        )
    )


def forget_message(input_kind: str, *, tenant: str | None, cache_salt: str | bytes | None, template_args: Mapping[str, Any]) -> Forget:
    """The header of ``forget``."""
    salt = None if cache_salt is None else salt_bytes(cache_salt)
    return checked(Forget(op_id=bytes(16), tenant=tenant, cache_salt=salt, input=input_kind, template_args=dict(template_args)))


def salt_bytes(cache_salt: str | bytes) -> bytes:
    """A salt as the wire has it; text is UTF-8."""
    return cache_salt.encode() if isinstance(cache_salt, str) else cache_salt


def tokenize_message(input_kind: str, template_args: Mapping[str, Any]) -> Tokenize:
    """The header of ``tokenize``."""
    return checked(Tokenize(op_id=bytes(16), input=input_kind, template_args=dict(template_args)))


def prompt_body(prompt: Prompt | None, messages: ChatMessages | None = None) -> tuple[str, bytes]:
    """The ``input`` kind and the body frame of a prompt or of chat messages.

    Raises:
        TypeError: both or neither are given.
        BadRequest: they can't be sent. Bytes are neither text nor ids, and neither floats nor truth values are ids.
    """
    if (prompt is None) == (messages is None):
        raise TypeError("give either a prompt or messages")
    try:
        if isinstance(prompt, str):
            return "text", prompt.encode()
        if prompt is not None:
            return "ids", pack_tokens(checked_ids(prompt))
        assert messages is not None
        return "messages", codec.pack_body([dict(message) for message in messages])
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the prompt can't be sent: {error}", code=Code.BAD_REQUEST) from error


def checked(message: M) -> M:
    """The message, which the daemon will be able to read.

    Raises:
        BadRequest: it will not; :class:`TooLarge` where only the header's length is in the way.
    """
    try:
        codec.check(message)
    except codec.ProtocolError as error:
        kind = TooLarge if error.code is Code.TOO_LARGE else BadRequest
        raise kind(str(error), code=error.code) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(f"the request can't be sent: {error}", code=Code.BAD_REQUEST) from error
    return message
