"""Steps with prompts in them stay under the bound that was set, as far as measured times tell, and prompts always get on."""

from __future__ import annotations

from statistics import mean

import pytest

from kvd.scheduler.pace import FLOOR_TOKENS, Pace

BUDGET = 512


def steps(pace, cost_s, num_steps, first=1, num_streams=8):
    """The prompt tokens and the seconds of so many steps of an executor that takes ``cost_s(step, tokens)``."""
    seen = []
    for step in range(first, first + num_steps):
        num_tokens = pace.limit(BUDGET, num_streams)
        pace.begin(step, num_tokens, num_streams)
        seconds = cost_s(step, num_tokens)
        pace.end(step, seconds)
        seen.append((num_tokens, seconds))
    return seen


def test_without_a_bound_prompts_take_what_there_is():
    assert {num for num, _ in steps(Pace(0.0), lambda _, num: 1.0 * num, 5)} == {BUDGET}


@pytest.mark.parametrize("token_s", [0.00001, 0.0002, 0.001, 0.003])
@pytest.mark.parametrize("decode_s", [0.0, 0.01, 0.04])
@pytest.mark.parametrize("is_measured", [False, True])
def test_the_bound_is_kept_and_used(token_s, decode_s, is_measured):
    pace = Pace(0.1)
    if is_measured:
        pace.begin(0, 0, 8)
        pace.end(0, decode_s)
    seen = steps(pace, lambda _, num: decode_s + token_s * num, 60)
    assert all(seconds <= 0.1 or num == FLOOR_TOKENS for num, seconds in seen[8:])
    possible = min(BUDGET, max(FLOOR_TOKENS, (0.09 - decode_s) / token_s))
    assert mean(num for num, _ in seen[30:]) >= 0.9 * possible - 1


def test_prompts_get_on_where_decodes_alone_exceed_the_bound():
    pace = Pace(0.01)
    pace.begin(1, 0, 8)
    pace.end(1, 0.4)
    seen = steps(pace, lambda _, num: 0.4 + 0.001 * num, 20, first=2)
    assert {num for num, _ in seen[10:]} <= {99, 100}, "a quarter of the decodes' time"
    assert pace.limit(BUDGET, 2) == FLOOR_TOKENS, "fewer streams take less time: the bound may be within reach again"
    slow = steps(pace, lambda _, num: 0.4 + 0.1 * num, 5, first=30)
    assert [num for num, _ in slow][1:] == [FLOOR_TOKENS] * 4


def test_beside_no_stream_there_is_no_bound():
    pace = Pace(0.01)
    steps(pace, lambda _, num: 0.1 * num, 5)
    assert pace.limit(BUDGET, 0) == BUDGET


def test_what_was_measured_without_streams_tells_too():
    pace = Pace(0.1)
    steps(pace, lambda _, num: 0.001 * num, 3, num_streams=0)
    assert pace.limit(BUDGET, 1) in {89, 90}


def test_a_machine_that_becomes_slow_is_felt_in_one_step_and_one_that_becomes_quick_soon():
    pace = Pace(0.1)
    steps(pace, lambda _, num: 0.01 + 0.0005 * num, 20)
    slow = steps(pace, lambda _, num: 0.01 + 0.002 * num, 10, first=30)
    assert [seconds > 0.1 for _, seconds in slow] == [True] + [False] * 9
    quick = steps(pace, lambda _, num: 0.01 + 0.0005 * num, 20, first=50)
    assert quick[-1][0] > 3 * slow[-1][0]
    assert all(seconds <= 0.1 for _, seconds in quick)


def test_a_cost_that_grows_with_the_context_is_followed():
    """Attention: the 4,000th token costs four times the first."""
    pace, done = Pace(0.1), 0
    pace.begin(0, 0, 8)
    pace.end(0, 0.01)
    for step in range(1, 500):
        num_tokens = min(pace.limit(BUDGET, 8), 4000 - done)
        if not num_tokens:
            break
        pace.begin(step, num_tokens, 8)
        seconds = 0.01 + sum(0.0005 * (1 + 3 * position / 4000) for position in range(done, done + num_tokens))
        pace.end(step, seconds)
        assert seconds <= 0.1
        done += num_tokens
    assert done == 4000


def test_the_same_times_give_the_same_steps():
    def cost_s(step, num):
        return 0.01 + 0.0004 * num * (1 + step % 3)

    assert steps(Pace(0.08), cost_s, 50) == steps(Pace(0.08), cost_s, 50)


def test_a_failed_step_leaves_nothing():
    pace = Pace(0.1)
    pace.begin(1, 10, 0)
    pace.forget(1)
    assert not pace._steps
