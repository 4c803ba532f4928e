"""What crosses the inbox and the outbox: self-contained frozen messages between the edge and the engine.

The edge (transport and text) may be a thread or a process of its own; each message here can be encoded by msgspec as it
is. Ids are packed u32, text appears nowhere but in a pin's recipe, which the engine only carries.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvd.types import BeamSearch, Constraint, SamplingParams, Speculation, TokenLogprobs


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A pin as data: enough to compute its prefix again on another model, dtype or machine.

    Exactly one of ``messages``, ``text`` and neither (ids alone) is the source. ``token_ids`` (packed) is what the source gave
    under ``tokenizer_digest``; with another tokenizer the source is rendered anew, and a pin of ids alone is kept but not computed.
    """

    name: str
    """``TENANT/NAME`` for a tenant's, else the name alone: names are a tenant's own."""
    token_ids: bytes
    tokenizer_digest: bytes
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    template_args: dict[str, Any] = {}
    tenant_salt: bytes = b""
    adapter: bytes = b""
    adapter_name: str = ""
    """What names the adapter: at a start its digest is that of what stands under the name then."""
    priority: int = 50
    created_unix_s: float = 0.0
    expires_unix_s: float = 0.0
    """When the pin ends by itself; 0: never."""

    def has_expired(self, now_unix_s: float) -> bool:
        """Whether the pin has ended by now."""
        return 0 < self.expires_unix_s <= now_unix_s


# ---------------------------------------------------------------------------------------------- edge to engine


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin a request. ``max_tokens`` counts output tokens per choice; the edge has resolved every default."""

    request_id: bytes
    token_ids: bytes
    sampling: SamplingParams
    max_tokens: int
    may_shorten: bool = False
    """The client named no ``max_tokens``: fewer will do where the pool has no room for so many."""
    num_choices: int = 1
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the choice with ``stop``; the token itself is emitted (the edge drops its text)."""
    credit_tokens: int = 0
    """Tokens, over all choices, that may be sent before the next ``Grant``."""
    cache_priority: int = 50
    """0 to 100: how long its blocks stay in memory beside others; the lowest leave first."""
    cache_ttl_s: float = 0.0
    """Seconds from the request's end after which ``cache_priority`` counts no more; 0: it counts for ever."""
    tenant_salt: bytes = b""
    adapter: bytes = b""
    """Digest of a LoRA adapter; empty: the base model, or what ``adapter_name`` is the name of."""
    adapter_name: str = ""
    tenant: str = ""
    """Whose tokens it counts to, between tenants that wait."""
    priority: int = 0
    """Class in which it waits; lower is sooner."""
    deadline_s: float = 0.0
    """Seconds from now after which it fails with ``deadline_exceeded``; 0: none."""
    queue_timeout_s: float = 0.0
    """Seconds from now after which it fails with ``queue_timeout`` unless it has begun to run; 0: none."""
    best_of: int = 0
    """Sample so many choices and tell the ``num_choices`` most likely of them, when all are over; 0: all that are sampled."""
    beam: BeamSearch | None = None
    speculation: Speculation | None = None
    """None: the daemon's default."""
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    """As ``SamplingParams.num_logprobs``, for the prompt."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request now; answered by ``RequestDone`` with reason ``aborted`` (nothing if it is unknown or over)."""

    request_id: bytes


class FinishChoice(msgspec.Struct, frozen=True, tag=True):
    """The edge found a stop string: the choice is over, later tokens are not wanted."""

    request_id: bytes
    choice: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """More stream credit."""

    request_id: bytes
    num_tokens: int


class PinPrefix(msgspec.Struct, frozen=True, tag=True):
    """Compute, keep and persist a prefix. Answered by ``OpDone`` when the recipe is durable."""

    op_id: bytes
    recipe: Recipe


class Unpin(msgspec.Struct, frozen=True, tag=True):
    op_id: bytes
    name: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter from its directory, again if it is loaded. Answered by ``OpDone`` when requests run with what was read."""

    op_id: bytes
    name: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Let an adapter go, when the requests that run with it are over. Answered at once."""

    op_id: bytes
    name: str


class ListAdapters(msgspec.Struct, frozen=True, tag=True):
    """Answered by ``OpDone`` with the adapters that are loaded or on disk."""

    op_id: bytes


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """From the executor: the read ``read_id`` of an adapter is over. ``error``: why there is none; ``is_missing``: because there is none of that name."""

    read_id: int
    digest: bytes = b""
    rank: int = 0
    num_bytes: int = 0
    error: str = ""
    is_missing: bool = False


class AdapterNames(msgspec.Struct, frozen=True, tag=True):
    """From the executor: the adapters on disk, for the operation ``op_id``."""

    op_id: bytes
    names: tuple[str, ...] = ()
    error: str = ""


class Query(msgspec.Struct, frozen=True, tag=True):
    """``what`` is ``status``, ``stats`` or ``prefixes`` (those of ``tenant``). Answered by ``OpDone`` with that report."""

    op_id: bytes
    what: str
    tenant: str = ""


