"""The messages of the kvd protocol, version 1 (docs/protocol.md is the specification).

A message on the wire is a msgpack map, the *header*, of at most ``MAX_HEADER_BYTES``, followed by raw body frames. The map's key
``type`` names the struct below. Unknown keys are ignored; an unknown type is answered with ``failed`` (``unknown_type``). Each docstring
says what the body frames hold. Ids: ``request_id`` and ``op_id`` are 16 bytes made by the client.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_NESTING = 32
"""Arrays and maps within each other, in a header (itself the first level) and in a structured body."""
ID_BYTES = 16


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """A header. Fields left at their default are not sent."""


# ------------------------------------------------------------------------------------------- client to daemon


class Hello(Message, frozen=True, tag="hello"):
    """Opens a conversation (and again after each reconnect). No body."""

    protocol: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX)
    client: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters; the defaults are the OpenAI API's. ``seed`` None: the daemon draws one."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    """None: none. 0: of the sampled token. k: of the k most likely besides (at most 20)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit after the penalties: -100 to 100) pairs."""
    allowed_token_ids: tuple[int, ...] = ()
    """Where there are any, no other may be sampled."""
    banned_token_ids: tuple[int, ...] = ()


class Beam(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beam search; the terms are those of transformers' ``generate``. ``early_stopping``: True, False, or None for "never"."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | None = False


class Speculation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Speculative decoding. ``mode``: ``auto``, ``off``, ``ngram``, ``draft`` or, empty, as the daemon is set. ``num_draft``: tokens proposed in a step, 0: the daemon's default.

    ``acceptance``: ``coupled`` (the same output as without) or ``rejection`` (the same distribution; for requests without a seed).
    """

    mode: str = ""
    num_draft: int = 0
    acceptance: str = "coupled"


CONSTRAINT_KINDS = ("json_schema", "regex", "choice", "lark", "json")


class Generate(Message, frozen=True, tag="generate"):
    """Begin a request. Body: one frame, by ``input``; then, where ``constraint`` is named and has a source, that; then, with ``tools``, these.

    ``text``: UTF-8, tokenised as it is (with the model's begin-of-sequence token where it has one). ``ids``: packed u32. ``messages``: a msgpack
    array of ``{"role": str, "content": str, …}`` maps for the model's chat template, with ``template_args`` as further variables.
    The source of a constraint is UTF-8, that of ``choice`` a msgpack array of strings. ``tools``: a msgpack array of maps for the chat template.
    """

    request_id: bytes
    input: str
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    n: int = 1
    max_tokens: int | None = None
    """Output tokens per choice; None: what fits ``max_model_len``."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    """Whether the text ends with the stop string that ended it, not before it."""
    credit: int = 0
    """Tokens over all choices that the client takes before it sends ``credit``; 0: the daemon's default window, which it renews itself as
    long as the socket takes the messages."""
    text: bool = True
    """Whether ``tokens`` messages carry text."""
    cache_salt: bytes = b""
    cache_priority: int = 50
    """0 to 100: what leaves memory first when room is needed are blocks of the lowest priority that a use of them gave."""
    cache_ttl_s: float = 0.0
    """Seconds from the request's end after which its priority counts no more; 0: no end."""
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    best_of: int = 0
    """Choices to sample, of which the ``n`` most likely are returned, when all are over; 0: ``n``."""
    beam: Beam | None = None
    """Beam search; the ``n`` best beams are returned, when it is over."""
    speculation: Speculation | None = None
    """None: as the daemon is set."""
    constraint: str = ""
    """What the output must match: ``json_schema``, ``regex``, ``choice``, ``lark``, ``json`` (any JSON; no source); empty: nothing."""
    bad_words: tuple[str, ...] = ()
    """Texts that the output may not contain, as the tokenizer spells them, after a space and without one; spelt in other tokens they may."""
    prompt_logprobs: int | None = None
    """As ``Sampling.logprobs``, for the prompt's tokens; answered by ``prompt``."""
    echo: bool = False
    """Whether ``prompt`` tells the prompt's tokens and text."""
    truncate_prompt: int = 0
    """Keep only so many of the prompt's last tokens; -1: as many as ``max_model_len`` and ``max_tokens`` leave; 0: all."""
    tools: bool = False
    """Whether tools are sent, for the chat template; an answer is text in any case."""
    priority: int = 0
    """Class in which it waits; lower is sooner."""
    deadline_s: float = 0.0
    """Seconds from its arrival after which it fails with ``deadline_exceeded``; 0: none."""
    queue_timeout_s: float = 0.0
    """Seconds from its arrival after which it fails with ``queue_timeout`` unless it has begun to run; 0: none."""
    adapter: str = ""
    """Name of a LoRA adapter; empty: the base model."""


