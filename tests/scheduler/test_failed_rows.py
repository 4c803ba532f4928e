"""A row whose numbers are not finite spreads them to the rows that read its blocks; only the request that it began with fails."""

import pytest
from simulation import Simulation


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_those_who_read_a_failed_row_are_planned_anew_and_answer_rightly(max_in_flight):
    """Three prompts with a common beginning run in one step: the first fills it and fails, the others read it there and then."""
    sim = Simulation(num_blocks=30, max_tokens_per_step=64, max_in_flight=max_in_flight, vocab=50)
    shared = [1, 2, 3, 4, 5, 6]
    first, second, third = (sim.submit([*shared, last, last], max_tokens=4) for last in (7, 8, 9))
    below = sim.submit([*shared, 8, 8, 9, 9], max_tokens=4)
    sim.executor.fail_row = lambda rows: rows[0]
    step = sim.submit_step()
    assert len(step.started) == 4
    assert sum(row.num_computed > 0 for row in step.started) == 3, "three of them follow"
    sim.finish_all()
    assert [sim.code(each) for each in (first, second, third, below)] == ["nonfinite_logits", "done", "done", "done"]
    sim.check()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_follower_that_is_at_fault_itself_fails_alone(max_in_flight):
    sim = Simulation(num_blocks=30, max_tokens_per_step=64, max_in_flight=max_in_flight, vocab=50)
    shared = [1, 2, 3, 4, 5, 6]
    owner, follower, other = (sim.submit([*shared, last, last], max_tokens=4) for last in (7, 8, 9))
    sim.executor.fail_row = lambda rows: rows[1]
    sim.finish_all()
    assert [sim.code(each) for each in (owner, follower, other)] == ["done", "nonfinite_logits", "done"]
    sim.check()