class CheckpointNow(msgspec.Struct, frozen=True, tag=True):
    """Persist every hot block and wait until it is durable."""

    op_id: bytes


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Stop accepting, finish or abort by the deadline, checkpoint, mark clean, stop. ``op_id`` empty: from a signal."""

    op_id: bytes
    timeout_s: float


class RecipeDurable(msgspec.Struct, frozen=True, tag=True):
    """From storage: the recipe change of ``op_id`` is on disk (``error`` empty) or failed."""

    op_id: bytes
    error: str = ""


class ForgetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Forget everything of ``tenant`` (``tenant_salt`` None), of one of its salts, or what begins with the whole blocks of ``token_ids`` (empty: everything).

    Answered by ``OpDone`` when it has left memory and disk for good.
    """

    op_id: bytes
    tenant: str
    tenant_salt: bytes | None = None
    token_ids: bytes = b""


class ForgetDone(msgspec.Struct, frozen=True, tag=True):
    """From storage: what ``op_id`` asked to be forgotten has left the disk (``error`` empty), or it failed. ``num_blocks`` that storage knew.

    ``op_id`` empty: nobody waits, a forget that was not done was tried again.
    """

    op_id: bytes
    num_blocks: int = 0
    error: str = ""


class CheckpointDone(msgspec.Struct, frozen=True, tag=True):
    """From storage: the checkpoint asked for as ``op_id`` is durable (``error`` empty) or failed."""

    op_id: bytes
    num_blocks: int = 0
    num_bytes: int = 0
    error: str = ""


class LoadDone(msgspec.Struct, frozen=True, tag=True):
    """From storage: the load ``load_id`` is over. The bytes of its first ``num_loaded`` blocks are in the pool; the rest failed, ``error`` says why."""

    load_id: int
    num_loaded: int
    error: str = ""


class ConstraintCompiled(msgspec.Struct, frozen=True, tag=True):
    """From the grammar room: a constraint has been compiled, or refused; look which."""


Command = (
    Submit
    | Abort
    | FinishChoice
    | Grant
    | PinPrefix
    | Unpin
    | ForgetPrefixes
    | LoadAdapter
    | UnloadAdapter
    | ListAdapters
    | AdapterRead
    | AdapterNames
    | Query
    | CheckpointNow
    | Drain
    | RecipeDurable
    | CheckpointDone
    | ForgetDone
    | LoadDone
    | ConstraintCompiled
)

# ---------------------------------------------------------------------------------------------- engine to edge


class RequestUsage(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens by where their KV came from, and times in milliseconds of the engine's clock.

    ``cached_tokens`` were matched in the prefix tree. Of these, ``restored_tokens`` had their bytes read from disk since this start
    and are used for the first time, and ``recomputed_tokens`` were computed again at this start, from a recipe or a logged prefix,
    and are used for the first time.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    queue_ms: float = 0.0
    num_preemptions: int = 0
    drafted_tokens: int = 0
    """Proposed to the model by speculation; of these, ``accepted_tokens`` became output."""
    accepted_tokens: int = 0


class TokensOut(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Sampled tokens of one choice; ``first_index`` counts from 0 in the choice's output."""

    request_id: bytes
    choice: int
    first_index: int
    token_ids: bytes
    logprobs: tuple[TokenLogprobs, ...] | None = None


class ChoiceDone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """``reason`` is a ``FinishReason``. Comes after the choice's last ``TokensOut``.

    ``cumulative_logprob`` (nats) and ``score`` (a beam's) are None where nobody asked for them.
    """

    request_id: bytes
    choice: int
    reason: str
    cumulative_logprob: float | None = None
    score: float | None = None


class PromptLogprobsOut(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Log-probabilities of prompt tokens, from position ``first_position`` on (1 at first: nothing precedes position 0). Before the first ``TokensOut``."""

    request_id: bytes
    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


class RequestDone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Every choice is done; the engine's last word on the request."""

    request_id: bytes
    usage: RequestUsage


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine's last word on a request that failed or was refused; ``code`` is an ``ErrorCode``."""

    request_id: bytes
    code: str
    message: str
    retry_after_s: float = 0.0


class OpDone(msgspec.Struct, frozen=True, tag=True):
    """``result`` is JSON-like data, the body of the reply."""

    op_id: bytes
    result: dict[str, Any]


class OpFailed(msgspec.Struct, frozen=True, tag=True):
    op_id: bytes
    code: str
    message: str
    retry_after_s: float = 0.0


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """The daemon's state as the edge may tell it while the engine does not answer (start, rehydration, drain).

    ``status`` is the report of ``kvd status``; ``stats`` that of ``kvd stats``. ``ready_in_s`` estimates the rest of the start.
    """

    state: str
    status: dict[str, Any]
    stats: dict[str, Any]
    ready_in_s: float = 0.0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Facts about the engine that the edge needs, once they are known: sent before the first READY snapshot."""

    instance: bytes
    model: str
    fingerprint: bytes
    vocab_size: int
    max_model_len: int
    block_size_tokens: int
    max_choices: int
    """Sequences that a request may run at once."""
    model_len: int = 0
    """What the model would take, where ``max_model_len`` is less because the KV pool holds no more; else 0."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended; the edge delivers what it holds, for at most ``flush_s``, and ends too."""

    flush_s: float = 2.0


Event = TokensOut | PromptLogprobsOut | ChoiceDone | RequestDone | RequestFailed | OpDone | OpFailed | Snapshot | Hello | Stopped
