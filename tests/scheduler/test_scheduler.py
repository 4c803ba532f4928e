"""The scheduler's promises, one by one, on steps whose answers prove what they read: its budget, forks, preemption and ends."""

from __future__ import annotations

import pytest
from roomy_simulation import make, prompt, tokens_of

from kvd.commands import ChoiceDone, RequestDone, Submit, TokensOut
from kvd.types import ErrorCode, SamplingParams


def test_a_prompt_is_packed_and_not_empty():
    scheduler = make().scheduler
    for token_ids in (b"", b"abcde"):
        (failed,) = scheduler.submit(Submit(request_id=b"r", token_ids=token_ids, sampling=SamplingParams(), max_tokens=1))
        assert failed.code == ErrorCode.BAD_REQUEST


# ---------------------------------------------------------------------------------------------------------------- budget


def test_decodes_come_first_and_prompts_fill_the_rest_of_the_budget():
    sim = make(max_tokens_per_step=8)
    sim.submit(prompt(5, 1), max_tokens=20)
    sim.round()
    sim.submit(prompt(20, 2), max_tokens=20)
    chunks = []
    for _ in range(3):
        step = sim.round()
        assert tokens_of(step)[-1] == (0, 1) or step.continued.rows[0] == 0
        chunks.append(sum(count for row, count in tokens_of(step) if row != 0))
        assert sum(count for _, count in tokens_of(step)) <= 8
    assert chunks == [7, 7, 6]
    sim.finish_all()


def test_admission_is_first_come_first_served():
    sim = make(num_blocks=8, max_tokens_per_step=64)
    sim.submit(prompt(17, 1), max_tokens=4)
    large = sim.submit(prompt(20, 2), max_tokens=4)
    small = sim.submit(prompt(3, 3), max_tokens=1)
    sim.round()
    assert sim.scheduler.num_waiting == 2, "the small one does not pass the large one"
    sim.finish_all()
    assert {sim.code(large), sim.code(small)} == {"done"}


def test_places_are_kept_for_choices_not_yet_forked():
    sim = make(max_running=3)
    sim.submit(prompt(5, 1), num_choices=2, max_tokens=4)
    sim.submit(prompt(6, 2), num_choices=2, max_tokens=4)
    sim.round()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (1, 1)
    sim.finish_all()


def test_a_step_takes_exact_columns():
    sim = make()
    sim.submit(prompt(7, 1), max_tokens=9)
    started = sim.round().started[0]
    assert (started.row, started.num_computed, started.num_tokens, started.num_prompt_tokens) == (0, 0, 7, 7)
    assert len(started.block_ids) == 2
    appended = [sim.round().continued for _ in range(6)]
    assert [columns.num_tokens for columns in appended] == [[1]] * 6
    assert [len(columns.block_ids) for columns in appended] == [0, 1, 0, 0, 0, 1]
    assert all(columns.block_offsets == [0, len(columns.block_ids)] for columns in appended)
    sim.finish_all()
    assert sim.submit_step() is None
    sim.submit(prompt(3), max_tokens=1)
    assert sim.submit_step().released == (0,)


# ----------------------------------------------------------------------------------------------------------------- forks


def test_choices_share_the_prompts_blocks():
    sim = make()
    request_id = sim.submit(prompt(18), max_tokens=8, num_choices=3)
    step = sim.round()
    assert (step.started[0].num_choices, sim.cache.num_used, sim.cache.num_shared) == (3, 5, 5)
    step = sim.round()
    assert [(row.choice, row.num_choices, row.num_computed, row.num_tokens) for row in step.started] == [(1, 1, 18, 1), (2, 1, 18, 1)]
    assert len(step.copies) == 2
    assert (sim.cache.num_used, sim.cache.num_shared) == (4 + 3, 4)
    sim.finish_all()
    assert sim.heard(request_id) == [8, 8, 8]
    assert sim.cache.stats()["forks"] == 2


def test_choices_may_end_at_their_first_token():
    sim = make()
    request_id = sim.submit(prompt(9), max_tokens=1, num_choices=3)
    sim.finish_all()
    assert sim.heard(request_id) == [1, 1, 1]
    assert sim.code(request_id) == "done"


def test_a_preempted_request_resumes_every_choice():
    sim = make(num_blocks=14, max_tokens_per_step=64)
    first = sim.submit(prompt(17, 1), max_tokens=20)
    second = sim.submit(prompt(9, 2), max_tokens=16, num_choices=2)
    sim.finish_all()
    assert sim.scheduler.stats()["preemptions"] > 0
    assert sim.terminal(first).usage.num_preemptions == 0, "the earliest is not preempted"
    assert sim.terminal(second).usage.num_preemptions > 0
    assert (sim.heard(first), sim.heard(second)) == ([20], [16, 16])


# ------------------------------------------------------------------------------------------------------------ preemption


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_preemption_recomputes_little_and_loses_nothing(max_in_flight):
    sim = make(num_blocks=10, max_in_flight=max_in_flight, max_tokens_per_step=64)
    ids = [sim.submit(prompt(13, salt), max_tokens=12) for salt in range(2)]
    sim.finish_all()
    assert [sim.terminal(request_id).usage.num_preemptions > 0 for request_id in ids] == [False, True]
    assert sim.heard(ids[1]) == [12]
    computed = sim.scheduler.stats()["prefill_tokens"] + sim.scheduler.stats()["decode_tokens"]
    assert computed <= 2 * (13 + 11) + 24, "a resumed sequence finds its blocks in the tree"


