"""The scheduler's promises, one by one, on steps whose answers prove what they read."""

from __future__ import annotations

import pytest
from simulation import Simulation
from stream_checker import namespace_of

from kvd.cache.events import BlockOrigin
from kvd.commands import ChoiceDone, RequestDone, RequestFailed, Submit, TokensOut
from kvd.types import ErrorCode, SamplingParams, pack_tokens


def test_a_prompt_is_packed_and_not_empty():
    scheduler = make().scheduler
    for token_ids in (b"", b"abcde"):
        (failed,) = scheduler.submit(Submit(request_id=b"r", token_ids=token_ids, sampling=SamplingParams(), max_tokens=1))
        assert failed.code == ErrorCode.BAD_REQUEST


def make(**options):
    defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_tokens_per_step": 32, "max_running": 8, "max_waiting": 16}
    return Simulation(**(defaults | options))


def prompt(num_tokens, salt=0):
    return [(7 * index + salt) % 2 if index > 3 else (salt >> index) & 1 for index in range(num_tokens)]


def tokens_of(step):
    """(row, number of tokens) of a step, in the order of the columns."""
    return [(row.row, row.num_tokens) for row in step.started] + list(zip(step.continued.rows, step.continued.num_tokens, strict=True))


def matched(sim, tokens):
    return sim.cache.match(pack_tokens(tokens), namespace_of(b"", b"")).num_tokens


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


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "code", "numbers"),
    [
        ({"prompt": prompt(64), "max_tokens": 1}, ErrorCode.PROMPT_TOO_LONG, ("64",)),
        ({"prompt": [1], "max_tokens": 0}, ErrorCode.BAD_REQUEST, ("0",)),
        ({"prompt": [1], "max_tokens": 1, "num_choices": 4}, ErrorCode.BAD_REQUEST, ("4", "3")),
        ({"prompt": [1], "max_tokens": 1, "num_choices": 0}, ErrorCode.BAD_REQUEST, ("0",)),
        ({"prompt": prompt(33), "max_tokens": 9}, ErrorCode.KV_CAPACITY, ("11", "10")),
        ({"prompt": prompt(17), "max_tokens": 9, "num_choices": 3}, ErrorCode.KV_CAPACITY, ("13", "10")),
    ],
)
def test_what_can_never_fit_is_refused_at_once_with_the_numbers(options, code, numbers):
    sim = make(num_blocks=10)
    request_id = sim.submit(options.pop("prompt"), **options)
    failed = sim.terminal(request_id)
    assert failed.code == code
    for number in numbers:
        assert number in failed.message
    assert not sim.scheduler.has_work()


@pytest.mark.parametrize(("num_prompt", "max_tokens", "num_choices"), [(33, 8, 1), (17, 4, 3), (36, 5, 1), (20, 1, 3)])
def test_what_just_fits_is_served(num_prompt, max_tokens, num_choices):
    sim = make(num_blocks=10)
    request_id = sim.submit(prompt(num_prompt), max_tokens=max_tokens, num_choices=num_choices)
    sim.finish_all()
    assert sim.code(request_id) == "done"
    assert sim.heard(request_id) == [max_tokens] * num_choices


def test_max_tokens_is_cut_to_what_fits_the_model():
    sim = make()
    request_id = sim.submit(prompt(60), max_tokens=1000)
    sim.finish_all()
    assert sim.heard(request_id) == [4]


@pytest.mark.parametrize(("num_prompt", "num_choices", "most"), [(33, 1, 8), (17, 3, 8), (36, 1, 5), (25, 1, 16)])
def test_a_length_that_nobody_asked_for_is_cut_to_what_the_pool_has(num_prompt, num_choices, most):
    sim = make(num_blocks=10)
    request_id = sim.submit(prompt(num_prompt), max_tokens=64, num_choices=num_choices, may_shorten=True)
    sim.finish_all()
    assert sim.code(request_id) == "done"
    assert sim.heard(request_id) == [most] * num_choices


def test_a_length_that_nobody_asked_for_is_cut_to_what_pins_leave():
    sim = make(num_blocks=10, max_pinned_fraction=0.5)
    sim.submit(prompt(17, 1), max_tokens=1)
    sim.finish_all()
    sim.cache.pin("p", pack_tokens(prompt(16, 1)), namespace_of(b"", b""))
    other = sim.submit(prompt(10, 2), max_tokens=64, may_shorten=True)
    sim.finish_all()
    assert sim.heard(other) == [15]


def test_a_full_queue_answers_overloaded_with_a_time():
    sim = make(max_waiting=2, max_running=1)
    for salt in range(3):
        sim.submit(prompt(5, salt), max_tokens=3)
        sim.submit_step()
    refused = sim.submit(prompt(5, 9), max_tokens=3)
    failed = sim.terminal(refused)
    assert failed.code == ErrorCode.OVERLOADED
    assert 0 < failed.retry_after_s <= 30
    internal = sim.submit(prompt(5, 9), max_tokens=1, internal=True)
    assert sim.terminal(internal) is None
    sim.finish_all()


def test_pins_count_against_what_can_fit_unless_they_are_the_requests_own():
    sim = make(num_blocks=10, max_pinned_fraction=0.5)
    sim.submit(prompt(17, 1), max_tokens=1)
    sim.finish_all()
    sim.cache.pin("p", pack_tokens(prompt(16, 1)), namespace_of(b"", b""))
    other = sim.submit(prompt(25, 2), max_tokens=1)
    assert sim.code(other) == ErrorCode.KV_CAPACITY
    own = sim.submit([*prompt(17, 1), *prompt(15, 2)], max_tokens=4)
    sim.finish_all()
    assert sim.code(own) == "done"


def test_a_request_that_pins_made_impossible_fails_instead_of_hanging():
    sim = make(num_blocks=10, max_pinned_fraction=0.5)
    sim.submit(prompt(17, 1), max_tokens=1)
    sim.finish_all()
    doomed = sim.submit(prompt(17, 2), max_tokens=20)
    for _ in range(5):
        sim.round()
    sim.cache.pin("p", pack_tokens(prompt(16, 1)), namespace_of(b"", b""))
    waiting = sim.submit(prompt(5, 5), max_tokens=1)
    sim.finish_all()
    assert sim.code(doomed) == ErrorCode.KV_CAPACITY
    assert "10" in sim.terminal(doomed).message
    assert sim.code(waiting) == "done"


def test_a_waiting_request_that_pins_made_impossible_fails_too():
    sim = make(num_blocks=10, max_pinned_fraction=0.5, max_running=3)
    running = sim.submit(prompt(17, 1), max_tokens=12)
    waiting = sim.submit(prompt(33, 2), max_tokens=4)
    for _ in range(3):
        sim.round()
    sim.cache.pin("p", pack_tokens(prompt(16, 1)), namespace_of(b"", b""))
    sim.finish_all()
    assert (sim.code(running), sim.code(waiting)) == ("done", ErrorCode.KV_CAPACITY)


# ---------------------------------------------------------------------------------------------------------------- sharing


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


# ------------------------------------------------------------------------------------------------------------------ forks


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


# ------------------------------------------------------------------------------------------------------------- preemption


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


# ------------------------------------------------------------------------------------------------------- ends and stopping


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


# --------------------------------------------------------------------------------------------------------------- failures


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


# ----------------------------------------------------------------------------------------------------------------- credit


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
