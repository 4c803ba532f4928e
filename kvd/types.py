"""The words that every room shares: identifiers, packed tokens, sampling parameters, reasons and codes.

Plain data only; nothing here knows a tensor, a socket or a disk.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import NewType

import msgspec

RequestId = NewType("RequestId", bytes)
"""128 bits, made by the client."""

TokenId = NewType("TokenId", int)
BlockId = NewType("BlockId", int)
"""Names one row in each KV group's pool."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the chained identity of a full block (docs/storage-format.md)."""

PackedTokens = bytes
"""Token ids as little-endian u32, four bytes each: the form of the wire, of the prefix tree's keys and of the disk."""

TOKEN_BYTES = 4


def pack_tokens(token_ids: Iterable[int]) -> PackedTokens:
    """Pack token ids as little-endian u32.

    Raises:
        OverflowError: an id is negative or does not fit in 32 bits.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes | bytearray | memoryview) -> array[int]:
    """Unpack little-endian u32 token ids into an ``array('I')``.

    Raises:
        ValueError: the length is not a multiple of four.
    """
    token_ids: array[int] = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


MIN_PRIORITY = -10
MAX_PRIORITY = 10
"""Classes of requests; lower is sooner."""


class KvGroup(msgspec.Struct, frozen=True):
    """One KV group: its name (``target``, ``draft``), the bytes of a block's row, and what its bytes depend on."""

    name: str
    row_bytes: int
    fingerprint: bytes


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class ErrorCode(StrEnum):
    """The documented failure codes; the wire's list in ``kvd_client.protocol.codes`` holds the same words."""

    BAD_REQUEST = "bad_request"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_TYPE = "unknown_type"
    TOO_LARGE = "too_large"
    DUPLICATE = "duplicate"
    STARTING = "starting"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    PROMPT_TOO_LONG = "prompt_too_long"
    KV_CAPACITY = "kv_capacity"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    PIN_CAPACITY = "pin_capacity"
    ADAPTER_CAPACITY = "adapter_capacity"
    ADAPTER_UNUSABLE = "adapter_unusable"
    PIN_TOO_SHORT = "pin_too_short"
    NOT_FOUND = "not_found"
    CLIENT_TOO_SLOW = "client_too_slow"
    NONFINITE_LOGITS = "nonfinite_logits"
    ENGINE_ERROR = "engine_error"
    STORAGE_ERROR = "storage_error"
    INTERNAL = "internal"


RETRYABLE_CODES = frozenset(
    {
        ErrorCode.STARTING,
        ErrorCode.DRAINING,
        ErrorCode.OVERLOADED,
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.ADAPTER_CAPACITY,
        ErrorCode.ENGINE_ERROR,
        ErrorCode.STORAGE_ERROR,
    }
)
"""Codes for which the same request may succeed later, here or on the restarted daemon."""


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """How logits become a token id.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep everything. Penalties follow the field's
    conventions: ``repetition_penalty`` divides positive and multiplies negative logits of ids seen in the prompt or the
    output (CTRL, Keskar et al. 2019); presence and frequency penalties count the output alone (OpenAI API).
    ``seed`` is 64 bits; the noise of a draw is a function of (seed, choice, absolute position, token id).
    ``num_logprobs`` is None for none, 0 for the sampled token alone, k for the k most likely besides.
    ``logit_bias`` (token id, nats to add) pairs come after the penalties; only ``allowed_token_ids`` may be sampled where there are any, never
    ``banned_token_ids``, nor the last id of one of ``bad_words`` right after its others.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


class BeamSearch(msgspec.Struct, frozen=True, gc=False):
    """Beam search over ``width`` beams; the score of a finished one is its log-probability over (generated tokens) ** ``length_penalty``.

    ``early_stopping``, as in transformers: True ends with ``width`` finished beams; False when no open beam is likely to become better than the worst
    finished one; None ("never") when none can.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | None = False


class Speculation(msgspec.Struct, frozen=True, gc=False):
    """How a request drafts. ``mode``: ``auto``, ``off``, ``ngram``, ``draft`` or, empty, the daemon's. ``num_draft`` tokens at most a step; 0: the daemon's default.

    ``acceptance``: ``coupled`` (a drafted token is accepted while it is what the target samples with its own noise: the same output as without drafts) or
    ``rejection`` (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023: the same distribution).
    """

    mode: str = ""
    num_draft: int = 0
    acceptance: str = "coupled"


class Constraint(msgspec.Struct, frozen=True, gc=False):
    """What the output must match. ``kind``: ``json_schema``, ``regex``, ``choice``, ``lark`` or ``json`` (any JSON value; no source).

    ``source`` is the schema, expression or grammar; for ``choice`` the alternatives, one or more.
    """

    kind: str
    source: tuple[str, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one sampled position, in nats, of the distribution before temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The ``num_logprobs`` most likely (token id, log-probability) pairs, most likely first."""
