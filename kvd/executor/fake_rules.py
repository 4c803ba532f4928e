"""Which tokens a row of the fake executor may say, and which it favours: the plain form of ``sampling/rules.py``, a token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from kvd.step import StartedRow, TokenMasks

Change = Callable[[int, float], float]
"""(token id, log-probability) to what stands in its place; minus infinity takes the token out."""


class FakeRules:
    """The rules of one row."""

    __slots__ = ("_allowed", "_banned", "_bias", "_early", "_first", "_free_at", "_masks", "_num_prompt_tokens", "_words")

    def __init__(self, started: StartedRow) -> None:
        sampling = started.sampling
        self._bias = dict(sampling.logit_bias)
        self._allowed = frozenset(sampling.allowed_token_ids)
        self._banned = frozenset(sampling.banned_token_ids)
        self._words = sampling.bad_words
        self._early = frozenset(started.banned_token_ids)
        self._num_prompt_tokens = started.num_prompt_tokens
        self._free_at = started.num_prompt_tokens + started.min_tokens
        self._masks: Sequence[int] = ()
        self._first = 0

    def begin_step(self, masks: Sequence[int], first: int) -> None:
        """The masks, as sets of bits, of what the step samples from position ``first`` on; none: everything is allowed."""
        self._masks, self._first = masks, first

    def at(self, token_ids: Sequence[int]) -> Change | None:
        """What the rules do to the token that follows ``token_ids``; None: nothing."""
        banned = self._banned
        if len(token_ids) < self._free_at:
            banned |= self._early
        output = tuple(token_ids[self._num_prompt_tokens :]) if self._words else ()
        banned |= {word[-1] for word in self._words if len(word) == 1 or output[1 - len(word) :] == word[:-1]}
        bias, allowed = self._bias, self._allowed
        mask = self._masks[len(token_ids) - self._first] if self._masks else None
        if mask is None and not (bias or allowed or banned):
            return None

        def change(token_id: int, logprob: float) -> float:
            if token_id in banned or (allowed and token_id not in allowed) or (mask is not None and not mask >> token_id & 1):
                return -math.inf
            return logprob + bias.get(token_id, 0.0)

        return change


def masks_by_row(masks: TokenMasks) -> dict[int, list[int]]:
    """A step's masks as sets of bits, by row."""
    size = 4 * masks.num_words
    sets = [int.from_bytes(masks.words[start : start + size], "little") for start in range(0, len(masks.words), size)]
    ends = list(accumulate(masks.counts))
    return {row: sets[end - count : end] for row, count, end in zip(masks.rows, masks.counts, ends, strict=True)}
