"""Which tokens a row of the fake executor may say, and which it favours: the plain form of ``sampling/rules.py``, a token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvd.step import StartedRow

Change = Callable[[int, float], float]
"""(token id, log-probability) to what stands in its place; minus infinity takes the token out."""


class FakeRules:
    """The rules of one row."""

    __slots__ = ("_allowed", "_banned", "_bias", "_early", "_free_at", "_num_prompt_tokens", "_words")

    def __init__(self, started: StartedRow) -> None:
        sampling = started.sampling
        self._bias = dict(sampling.logit_bias)
        self._allowed = frozenset(sampling.allowed_token_ids)
        self._banned = frozenset(sampling.banned_token_ids)
        self._words = sampling.bad_words
        self._early = frozenset(started.banned_token_ids)
        self._num_prompt_tokens = started.num_prompt_tokens
        self._free_at = started.num_prompt_tokens + started.min_tokens

    def at(self, token_ids: Sequence[int]) -> Change | None:
        """What the rules do to the token that follows ``token_ids``; None: nothing."""
        banned = self._banned
        if len(token_ids) < self._free_at:
            banned |= self._early
        output = tuple(token_ids[self._num_prompt_tokens :]) if self._words else ()
        banned |= {word[-1] for word in self._words if len(word) == 1 or output[1 - len(word) :] == word[:-1]}
        bias, allowed = self._bias, self._allowed
        if not (bias or allowed or banned):
            return None
        return lambda token_id, logprob: (
            -math.inf if token_id in banned or (allowed and token_id not in allowed) else logprob + bias.get(token_id, 0.0)
        )
