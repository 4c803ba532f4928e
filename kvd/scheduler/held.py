"""Choices that are told only when all of a request's are over, the best first: sampled ones of which some are dropped, and beams.

Sampled choices rank by their log-probability as a whole, each token's being the model's own (before penalties, temperature and truncation); beams by their
scores. Equals keep the order in which they ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.commands import ChoiceDone, Event, TokensOut
from kvd.types import TOKEN_BYTES, FinishReason, TokenLogprobs

_TOKENS_PER_MESSAGE = 64
"""With 20 log-probabilities each they fit well into a message's header."""


@dataclass(slots=True)
class HeldChoice:
    """A choice, as it is told at the end."""

    token_ids: bytearray = field(default_factory=bytearray)
    """Packed."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """None or one a token."""
    reason: FinishReason = FinishReason.ABORTED
    cumulative_logprob: float = 0.0
    score: float | None = None


class HeldChoices:
    """What a request has not told yet."""

    __slots__ = ("_choices", "_ended", "_tells_logprobs")

    def __init__(self, *, tells_logprobs: bool) -> None:
        self._tells_logprobs = tells_logprobs
        self._choices: dict[int, HeldChoice] = {}
        self._ended: list[HeldChoice] = []

    def add_token(self, choice: int, packed: bytes, logprob: TokenLogprobs) -> None:
        """A choice has one more token."""
        held = self._choices.setdefault(choice, HeldChoice())
        held.token_ids += packed
        held.cumulative_logprob += logprob.logprob
        if self._tells_logprobs:
            held.logprobs.append(logprob)

    def end(self, choice: int, reason: FinishReason) -> None:
        """A sampled choice is over."""
        held = self._choices.pop(choice)
        held.reason = reason
        self._ended.append(held)

    def add(self, choice: HeldChoice) -> None:
        """A choice that is over, with its score."""
        self._ended.append(choice)

    def tell(self, request_id: bytes, num_choices: int) -> list[Event]:
        """The best ``num_choices`` of those that are over."""
        ranked = sorted(self._ended, key=lambda held: -(held.cumulative_logprob if held.score is None else held.score))
        events: list[Event] = []
        for choice, held in enumerate(ranked[:num_choices]):
            num_tokens = len(held.token_ids) // TOKEN_BYTES
            for first in range(0, num_tokens, _TOKENS_PER_MESSAGE):
                end = first + _TOKENS_PER_MESSAGE
                packed = bytes(held.token_ids[first * TOKEN_BYTES : end * TOKEN_BYTES])
                events.append(TokensOut(request_id, choice, first, packed, tuple(held.logprobs[first:end]) if held.logprobs else None))
            events.append(ChoiceDone(request_id, choice, held.reason, held.cumulative_logprob, held.score))
        return events