class Abort(Message, frozen=True, tag="abort"):
    """End a request; answered by ``finished`` with reason ``aborted``. No body."""

    request_id: bytes


class Credit(Message, frozen=True, tag="credit"):
    """Take ``num_tokens`` further tokens of a request. No body."""

    request_id: bytes
    num_tokens: int


class Pin(Message, frozen=True, tag="pin"):
    """Compute, keep and persist a prefix under a name. Body as for ``generate``.

    For ``messages`` the prefix is what two renderings with different user turns after these messages share.
    """

    op_id: bytes
    name: str
    input: str
    priority: int = 50
    cache_salt: bytes = b""
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    ttl_s: float = 0.0
    """Seconds after which the pin ends by itself, as ``unpin`` would end it, whether the daemon runs then or not; 0: never."""
    adapter: str = ""
    """Name of the LoRA adapter of the requests that will use it; empty: the base model."""


class Unpin(Message, frozen=True, tag="unpin"):
    op_id: bytes
    name: str


class Forget(Message, frozen=True, tag="forget"):
    """Have a tenant, a salt or a prefix leave memory and disk for good; answered by ``result`` {blocks, pins} when that is durable.

    ``cache_salt`` None: every salt of the tenant. ``input`` empty: everything of it, and no body; else one body frame as for ``pin``: what begins with
    that prefix's whole blocks. ``tenant``, for operators alone: another one than the client's own.
    """

    op_id: bytes
    tenant: str | None = None
    cache_salt: bytes | None = None
    input: str = ""
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)


class LoadAdapter(Message, frozen=True, tag="load_adapter"):
    """Read a LoRA adapter of the daemon's adapter directory, again if it is loaded; answered by ``result`` when requests run with what was read. No body."""

    op_id: bytes
    name: str


class UnloadAdapter(Message, frozen=True, tag="unload_adapter"):
    """Let an adapter go, when the requests that run with it are over; answered at once by ``result``. No body."""

    op_id: bytes
    name: str


class ListAdapters(Message, frozen=True, tag="list_adapters"):
    """Which adapters are loaded, and which could be. Answered by ``result``. No body."""

    op_id: bytes


class Prefixes(Message, frozen=True, tag="prefixes"):
    """List the pins and the hottest prefixes. Answered by ``result``."""

    op_id: bytes


class Tokenize(Message, frozen=True, tag="tokenize"):
    """Body as for ``generate`` with ``text`` or ``messages``. Answered by ``result`` {count}; its body: packed u32 ids."""

    op_id: bytes
    input: str
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)


class Detokenize(Message, frozen=True, tag="detokenize"):
    """Body: packed u32 ids. Answered by ``result`` {count}; its body: a msgpack array with the bytes of each id, in order."""

    op_id: bytes


class Status(Message, frozen=True, tag="status"):
    """Answered by ``result`` in every state of the daemon."""

    op_id: bytes


class Stats(Message, frozen=True, tag="stats"):
    """Answered by ``result`` in every state of the daemon."""

    op_id: bytes


class Checkpoint(Message, frozen=True, tag="checkpoint"):
    """Persist every hot block; answered by ``result`` {blocks, bytes} when that is durable."""

    op_id: bytes


