"""The fake executor's distribution: normalised, distinct in every context, and what is drawn follows it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import pytest

from kvd.executor.fake_sampling import EOS_TOKEN_ID, VOCAB_SIZE, NothingLeftError, distribution, greedy, noise


def digest(number):
    return hashlib.blake2b(b"%d" % number, digest_size=36).digest()


def test_it_is_a_distribution_over_the_vocabulary_without_equals():
    seen = set()
    for number in range(300):
        said = distribution(digest(number))
        assert sorted(said.token_ids) == list(range(VOCAB_SIZE))
        assert all(more > less for more, less in zip(said.logprobs, said.logprobs[1:], strict=False))
        assert math.isclose(math.fsum(map(math.exp, said.logprobs)), 1.0)
        assert greedy(digest(number)) == said.greedy
        seen.update(said.logprobs[:8])
    assert len(seen) == 300 * 8


def test_the_end_of_the_sequence_is_likely_now_and_then():
    places = Counter(distribution(digest(number)).token_ids.index(EOS_TOKEN_ID) for number in range(2000))
    assert places[8] > 1800
    assert all(places[place] for place in range(1, 8))


def test_draws_follow_it_at_any_temperature():
    """Pearson's chi-square; 7 degrees of freedom, one in ten thousand exceeds 29.9."""
    said = distribution(digest(1))
    for temperature in (0.5, 1.0, 2.0):
        expected = said.probabilities(temperature)
        counts = Counter(said.draw(temperature, noise(5, 0, position)) for position in range(20_000))
        assert counts.keys() <= expected.keys()
        assert sum((counts[token] - 20_000 * p) ** 2 / (20_000 * p) for token, p in expected.items()) < 29.9
    assert said.draw(1.0, 0.0) == said.greedy
    assert said.draw(1.0, 1 - 2**-53) == said.token_ids[7]
    assert said.probabilities(1.0)[said.greedy] == pytest.approx(math.exp(said.logprobs[0]))


def test_noise_is_a_function_of_seed_choice_and_position():
    values = [noise(seed, choice, position) for seed in range(5) for choice in range(5) for position in range(5)]
    assert len(set(values)) == 125
    assert all(0 <= value < 1 for value in values)


def test_what_is_taken_out_leaves_a_distribution_of_the_rest():
    said = distribution(digest(2))
    banned = frozenset(said.token_ids[:20])
    rest = said.adjusted(lambda token_id, logprob: -math.inf if token_id in banned else logprob)
    assert rest.token_ids == said.token_ids[20:]
    assert math.isclose(math.fsum(map(math.exp, rest.logprobs)), 1.0)
    with pytest.raises(NothingLeftError):
        said.adjusted(lambda _token_id, _logprob: -math.inf)
    likely = said.token_ids[200]
    biased = said.adjusted(lambda token_id, logprob: logprob + 200.0 * (token_id == likely))
    assert biased.greedy == likely
    assert said.described(likely, 2).top == tuple(zip(said.token_ids[:2], said.logprobs[:2], strict=True))
