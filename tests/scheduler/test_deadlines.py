"""Requests that name a time end at it, once, wherever they are."""

from __future__ import annotations

import math

import pytest
from simulation import Simulation

from kvd.commands import Submit
from kvd.types import RETRYABLE_CODES, ErrorCode, SamplingParams, pack_tokens


def make(**options):
    defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_tokens_per_step": 32, "max_running": 2, "max_waiting": 16}
    return Simulation(**(defaults | options))


def prompt(number, num_tokens=6):
    return [number >> bit & 1 for bit in range(num_tokens)]


def test_a_request_that_runs_past_its_deadline_fails_and_keeps_what_it_said():
    sim = make()
    late = sim.submit(prompt(1), max_tokens=50, deadline_s=5.0)
    beside = sim.submit(prompt(2), max_tokens=50)
    for _ in range(4):
        sim.round()
    said = list(sim.heard(late))
    sim.wait_s(4.9)
    assert sim.terminal(late) is None
    sim.wait_s(0.1)
    failed = sim.terminal(late)
    assert failed.code == ErrorCode.DEADLINE_EXCEEDED not in RETRYABLE_CODES
    assert failed.message == "the request runs at the end of its deadline_s"
    assert sim.heard(late) == said != [0]
    sim.finish_all()
    assert sim.code(beside) == "done"


def test_a_request_that_waits_past_its_deadline_fails():
    sim = make(max_running=1)
    sim.submit(prompt(1), max_tokens=50)
    sim.round()
    waits = sim.submit(prompt(2), max_tokens=5, deadline_s=5.0)
    sim.round()
    sim.wait_s(5.0)
    assert sim.code(waits) == ErrorCode.DEADLINE_EXCEEDED
    assert "has not begun" in sim.terminal(waits).message
    sim.finish_all()


def test_a_request_that_has_not_begun_by_its_queue_timeout_fails_and_may_come_again():
    sim = make(max_running=1)
    runs = sim.submit(prompt(1), max_tokens=50, queue_timeout_s=1.0)
    waits = sim.submit(prompt(2), max_tokens=5, queue_timeout_s=1.0)
    sim.round()
    sim.wait_s(1.0)
    failed = sim.terminal(waits)
    assert failed.code == ErrorCode.QUEUE_TIMEOUT in RETRYABLE_CODES
    assert failed.retry_after_s > 0
    sim.finish_all()
    assert sim.code(runs) == "done", "it had begun"


def test_a_request_whose_two_times_end_together_fails_once():
    sim = make(max_running=1)
    sim.submit(prompt(1), max_tokens=50)
    sim.round()
    both = sim.submit(prompt(2), max_tokens=5, deadline_s=1.0, queue_timeout_s=1.0)
    sim.wait_s(1.0)
    assert sim.code(both) == ErrorCode.DEADLINE_EXCEEDED
    sim.finish_all()


def test_what_began_and_was_preempted_is_not_timed_out_of_the_queue():
    sim = make(num_blocks=6, max_running=2)
    first = sim.submit(prompt(1, 7), max_tokens=14)
    second = sim.submit(prompt(2, 7), max_tokens=14, queue_timeout_s=1.0)
    while sim.scheduler.stats()["preemptions"] == 0:
        sim.round()
    sim.wait_s(10.0)
    sim.finish_all()
    assert {sim.code(first), sim.code(second)} == {"done"}


def test_a_stalled_request_meets_its_deadline_too():
    sim = make()
    stalled = sim.submit(prompt(1), max_tokens=9, credit_tokens=1, deadline_s=3.0)
    for _ in range(5):
        sim.round()
    assert sim.scheduler.num_stalled == 1
    sim.wait_s(3.0)
    assert sim.code(stalled) == ErrorCode.DEADLINE_EXCEEDED
    sim.finish_all()


def test_when_the_next_is_due_is_known_and_what_is_over_is_forgotten():
    sim = make()
    assert math.isinf(sim.scheduler.due_in_s())
    for number in range(300):
        sim.submit(prompt(number, 8), max_tokens=1, deadline_s=1000.0 + number)
        sim.finish_all()
    assert len(sim.scheduler._deadlines._heap) < 100
    sim.submit(prompt(1), max_tokens=1, deadline_s=2.0)
    assert sim.scheduler.due_in_s() == pytest.approx(2.0)
    sim.wait_s(5000.0)
    assert math.isinf(sim.scheduler.due_in_s())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": 11}, "priority"),
        ({"priority": -11}, "priority"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"queue_timeout_s": -1.0}, "queue_timeout_s"),
    ],
)
def test_what_no_order_can_take_is_refused(options, field):
    (failed,) = make().scheduler.submit(
        Submit(request_id=b"r", token_ids=pack_tokens([1]), sampling=SamplingParams(), max_tokens=1, **options)
    )
    assert failed.code == ErrorCode.BAD_REQUEST
    assert field in failed.message