def test_nobody_is_admitted_only_to_be_preempted():
    sim = make(num_blocks=9, max_tokens_per_step=64)
    sim.submit(prompt(17, 1), max_tokens=8)
    second = sim.submit(prompt(16, 2), max_tokens=8)
    sim.finish_all()
    assert sim.scheduler.stats()["preemptions"] == 0
    assert sim.heard(second) == [8]


def test_a_lone_request_that_fills_the_pool_gets_on():
    sim = make(num_blocks=8, block_size=4)
    for _ in range(2):
        request_id = sim.submit(prompt(20), max_tokens=13)
        sim.finish_all()
        assert sim.heard(request_id) == [13]


def test_many_requests_on_few_blocks_all_end():
    sim = make(num_blocks=12, max_running=8, max_tokens_per_step=16, max_in_flight=2)
    ids = [sim.submit(prompt(5 + 3 * salt, salt), max_tokens=20) for salt in range(8)]
    sim.finish_all(max_rounds=3000)
    assert sim.ends() == {"done": 8}
    assert all(sim.heard(request_id) == [20] for request_id in ids)
    assert sim.scheduler.stats()["preemptions"] > 0


# ----------------------------------------------------------------------------------------------------- ends and stopping


def test_stop_tokens_and_min_tokens():
    sim = make()
    plain = sim.submit(prompt(5), max_tokens=12, stop_token_ids=(1,))
    longer = sim.submit(prompt(5), max_tokens=12, stop_token_ids=(1,), min_tokens=6)
    step = sim.round()
    assert [(row.banned_token_ids, row.min_tokens) for row in step.started] == [((), 0), ((1,), 6)]
    sim.finish_all()
    assert sim.heard(plain) == [len(sim.checker.requests[plain].says[0])]
    assert sim.heard(longer)[0] > 6
    assert sim.checker.requests[longer].reasons == {0: "stop"}


def test_the_edge_ends_a_choice():
    sim = make()
    request_id = sim.submit(prompt(9), max_tokens=20, num_choices=2)
    sim.finish_choice(request_id, 0)
    assert not sim.checker.requests[request_id].reasons, "a choice without a token can't have met a stop string"
    sim.round()
    sim.round()
    sim.finish_choice(request_id, 0)
    assert sim.checker.requests[request_id].reasons == {0: "stop"}
    sim.finish_choice(request_id, 0)
    sim.finish_all()
    assert sim.checker.requests[request_id].reasons == {0: "stop", 1: "length"}
    assert sim.heard(request_id)[1] == 20


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_abort_at_any_moment(num_steps, max_in_flight):
    sim = make(max_in_flight=max_in_flight, max_tokens_per_step=10)
    request_id = sim.submit(prompt(18), max_tokens=20, num_choices=3)
    bystander = sim.submit(prompt(18), max_tokens=6)
    for _ in range(num_steps):
        sim.round()
    sim.submit_step()
    sim.abort(request_id)
    assert sim.checker.requests[request_id].reasons == dict.fromkeys(range(3), "aborted")
    assert isinstance(sim.terminal(request_id), RequestDone)
    sim.check()
    sim.finish_all()
    assert sim.heard(bystander) == [6]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_nothing_is_computed_beyond_the_last_token(max_in_flight):
    sim = make(max_in_flight=max_in_flight)
    request_id = sim.submit(prompt(60), max_tokens=4)
    sim.finish_all()
    assert sim.heard(request_id) == [4]
    stats = sim.scheduler.stats()
    assert (stats["prefill_tokens"], stats["decode_tokens"]) == (60, 3)


def test_commands_for_unknown_requests_do_nothing():
    sim = make()
    scheduler = sim.scheduler
    assert scheduler.abort(b"?") == scheduler.grant(b"?", 5) == scheduler.finish_choice(b"?", 0) == []
    request_id = sim.submit(prompt(5), max_tokens=1)
    assert scheduler.submit(sim.checker.requests[request_id].command) == [], "the edge has deduplicated"
    sim.finish_all()
    assert sim.scheduler.stats()["accepted"] == 1


def test_events_come_in_order():
    sim = make()
    sim.submit(prompt(5), max_tokens=2)
    step = sim.scheduler.schedule()
    events = sim.scheduler.update(step, sim.executor.execute(step))
    step = sim.scheduler.schedule()
    events += sim.scheduler.update(step, sim.executor.execute(step))
    assert [type(event) for event in events] == [TokensOut, TokensOut, ChoiceDone, RequestDone]
    assert [event.first_index for event in events[:2]] == [0, 1]
    assert events[0].logprobs[0].token_id == int.from_bytes(events[0].token_ids, "little")


def test_abort_all_and_fail_all():
    for max_in_flight in (1, 2):
        sim = make(max_in_flight=max_in_flight)
        ids = [sim.submit(prompt(9, salt), max_tokens=9, credit_tokens=salt) for salt in range(3)]
        sim.round()
        sim.checker.take(sim.scheduler.abort_all())
        assert all(isinstance(sim.terminal(request_id), RequestDone) for request_id in ids)
        ids = [sim.submit(prompt(9, salt), max_tokens=9) for salt in range(3)]
        sim.submit_step()
        sim.checker.take(sim.scheduler.fail_all(ErrorCode.DRAINING, "going", 2.0))
        assert all(sim.code(request_id) == ErrorCode.DRAINING for request_id in ids)
        sim.finish_all()
