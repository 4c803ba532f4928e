"""What the fake executor says next: a small distribution over its vocabulary that is a function of the context, and draws from it.

A few candidates share nearly all of the probability, as in a language model: letters in an order of their own, and now and then the end of the
sequence among them. No two log-probabilities of a context are equal, and none of another context is the same. Every other token has a very small
probability, so that a mask or a bias always leaves something to choose.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable
from functools import cache
from itertools import accumulate, takewhile

from kvd.types import TokenLogprobs

VOCAB_SIZE = 257
EOS_TOKEN_ID = 256
_LETTERS = b"eeeeeetttttaaaaooooiiiinnnnsssshhhrrrdddllluuucmfwgypbvkxqjz       ,.EATSW0123456789"
_EOS_PERIOD = 1021
"""In one context of so many the end of the sequence is the most likely token."""
_EOS_CANDIDATE_PERIOD = 32
"""In one context of so many it is one of the others that are likely."""
_NUM_CANDIDATES = 8
_LEAST_GAP = 0.1
_TAIL_LOGS = tuple(-30.0 - place / 4 for place in range(VOCAB_SIZE - _NUM_CANDIDATES))
"""Nats below the last candidate of each unlikely token."""
_TAIL_WEIGHT = sum(map(math.exp, _TAIL_LOGS))
_DRAWN_FROM = 20.0
"""Nats below the most likely token at which nothing is drawn any more."""


class NothingLeftError(Exception):
    """No token may follow."""


class Distribution:
    """Tokens, the most likely first, and the log-probability (nats) of each; normalised over all of them."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self, token_ids: tuple[int, ...], logprobs: list[float]) -> None:
        self.token_ids = token_ids
        self.logprobs = logprobs

    @property
    def greedy(self) -> int:
        return self.token_ids[0]

    def logprob(self, token_id: int) -> float:
        return self.logprobs[self.token_ids.index(token_id)]

    def described(self, token_id: int, num_logprobs: int) -> TokenLogprobs:
        """The token, and the ``num_logprobs`` most likely ones."""
        top = tuple(zip(self.token_ids[:num_logprobs], self.logprobs, strict=False))
        return TokenLogprobs(token_id, self.logprob(token_id), top)

    def adjusted(self, change: Callable[[int, float], float]) -> Distribution:
        """``change(token_id, logprob)`` in the place of each log-probability; minus infinity takes a token out.

        Raises:
            NothingLeftError: it takes out every token.
        """
        changed = [(change(token_id, logprob), token_id) for token_id, logprob in zip(self.token_ids, self.logprobs, strict=True)]
        kept = sorted((entry for entry in changed if entry[0] > -math.inf), key=lambda entry: -entry[0])
        if not kept:
            raise NothingLeftError
        total = kept[0][0] + math.log(sum(math.exp(weight - kept[0][0]) for weight, _ in kept))
        return Distribution(tuple(token_id for _, token_id in kept), [weight - total for weight, _ in kept])

    def probabilities(self, temperature: float) -> dict[int, float]:
        """What ``draw`` draws from: the likely tokens, the most likely first."""
        most = self.logprobs[0]
        weights = [math.exp((logprob - most) / temperature) for logprob in takewhile(lambda each: each > most - _DRAWN_FROM, self.logprobs)]
        total = sum(weights)
        return {token_id: weight / total for token_id, weight in zip(self.token_ids, weights, strict=False)}

    def draw(self, temperature: float, uniform: float) -> int:
        """A draw by ``uniform``, a number from 0 up to 1."""
        probabilities = self.probabilities(temperature)
        place = bisect_right(list(accumulate(probabilities.values())), uniform)
        return self.token_ids[min(place, len(probabilities) - 1)]


def greedy(digest: bytes) -> int:
    """The most likely token, without the rest of the distribution."""
    drawn = _drawn(digest)
    return EOS_TOKEN_ID if drawn % _EOS_PERIOD == 0 else _LETTERS[drawn // _EOS_PERIOD % len(_LETTERS)]


def distribution(digest: bytes) -> Distribution:
    """Of the token that follows the context with this digest."""
    shape = hashlib.blake2b(digest, digest_size=4 * _NUM_CANDIDATES, person=b"kvd.shape").digest()
    weights, weight = [], 0.0
    for place in range(_NUM_CANDIDATES):
        weights.append(weight)
        weight -= _LEAST_GAP + int.from_bytes(shape[4 * place : 4 * place + 4], "little") / (1 << 32)
    total = math.log(sum(map(math.exp, weights)) + math.exp(weight) * _TAIL_WEIGHT)
    tail = weight - total
    return Distribution(_ranking(digest), [each - total for each in weights] + [tail + each for each in _TAIL_LOGS])


def noise(seed: int, choice: int, position: int) -> float:
    """From 0 up to 1: a function of these numbers alone, whatever is drawn with it."""
    drawn = hashlib.blake2b(b"%d:%d:%d" % (seed, choice, position), digest_size=8, person=b"kvd.noise").digest()
    return (int.from_bytes(drawn, "little") >> 11) / (1 << 53)


def _drawn(digest: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "little")


def _ranking(digest: bytes) -> tuple[int, ...]:
    drawn = _drawn(digest)
    others = _others(drawn // _EOS_PERIOD % len(_LETTERS))
    place = 0 if drawn % _EOS_PERIOD == 0 else _NUM_CANDIDATES
    if place and digest[0] % _EOS_CANDIDATE_PERIOD == 0:
        place = 1 + digest[1] % (_NUM_CANDIDATES - 1)
    return (*others[:place], EOS_TOKEN_ID, *others[place:])


@cache
def _others(first: int) -> tuple[int, ...]:
    """All tokens but the end of the sequence: the letters from place ``first`` on, each once, then the bytes that are no letters."""
    return tuple(dict.fromkeys((*_LETTERS[first:], *_LETTERS[:first], *range(EOS_TOKEN_ID))))
