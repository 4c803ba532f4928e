"""The order at work in the scheduler: who is seated, whose prompt runs, whose blocks go, and what a preemption costs."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation import Simulation

from kvd.commands import RequestDone
from kvd.types import ErrorCode


def make(**options):
    defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "max_tokens_per_step": 32, "max_running": 2, "max_waiting": 16}
    return Simulation(**(defaults | options))


def prompt(number, num_tokens=8):
    return [number >> bit & 1 for bit in range(num_tokens)]


def ends(sim, *request_ids):
    """The requests in the order of their ends."""
    order = []
    while len(order) < len(request_ids):
        sim.round()
        order += [each for each in request_ids if each not in order and sim.terminal(each) is not None]
    return order


def test_the_urgent_are_seated_first_and_background_work_last():
    sim = make(max_running=1)
    first = sim.submit(prompt(1), max_tokens=3)
    sim.round()
    background = sim.submit(prompt(2), max_tokens=1, internal=True, background=True)
    late, plain, urgent = (sim.submit(prompt(3 + priority), max_tokens=3, priority=priority) for priority in (2, 0, -2))
    assert ends(sim, first, late, plain, urgent, background) == [first, urgent, plain, late, background]
    sim.finish_all()


def test_an_urgent_prompt_takes_the_step_before_longer_seated_ones():
    sim = make(max_running=4, max_tokens_per_step=8)
    first = sim.submit(prompt(1, 40), max_tokens=1)
    sim.round()
    behind = sim.submit(prompt(3, 16), max_tokens=1)
    urgent = sim.submit(prompt(2, 16), max_tokens=1, priority=-1)
    assert ends(sim, first, behind, urgent) == [urgent, first, behind]
    assert sim.scheduler.stats()["steps"] == 1 + 2 + 4 + 2, "no step of it was lost on the others"
    sim.finish_all()


def test_a_waiting_request_ages_into_the_class_before_it():
    sim = make(max_running=1, ageing_s=10.0)
    sim.submit(prompt(1), max_tokens=9)
    sim.round()
    old = sim.submit(prompt(2), max_tokens=1, priority=1)
    sim.clock.now_s += 10.0
    fresh = sim.submit(prompt(3), max_tokens=1)
    assert ends(sim, old, fresh) == [old, fresh]
    sim.finish_all()


def test_tenants_take_turns_however_many_requests_one_of_them_has():
    sim = make(max_running=1, num_blocks=200, max_waiting=100)
    many = [sim.submit(prompt(number, 12), max_tokens=6, tenant="many") for number in range(24)]
    few = [sim.submit(prompt(100 + number, 12), max_tokens=6, tenant="few") for number in range(3)]
    order = ends(sim, *many[:8], *few)
    assert [order.index(each) <= 2 * (number + 1) for number, each in enumerate(few)] == [True] * 3
    sim.finish_all()


def test_what_the_cache_holds_costs_a_tenant_nothing():
    sim = make(max_running=1)
    first = sim.submit(prompt(1, 32), max_tokens=2, tenant="a")
    sim.finish_all()
    again = sim.submit(prompt(1, 32), max_tokens=2, tenant="b")
    sim.finish_all()
    assert [sim.code(each) for each in (first, again)] == ["done", "done"]
    accounts = sim.scheduler._roster.tenants._tenants
    assert accounts["a"].counter == 32 + 2 * 2
    lifted = accounts["a"].counter
    assert accounts["b"].counter - lifted == 32 - 31 + 2 * 2, "lifted to the last who waited, then what was computed for it"


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_last_in_the_order_gives_up_its_blocks(max_in_flight):
    sim = make(num_blocks=9, max_running=3, max_in_flight=max_in_flight)
    low = sim.submit(prompt(1), max_tokens=16, priority=3)
    others = [sim.submit(prompt(2 + number), max_tokens=16, priority=number) for number in range(2)]
    order = ends(sim, low, *others)
    assert order[-1] == low, "though it came first"
    assert [sim.terminal(each).usage.num_preemptions > 0 for each in (low, others[0])] == [True, False]
    sim.finish_all()


def test_the_tenant_that_was_served_most_gives_up_its_blocks():
    sim = make(num_blocks=10, max_running=3)
    served = [sim.submit(prompt(number), max_tokens=14, tenant="served") for number in range(2)]
    other = sim.submit(prompt(4), max_tokens=14, tenant="other")
    ends(sim, *served, other)
    done = {each: sim.terminal(each).usage.num_preemptions for each in (*served, other)}
    assert done[other] == 0
    assert sum(done.values()) > 0
    sim.finish_all()


def test_to_resume_is_mostly_a_hit():
    """A preempted sequence's full blocks stay in the tree: of what it had computed, only what others took since is computed again."""
    sim = make(num_blocks=24, max_running=3, max_model_len=64)
    ids = [sim.submit(prompt(number, 16), max_tokens=24, priority=number) for number in range(3)]
    while sim.checker.open():
        sim.round()
        sim.check()
    stats = sim.scheduler.stats()
    assert stats["preemptions"] > 0
    assert stats["resumed_tokens"] >= 16
    assert stats["resume_recomputed_tokens"] <= stats["resumed_tokens"] / 2
    assert {sim.code(each) for each in ids} == {"done"}
    sim.finish_all()


