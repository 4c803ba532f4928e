"""The rule of beam search against a plain form of transformers' own, on random little language models."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_beam_search import plain_beam_search

from kvd.scheduler.beams import BeamRule
from kvd.types import BeamSearch, FinishReason


def language(seed, vocab, sharpness):
    """Log-probabilities of each token after ``tokens``: a function of the seed and all of the tokens."""

    def logprobs_of(tokens):
        draw = random.Random(f"{seed}:{tokens}")
        weights = [draw.random() * sharpness for _ in range(vocab)]
        total = math.log(sum(map(math.exp, weights)))
        return [weight - total for weight in weights]

    return logprobs_of


def search(logprobs_of, beam, *, stop_ids, max_tokens, min_tokens, num_logprobs=None):
    """Run the rule as the scheduler does: with the most likely candidates alone."""
    rule = BeamRule(beam, stop_token_ids=frozenset(stop_ids), max_tokens=max_tokens, min_tokens=min_tokens, num_logprobs=num_logprobs)
    texts = [()]
    while not rule.is_over:
        rows = []
        for tokens in texts:
            row = sorted(enumerate(logprobs_of(tokens)), key=lambda entry: -entry[1])
            rows.append(row[: rule.num_candidates])
        parents = rule.advance(rows)
        assert len(rule.open) == len(parents) == (0 if rule.is_over else beam.width)
        texts = [(*texts[parent], hypothesis.token_id) for parent, hypothesis in zip(parents, rule.open, strict=True)]
        assert texts == [tuple(step.token_id for step in hypothesis.path()) for hypothesis in rule.open]
    return rule


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**30),
    width=st.integers(1, 5),
    vocab=st.integers(20, 24),
    num_stops=st.integers(0, 3),
    max_tokens=st.integers(1, 9),
    min_tokens=st.integers(0, 4),
    sharpness=st.sampled_from([0.5, 2.0, 6.0, 12.0]),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0, 0.5]),
    early_stopping=st.sampled_from([False, True, "never"]),
)
def test_it_is_transformers_rule(seed, width, vocab, num_stops, max_tokens, min_tokens, sharpness, length_penalty, early_stopping):
    min_tokens = min(min_tokens, max_tokens)
    logprobs_of = language(seed, vocab, sharpness)
    options = {"stop_ids": tuple(range(num_stops)), "max_tokens": max_tokens, "min_tokens": min_tokens}
    beam = BeamSearch(width, length_penalty, None if early_stopping == "never" else early_stopping)
    rule = search(logprobs_of, beam, **options)
    expected = plain_beam_search(logprobs_of, width=width, length_penalty=length_penalty, early_stopping=early_stopping, **options)
    said = [(tuple(step.token_id for step in each.hypothesis.path()), each.score) for each in rule.finished]
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in expected]
    assert [score for _, score in said] == pytest.approx([score for _, score in expected])
    for each in rule.finished:
        last = each.hypothesis.token_id
        assert each.reason is (FinishReason.STOP if last in options["stop_ids"] else FinishReason.LENGTH)
        assert each.hypothesis.length == len(each.hypothesis.path()) >= min_tokens


def test_the_best_text_of_all_is_found_when_the_width_holds_every_text():
    """Exhaustively: with no penalty and no guess, the first hypothesis is the most likely ended text."""
    logprobs_of = language(3, 4, 2.0)

    def texts(tokens, total):
        for token, logprob in enumerate(logprobs_of(tokens)):
            if token == 0 or len(tokens) == 3:
                yield (*tokens, token), total + logprob
            else:
                yield from texts((*tokens, token), total + logprob)

    best, score = max(texts((), 0.0), key=lambda entry: entry[1])
    rule = BeamRule(BeamSearch(64, 0.0, None), stop_token_ids=frozenset([0]), max_tokens=4, min_tokens=0, num_logprobs=None)
    opened = [()]
    while not rule.is_over:
        rows = [list(enumerate(logprobs_of(tokens))) for tokens in opened]
        parents = rule.advance(rows)
        opened = [(*opened[parent], each.token_id) for parent, each in zip(parents, rule.open, strict=True)]
    assert tuple(step.token_id for step in rule.finished[0].hypothesis.path()) == best
    assert rule.finished[0].score == pytest.approx(score)


def test_tokens_are_described_by_the_most_likely_ones_of_their_step():
    logprobs_of = language(5, 20, 3.0)
    rule = search(logprobs_of, BeamSearch(3), stop_ids=(0,), max_tokens=4, min_tokens=0, num_logprobs=2)
    for each in rule.finished:
        tokens = ()
        for step in each.hypothesis.path():
            row = logprobs_of(tokens)
            assert step.entry.logprob == row[step.token_id]
            assert [token for token, _ in step.entry.top] == sorted(range(20), key=lambda token: -row[token])[:2]
            tokens = (*tokens, step.token_id)
        assert each.hypothesis.logprob == pytest.approx(sum(step.entry.logprob for step in each.hypothesis.path()))
