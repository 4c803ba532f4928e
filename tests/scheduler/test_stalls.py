"""Credit: no more is said than a client has room for; who is stalled gives way, holds up nobody, and fails in the end."""

from __future__ import annotations

import pytest
from roomy_simulation import make, prompt

from kvd.types import ErrorCode


def test_no_more_is_said_than_the_credit_allows():
    sim = make(max_in_flight=2)
    request_id = sim.submit(prompt(5), max_tokens=20, credit_tokens=3)
    for _ in range(10):
        sim.round()
    assert sim.heard(request_id) == [3]
    assert (sim.scheduler.num_stalled, sim.scheduler.num_running) == (1, 0)
    sim.grant(request_id, 4)
    for _ in range(10):
        sim.round()
    assert sim.heard(request_id) == [7]
    sim.finish_all()
    assert sim.heard(request_id) == [20]


def test_enough_credit_is_no_stall():
    sim = make()
    request_id = sim.submit(prompt(5), max_tokens=3, credit_tokens=3)
    for _ in range(6):
        sim.round()
        assert sim.scheduler.num_stalled == 0
    assert sim.code(request_id) == "done"


def test_a_slow_client_fails_after_the_timeout():
    sim = make(stall_timeout_s=30.0)
    slow = sim.submit(prompt(5), max_tokens=20, credit_tokens=2)
    never = sim.submit(prompt(5), max_tokens=20, credit_tokens=0)
    for _ in range(5):
        sim.round()
    sim.wait_s(29.0)
    assert sim.terminal(slow) is None
    sim.wait_s(2.0)
    assert [sim.code(request_id) for request_id in (slow, never)] == [ErrorCode.CLIENT_TOO_SLOW] * 2
    sim.finish_all()


def test_of_too_many_stalled_the_oldest_fails():
    sim = make(max_stalled=2)
    ids = [sim.submit(prompt(5, salt), max_tokens=20, credit_tokens=0) for salt in range(3)]
    sim.round()
    assert [sim.code(request_id) if sim.terminal(request_id) else None for request_id in ids] == [ErrorCode.CLIENT_TOO_SLOW, None, None]


@pytest.mark.parametrize("scarce", ["blocks", "places"])
def test_the_stalled_give_way(scarce):
    sim = make(num_blocks=10 if scarce == "blocks" else 64, max_running=8 if scarce == "blocks" else 1)
    stalled = sim.submit(prompt(17, 1), max_tokens=10, credit_tokens=2)
    for _ in range(5):
        sim.round()
    assert sim.scheduler.num_stalled == 1
    running = sim.submit(prompt(25, 2), max_tokens=6)
    for _ in range(10):
        sim.round()
    assert sim.code(running) == "done"
    sim.grant(stalled, 100)
    sim.finish_all()
    assert sim.heard(stalled) == [10]
    assert sim.terminal(stalled).usage.num_preemptions == 1


def test_a_stalled_owner_does_not_hold_up_its_followers():
    """After a preemption one choice may use up the credit while the other still fills blocks."""
    sim = make(max_tokens_per_step=6, max_model_len=64)
    first = sim.submit(prompt(18), max_tokens=20, num_choices=2, credit_tokens=18)
    while sim.heard(first) != [9, 9]:
        sim.round()
    said = [token for token, _ in sim.checker.requests[first].says[1][:9]]
    sim.scheduler._roster.preempt(sim.scheduler._requests[first])
    sim.cache.watermark_blocks = sim.cache.num_blocks
    sim.cache.evict_to_watermark(sim.cache.num_blocks)
    sim.grant(first, 1)
    while sim.scheduler._roster.num_seated < 2:
        sim.round()
    follower = sim.submit([*prompt(18), *said, 1], max_tokens=2)
    for _ in range(20):
        sim.round()
        sim.check()
    assert sim.heard(first) == [10, 9]
    assert sim.scheduler.num_stalled == 1
    assert sim.code(follower) == "done"
    sim.finish_all()
    assert sim.heard(first) == [20, 20]


def test_planning_anew_forgets_what_was_sampled_and_gives_its_credit_back():
    sim = make()
    sim.submit(prompt(18), max_tokens=4)
    follower = sim.submit(prompt(18), max_tokens=4, num_choices=3, credit_tokens=12)
    sim.executor.fail_row = lambda rows: rows[0]
    for _ in range(10):
        sim.round()
        assert sim.scheduler.num_stalled == 0
    assert sim.scheduler.stats()["replanned"] == 1
    assert sim.code(follower) == "done"
    assert sim.heard(follower) == [4, 4, 4]
