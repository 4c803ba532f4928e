"""A row whose numbers are not finite spreads them to the rows that read its blocks; only the request that it began with fails. A step that fails takes those that were in it."""

import pytest
from roomy_simulation import make, prompt
from simulation import Simulation
from stream_checker import namespace_of

from kvd.commands import RequestFailed
from kvd.types import ErrorCode, pack_tokens


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


def matched(sim, tokens):
    return sim.cache.match(pack_tokens(tokens), namespace_of(b"", b"")).num_tokens


def test_non_finite_logits_fail_their_request_alone():
    sim = make()
    failing = sim.submit(prompt(18, 1), max_tokens=5, num_choices=2)
    sim.round()
    other = sim.submit(prompt(9, 2), max_tokens=5)
    sim.executor.fail_row = lambda rows: 0
    sim.finish_all()
    assert (sim.code(failing), sim.code(other)) == (ErrorCode.NONFINITE_LOGITS, "done")


def test_blocks_of_a_failed_row_are_not_kept():
    sim = make()
    failing = sim.submit(prompt(18), max_tokens=5)
    sim.executor.fail_row = lambda rows: rows[0]
    sim.round()
    sim.check()
    assert sim.code(failing) == ErrorCode.NONFINITE_LOGITS
    assert sim.cache.num_free == sim.cache.num_blocks
    assert matched(sim, prompt(18)) == 0


def test_a_failed_step_fails_its_requests_and_takes_its_blocks_out():
    sim = make(max_in_flight=2, max_tokens_per_step=16, max_running=2)
    running = sim.submit(prompt(9, 1), max_tokens=9)
    sim.round()
    sim.round()
    prefilling = sim.submit(prompt(40, 2), max_tokens=2)
    waiting = sim.submit(prompt(12, 3), max_tokens=2)
    while len(sim.in_flight) < 2:
        sim.submit_step()
    steps = [step for step, _ in sim.in_flight]
    sim.in_flight.clear()
    for step in steps:
        sim.checker.take(sim.scheduler.fail_step(step, "the executor failed"))
    assert [sim.code(request_id) for request_id in (running, prefilling)] == [ErrorCode.ENGINE_ERROR] * 2
    assert sim.terminal(waiting) is None
    assert matched(sim, prompt(40, 2)) == 0
    assert matched(sim, prompt(9, 1)) == 8, "what earlier steps computed is sound"
    sim.scheduler.check_invariants()
    sim.checker.take(sim.scheduler.fail_all(ErrorCode.DRAINING, "restarting"))
    assert isinstance(sim.terminal(waiting), RequestFailed)
    assert not sim.scheduler.has_work()
    assert sim.cache.num_used == 0