def test_what_was_evicted_meanwhile_is_computed_again_and_counted():
    sim = make(num_blocks=12, max_running=2, max_model_len=64)
    ids = [sim.submit(prompt(number, 16), max_tokens=16, priority=number) for number in range(2)]
    while sim.scheduler.stats()["preemptions"] == 0:
        sim.round()
    sim.evict_all()
    sim.finish_all()
    stats = sim.scheduler.stats()
    assert 0 < stats["resume_recomputed_tokens"] <= stats["resumed_tokens"]
    assert all(isinstance(sim.terminal(each), RequestDone) for each in ids)


def test_no_tenant_keeps_the_others_out_of_a_full_queue():
    sim = make(max_running=1, max_waiting=6)
    sim.submit(prompt(0), max_tokens=50, tenant="many")
    sim.round()
    many = [sim.submit(prompt(1 + number), max_tokens=2, tenant="many") for number in range(7)]
    assert [sim.code(each) for each in many if sim.terminal(each)] == [ErrorCode.OVERLOADED], "its own last one"
    few = [sim.submit(prompt(20 + number), max_tokens=2, tenant="few") for number in range(4)]
    sim.round()
    assert Counter(sim.code(each) for each in (*many, *few) if sim.terminal(each)) == {"overloaded": 5}
    assert [sim.terminal(each) is None for each in many[:6]] == [True] * 3 + [False] * 3, "the last of who has most gave way"
    assert [sim.terminal(each) is None for each in few] == [True] * 3 + [False], "until both had as many"
    assert all(sim.terminal(each).retry_after_s > 0 for each in many[3:6])
    sim.finish_all()


def test_the_urgent_take_the_places_of_the_others_in_a_full_queue_but_not_of_what_has_begun():
    sim = make(num_blocks=6, max_running=2, max_waiting=2)
    runs = [sim.submit(prompt(number, 7), max_tokens=14, priority=5) for number in range(2)]
    while sim.scheduler.stats()["preemptions"] == 0:
        sim.round()
    waits = sim.submit(prompt(9), max_tokens=2, priority=4)
    urgent = [sim.submit(prompt(10 + number), max_tokens=2, priority=-1) for number in range(3)]
    sim.round()
    assert [sim.terminal(each) is None for each in (*runs, waits, *urgent)] == [True, True, False, True, True, False], (
        "two, and one for the place that is free but for blocks"
    )
    sim.finish_all()
    assert [sim.code(each) for each in runs] == ["done"] * 2


def test_a_full_queue_answers_with_an_estimate_for_the_class_that_asks():
    sim = make(max_running=1, max_waiting=6)
    for number in range(12):  # one a second
        sim.submit(prompt(number), max_tokens=1)
        sim.clock.now_s += 1.0
        sim.finish_all()
    sim.submit(prompt(0), max_tokens=50)
    sim.round()
    plain = [sim.submit(prompt(1 + number), max_tokens=50, queue_timeout_s=0.01 if number == 0 else 0.0) for number in range(3)]
    for number in range(3):
        sim.submit(prompt(5 + number), max_tokens=50, priority=5)
    refused = sim.terminal(sim.submit(prompt(30), max_tokens=1, priority=5))
    assert refused.code == ErrorCode.OVERLOADED
    assert refused.retry_after_s == pytest.approx(0.6, abs=0.05), "a tenth of the six before it, at one a second"
    sim.wait_s(0.01)
    assert sim.code(plain[0]) == ErrorCode.QUEUE_TIMEOUT
    assert sim.terminal(plain[0]).retry_after_s == pytest.approx(0.3, abs=0.05), "those of its class"
    sim.finish_all()


def test_the_estimate_knows_neither_idle_time_nor_what_ended_in_the_queue():
    sim = make(max_running=1, max_waiting=6)
    for number in range(3):
        sim.submit(prompt(number), max_tokens=1)
        sim.clock.now_s += 1.0
        sim.finish_all()
        sim.clock.now_s += 3600.0
    ids = [sim.submit(prompt(number), max_tokens=50, queue_timeout_s=0.0 if number == 0 else 0.01) for number in range(6)]
    sim.round()
    sim.wait_s(0.01)
    assert Counter(map(sim.code, ids[1:])) == {"queue_timeout": 5}
    for number in range(6):
        sim.submit(prompt(number), max_tokens=50)
    refused = sim.terminal(sim.submit(prompt(9), max_tokens=1))
    assert refused.retry_after_s == pytest.approx(0.6, abs=0.05)
    sim.finish_all()
