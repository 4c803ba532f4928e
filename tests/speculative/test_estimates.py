"""What is learnt of drafts and of steps: acceptance by match length, times by positions."""

from __future__ import annotations

import itertools

import pytest

from kvd.speculative.acceptance import LookupAcceptance, ModelAcceptance
from kvd.speculative.costs import Kind, StepCosts
from kvd.speculative.ngram import NgramIndex


def test_what_lookup_would_have_proposed_teaches_by_the_length_of_its_match():
    index, acceptance = NgramIndex(2, 8), LookupAcceptance()
    before = acceptance.expected(2, 1)[1], acceptance.expected(20, 1)[1]
    for token in [1, 2, 3] * 20:
        if index.length:
            acceptance.learn(index, token)
        index.add_token(token)
    assert acceptance.expected(2, 1)[1] > before[0]
    assert acceptance.expected(20, 1)[1] > before[1]
    for _ in range(60):
        acceptance.learn(index, 9)
    assert acceptance.expected(60, 8)[8] < 0.1
    assert acceptance.expected(2, 1)[1] > before[0]  # another length, another estimate


def test_each_proposal_needs_those_before_it():
    expected = LookupAcceptance().expected(2, 6)
    gains = [after - before for before, after in itertools.pairwise(expected)]
    assert expected[0] == 0
    assert gains[0] < 1
    assert all(0 < after < before for before, after in itertools.pairwise(gains))


def test_a_draft_model_is_known_by_what_was_accepted():
    good, bad = ModelAcceptance(), ModelAcceptance()
    for _ in range(30):
        good.learn(4, 4)
        bad.learn(4, 0)
    assert good.expected(4)[4] == pytest.approx(4, abs=0.1)
    assert bad.expected(4)[4] < 0.1
    before = bad.expected(1)
    bad.learn(0, 0)
    assert bad.expected(1) == before


def measured(times, kind=Kind.LOOKUP):
    costs = StepCosts()
    for positions, seconds in times.items():
        for _ in range(3):
            costs.note(kind, positions, seconds)
    return costs


def test_times_are_measured_by_positions_and_guessed_between_and_beyond():
    costs = measured({1: 1.0, 5: 2.0})
    assert costs.seconds(Kind.LOOKUP, 1) == 1.0
    assert costs.seconds(Kind.LOOKUP, 3) == pytest.approx(1.5)
    assert costs.seconds(Kind.LOOKUP, 5) == 2.0
    assert 2.0 < costs.seconds(Kind.LOOKUP, 6) < 2.2  # half of what a position has cost so far
    assert costs.seconds(Kind.PLAIN, 5) == 2.0  # nothing better is known
    costs.note(Kind.PLAIN, 5, 0.5)
    costs.note(Kind.PLAIN, 5, 7.0)
    assert costs.seconds(Kind.PLAIN, 5) == 2.0  # two measurements may have been disturbed
    costs.note(Kind.PLAIN, 5, 0.6)
    assert costs.seconds(Kind.PLAIN, 5) == 0.5


def test_neighbours_have_a_time_together_where_there_are_many():
    costs = StepCosts()
    for positions in (9, 10, 12, 97, 101, 112):
        costs.note(Kind.LOOKUP, positions, 3.0 if positions < 20 else 9.0)
    assert [costs.seconds(Kind.LOOKUP, positions) for positions in (9, 11, 12)] == [3.0] * 3
    assert costs.seconds(Kind.LOOKUP, 100) == 9.0
    assert 3.0 < costs.seconds(Kind.LOOKUP, 13) < costs.seconds(Kind.LOOKUP, 96) < 9.0
    assert costs.seconds(Kind.LOOKUP, 8) == 2.0  # in favour of what is not known
    flat = measured({1: 2.0, 16: 2.0})
    assert flat.seconds(Kind.LOOKUP, 1000) == 2.0


def test_a_disturbed_step_moves_a_time_by_little_and_a_lasting_change_moves_it():
    costs = measured({1: 1.0})
    costs.note(Kind.LOOKUP, 1, 100.0)
    assert costs.seconds(Kind.LOOKUP, 1) == 1.25
    for _ in range(40):
        costs.note(Kind.LOOKUP, 1, 3.0)
    assert costs.seconds(Kind.LOOKUP, 1) == pytest.approx(3.0, abs=0.01)


def test_old_times_are_forgotten_so_that_what_was_too_slow_is_tried_again():
    costs = measured({8: 50.0})
    for _ in range(2 * 1024):
        costs.note(Kind.PLAIN, 1, 1.0)
    assert costs.seconds(Kind.LOOKUP, 8) < 2.0


def test_without_any_measurement_a_further_position_costs_little():
    costs = StepCosts()
    assert costs.seconds(Kind.PLAIN, 1) < costs.seconds(Kind.LOOKUP, 5) < 1.3 * costs.seconds(Kind.PLAIN, 1)
