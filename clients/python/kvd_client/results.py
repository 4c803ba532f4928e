"""What calls return: completions, chunks of a stream and the answers of operations."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvd_client.protocol.messages import Timings, TokenLogprob
from kvd_client.protocol.messages import Usage as WireUsage

__all__ = ["CheckpointResult", "Choice", "Chunk", "Completion", "PinResult", "PingResult", "PromptEcho", "Timings", "TokenLogprob", "Usage"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request. ``cached_tokens``: every prompt token that was matched in the prefix cache; of these ``restored_tokens`` came from disk and
    ``recomputed_tokens`` were computed again since the daemon's start, and are used for the first time. ``drafted_tokens`` were proposed by speculation,
    ``accepted_tokens`` of them were what the model said, too."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def of(cls, wire: WireUsage) -> Usage:
        """What the wire leaves out is 0."""
        return cls(**{name: value for name, value in msgspec.structs.asdict(wire).items() if value is not msgspec.UNSET})


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the ``n`` answers to a prompt.

    ``finish_reason`` is ``stop`` (end of sequence, stop string or stop id), ``length`` or ``aborted``. ``logprobs`` has one entry per token
    where they were asked for, else none. ``text`` is empty where the request said ``text=False``. ``cumulative_logprob`` (nats) is the sum over
    the tokens, None unless log-probabilities, ``best_of`` or beams were asked for; ``score`` is a beam's.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What was asked for of the prompt: with ``echo`` its tokens and text, with ``prompt_logprobs`` an entry for each of its tokens but the first, which nothing precedes."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. ``text``, ``token_ids`` and ``finish_reason`` are those of the first choice.

    ``seed`` is the one that was used, also where the daemon drew it: the same request with this seed draws the same noise.
    """

    request_id: bytes
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    seed: int
    prompt: PromptEcho | None = None
    """None where neither ``echo`` nor ``prompt_logprobs`` was asked for."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one choice of a stream.

    ``first_index`` counts the choice's output tokens before this chunk. ``text`` is what became final with these tokens; it may lag behind
    them by an unfinished character or a possible stop string. The last chunk of each choice has no tokens, a ``finish_reason`` and the rest
    of the text: the texts of a choice's chunks in order are its whole text.
    """

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class PingResult:
    """An answer to ``ping``: the daemon's start (``instance``, another one after each restart), its state (``starting``, ``rehydrating``,
    ``ready``, ``draining``) and the round trip."""

    instance: str
    state: str
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class PinResult:
    """An acknowledged pin: its name, and everything else that the daemon says about it (tokens, blocks, what is durable) in ``details``."""

    name: str
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """What left memory and disk for good."""

    num_blocks: int
    num_pins: int


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter as the daemon knows it. ``state``: ``loaded``, ``on disk`` (loaded when a request names it), ``unusable`` (on disk, and could not be loaded when that was
    last tried: ``error`` says why), ``in use`` (unloaded, and gone when the requests that run with it are over) or ``unloaded``. ``digest`` (hex), ``rank`` and ``num_bytes`` are empty or 0 where it is not loaded."""

    name: str
    state: str
    digest: str = ""
    rank: int = 0
    num_bytes: int = 0
    num_requests: int = 0
    """Requests that run with it, or wait to."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """What a checkpoint made durable."""

    num_blocks: int
    num_bytes: int


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as the wire has them: little-endian u32.

    Raises:
        OverflowError: an id is negative or does not fit in 32 bits.
        TypeError: an id is no integer.
    """
    packed = array("I", iter(token_ids))  # of bytes, which are ints too, array would take the memory
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """Unpack little-endian u32 token ids.

    Raises:
        ValueError: the length is not a multiple of four.
    """
    token_ids: array[int] = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids
