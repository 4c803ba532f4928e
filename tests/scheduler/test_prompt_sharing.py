"""What prompts have in common is computed once: by an owner, for followers who wait for it, and by nobody whose prompt is in memory."""

from __future__ import annotations

import pytest
from roomy_simulation import make, prompt, tokens_of

from kvd.cache.events import BlockOrigin
from kvd.commands import RequestDone, Submit
from kvd.types import ErrorCode, SamplingParams, pack_tokens


def test_identical_prompts_submitted_together_are_computed_once():
    sim = make(max_tokens_per_step=64)
    ids = [sim.submit(prompt(18), max_tokens=2) for _ in range(4)]
    step = sim.round()
    assert sorted(row.num_tokens for row in step.started) == [2, 2, 2, 18]
    assert sim.cache.num_used == 4 + 4
    sim.finish_all()
    assert [sim.terminal(request_id).usage.cached_tokens for request_id in ids] == [0, 16, 16, 16]


def test_a_follower_waits_until_the_step_that_fills_its_last_block():
    sim = make(max_tokens_per_step=10)
    sim.submit(prompt(18), max_tokens=2)
    sim.submit(prompt(18), max_tokens=2)
    assert tokens_of(sim.round()) == [(0, 10)]
    step = sim.round()
    assert tokens_of(step) == [(1, 2), (0, 8)]
    sim.finish_all()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_follower_whose_owner_fails_computes_for_itself(max_in_flight):
    sim = make(max_in_flight=max_in_flight)
    ids = [sim.submit(prompt(18), max_tokens=6) for _ in range(3)]
    sim.executor.fail_row = lambda rows: rows[0]
    sim.finish_all()
    assert [sim.code(request_id) for request_id in ids] == [ErrorCode.NONFINITE_LOGITS, "done", "done"]
    assert sim.scheduler.stats()["replanned"] == 2
    assert sim.terminal(ids[1]).usage.cached_tokens in {0, 16}


def test_followers_of_an_aborted_owner_are_planned_anew():
    sim = make(max_tokens_per_step=10)
    owner = sim.submit(prompt(30), max_tokens=1, internal=True, background=True)
    sim.round()
    follower = sim.submit(prompt(30), max_tokens=2)
    assert tokens_of(sim.round()) == [(0, 10)]
    sim.abort(owner)
    sim.check()
    assert sim.scheduler.stats()["replanned"] == 1
    sim.finish_all()
    assert sim.code(follower) == "done"
    assert sim.terminal(follower).usage.cached_tokens == 20  # what the owner had computed by then


def test_an_owner_aborted_in_flight_still_fills_what_the_step_computes():
    sim = make()
    owner = sim.submit(prompt(18), max_tokens=4)
    follower = sim.submit(prompt(18), max_tokens=4)
    sim.submit_step()
    sim.abort(owner)
    sim.check()
    sim.finish_all()
    assert sim.scheduler.stats()["replanned"] == 0
    assert sim.terminal(follower).usage.cached_tokens == 16


def test_background_work_runs_behind_users_unless_a_user_waits_for_it():
    sim = make(max_tokens_per_step=10)
    background = sim.submit(prompt(30), max_tokens=1, internal=True, background=True)
    sim.round()
    user = sim.submit(prompt(20, 1), max_tokens=1)
    assert tokens_of(sim.round()) == [(1, 10)]
    assert tokens_of(sim.round()) == [(1, 10)]
    assert sim.terminal(user) is not None
    sim.submit(prompt(30), max_tokens=1)
    sim.round()
    sim.submit(prompt(40, 3), max_tokens=1)
    assert tokens_of(sim.round())[0] == (0, 10), "a user waits for it"
    sim.finish_all()
    assert sim.code(background) == "done"


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_sharing_changes_no_token(max_in_flight):
    """The checker compares every token with a reference; here a shared and an unshared run do the same requests."""
    for salted in (False, True):
        sim = make(max_in_flight=max_in_flight, num_blocks=40, max_tokens_per_step=11)
        for salt in range(8):
            sim.submit(prompt(14 + salt), max_tokens=5, num_choices=1 + salt % 2, tenant_salt=b"%d" % salt if salted else b"")
            sim.round()
        sim.finish_all()
        assert sim.ends() == {"done": 8}
        assert (sim.cache.stats()["hit_tokens"] > 0) == (not salted)


def test_tenants_share_nothing():
    sim = make()
    sim.submit(prompt(18), max_tokens=1, tenant_salt=b"a")
    sim.finish_all()
    other = sim.submit(prompt(18), max_tokens=1, tenant_salt=b"b")
    same = sim.submit(prompt(18), max_tokens=1, tenant_salt=b"a")
    sim.finish_all()
    assert [sim.terminal(request_id).usage.cached_tokens for request_id in (other, same)] == [0, 16]


def test_output_is_reused_by_the_next_turn():
    sim = make()
    first = sim.submit(prompt(10), max_tokens=9)
    sim.finish_all()
    said = [token for token, _ in sim.checker.requests[first].says[0]]
    second = sim.submit([*prompt(10), *said, 1], max_tokens=1)
    sim.finish_all()
    assert sim.terminal(second).usage.cached_tokens == 16  # of 18 computed positions, in blocks of 4


def test_usage_tells_where_a_prompt_came_from():
    sim = make()
    scheduler = sim.scheduler
    command = Submit(request_id=b"r" * 16, token_ids=pack_tokens(prompt(16)), sampling=SamplingParams(), max_tokens=1)
    assert scheduler.submit(command, internal=True, origin=BlockOrigin.RECOMPUTED) == []
    step = scheduler.schedule()
    (done,) = scheduler.update(step, sim.executor.execute(step))
    assert isinstance(done, RequestDone), "nobody reads its tokens"
    user = sim.submit(prompt(18), max_tokens=1)
    later = sim.submit(prompt(18), max_tokens=1)
    sim.clock.now_s += 0.25
    sim.finish_all()
    usages = [sim.terminal(request_id).usage for request_id in (user, later)]
    assert [(usage.cached_tokens, usage.restored_tokens, usage.recomputed_tokens) for usage in usages] == [(16, 0, 16), (16, 0, 0)]
    assert usages[0].prompt_tokens == 18
    assert usages[0].queue_ms == pytest.approx(250)
