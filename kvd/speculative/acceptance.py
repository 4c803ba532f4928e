"""How likely drafted tokens are to be accepted, learnt as the sequence goes on.

Prompt lookup is right the more often the longer its match is, so its estimate is kept by the match's length; and it learns from every token, whether it was
drafted or not, for what would have been proposed is known anyway. A draft model is known only by what it drafted.
"""

from __future__ import annotations

from kvd.speculative.ngram import NgramIndex

_SMOOTHING = 0.1
_PRIORS = (0.3, 0.5, 0.7, 0.85)
"""Chances of the next token by match length, below 4, 8, 16 and from there on."""
_MODEL_PRIOR = 0.7


def _bucket(length: int) -> int:
    return min(max(length.bit_length() - 2, 0), len(_PRIORS) - 1)


class LookupAcceptance:
    """Of prompt lookup over one sequence."""

    __slots__ = ("_chances",)

    def __init__(self) -> None:
        self._chances = list(_PRIORS)

    def learn(self, index: NgramIndex, token_id: int) -> None:
        """``token_id`` came where ``index``, which does not hold it yet, has a match."""
        bucket = _bucket(index.length)
        self._chances[bucket] += _SMOOTHING * ((index.next_token == token_id) - self._chances[bucket])

    def expected(self, length: int, num_draft: int) -> list[float]:
        """How many of the first 0, 1, … ``num_draft`` proposals of a match of ``length`` tokens are accepted, on average: each needs those before it."""
        expected, all_before = [0.0], 1.0
        for nth in range(num_draft):
            all_before *= self._chances[_bucket(length + nth)]
            expected.append(expected[-1] + all_before)
        return expected


class ModelAcceptance:
    """Of a draft model's proposals to one sequence."""

    __slots__ = ("_chance",)

    def __init__(self) -> None:
        self._chance = _MODEL_PRIOR

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Of ``num_drafted`` proposals the first ``num_accepted`` were accepted; those after the first that was not say nothing."""
        for _ in range(num_accepted):
            self._chance += _SMOOTHING * (1.0 - self._chance)
        if num_accepted < num_drafted:
            self._chance -= _SMOOTHING * self._chance

    def expected(self, num_draft: int) -> list[float]:
        """As ``LookupAcceptance.expected``."""
        expected, all_before = [0.0], 1.0
        for _ in range(num_draft):
            all_before *= self._chance
            expected.append(expected[-1] + all_before)
        return expected