class Drain(Message, frozen=True, tag="drain"):
    """Stop the daemon gracefully: answered by ``result`` when it has stopped accepting; it exits when the running requests are over."""

    op_id: bytes
    timeout_s: float | None = None


class Ping(Message, frozen=True, tag="ping"):
    """Answered by ``pong`` in every state. Sent as heartbeat too."""

    nonce: int = 0


ClientMessage = (
    Hello
    | Generate
    | Abort
    | Credit
    | Pin
    | Unpin
    | Forget
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | Prefixes
    | Tokenize
    | Detokenize
    | Status
    | Stats
    | Checkpoint
    | Drain
    | Ping
)

# ------------------------------------------------------------------------------------------- daemon to client


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds that a client meets."""

    max_message_bytes: int
    max_model_len: int
    max_choices: int
    max_stop_strings: int
    default_credit: int


class HelloReply(Message, frozen=True, tag="hello_reply"):
    """``instance`` is drawn at each start of the daemon: another one means a restart. Model facts are empty until they are known."""

    instance: bytes
    version: str
    protocol: tuple[int, int]
    state: str
    limits: Limits
    model: str = ""
    fingerprint: str = ""
    vocab_size: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(Message, frozen=True, tag="tokens"):
    """Tokens of one choice. Body: the ids as packed u32, then, where text was asked for, a UTF-8 frame of the text that became final with
    them (which may lag behind the ids by an unfinished character or a possible stop string)."""

    request_id: bytes
    choice: int
    first_index: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Prompt(Message, frozen=True, tag="prompt"):
    """What was asked for of the prompt by ``echo`` or ``prompt_logprobs``; before the first ``tokens``. Body: its ids as packed u32, then its text as UTF-8.

    A long prompt's ``logprobs`` come in several messages: from ``first_position`` on, 1 at first, for nothing precedes position 0. The ids and the text
    are in the first alone.
    """

    request_id: bytes
    first_position: int = 1
    logprobs: tuple[TokenLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. ``cached_tokens``: every prompt token that was matched in the prefix cache. ``restored_tokens``: those of them whose bytes came from disk since
    this start and are used for the first time or were loaded for this request. ``recomputed_tokens``: those of them that the daemon computed again
    at this start, from a pin's recipe or a logged prefix, and are used for the first time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Proposed by speculation; ``accepted_tokens`` of them were what the model said, too. Both are left out where nothing was proposed."""
    accepted_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds in the daemon, from the arrival of the request: until it first ran, its first token, its end."""

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


class ChoiceEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one choice ended. ``num_tokens`` are its output tokens that count; ``text_tail`` the text not yet sent in ``tokens``."""

    choice: int
    finish_reason: str
    num_tokens: int
    text_tail: str = ""
    cumulative_logprob: float | msgspec.UnsetType = msgspec.UNSET
    """Nats; where log-probabilities, ``best_of`` or ``beam`` were asked for, else left out."""
    score: float | msgspec.UnsetType = msgspec.UNSET
    """A beam's: its log-probability over (tokens) ** ``length_penalty``; else left out."""


class Finished(Message, frozen=True, tag="finished"):
    """The one terminal message of a request that did not fail. ``finish_reason`` of a choice: ``stop``, ``length`` or ``aborted``. No body."""

    request_id: bytes
    choices: tuple[ChoiceEnd, ...]
    usage: Usage
    timings: Timings
    seed: int = 0


class Failed(Message, frozen=True, tag="failed"):
    """The one terminal message of a request (``request_id``) or operation (``op_id``) that failed; both empty where the message could not be
    read that far."""

    code: str
    message: str
    request_id: bytes = b""
    op_id: bytes = b""
    retryable: bool = False
    retry_after_s: float = 0.0


class Result(Message, frozen=True, tag="result"):
    """The answer to an operation. Body: one msgpack map (and for ``tokenize`` the packed ids)."""

    op_id: bytes


class Pong(Message, frozen=True, tag="pong"):
    nonce: int = 0
    instance: bytes = b""
    state: str = ""


ServerMessage = HelloReply | Prompt | Tokens | Finished | Failed | Result | Pong
