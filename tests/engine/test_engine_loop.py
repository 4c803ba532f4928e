"""The loop: order within a round, states, commands, the drain, and how it ends when the executor fails."""

from __future__ import annotations

import pytest
import structlog
from engine_client import POISON
from engine_world import SyncExecutor, World, recipe

from kvd.commands import Abort, CheckpointNow, Drain, FinishChoice, Grant, PinPrefix, Query, Snapshot, Submit, Unpin
from kvd.engine.loop import LoopEnd, State
from kvd.types import SamplingParams, pack_tokens

PROMPT = list(b"It was a dark and stormy night; the rain fell in torrents")


def ends(life, **options):
    """Live it in a fresh world, which must end drained."""
    world = World(**options)
    assert world.run(life(world)) is LoopEnd.DRAINED
    return world


# ------------------------------------------------------------------------------------------------ serving


def test_a_request_says_what_a_lone_runner_says():
    def life(world):
        yield from world.ready()
        request_id = world.submit(PROMPT, max_tokens=20)
        yield from world.over(request_id)
        expected = world.client.requests[request_id]
        assert expected.heard[0] == expected.says(0)
        assert expected.reasons == {0: "length"}

    ends(life)


@pytest.mark.parametrize(("max_steps_in_flight", "is_lazy"), [(1, False), (2, False), (2, True), (3, True)])
def test_as_many_steps_are_in_flight_as_are_allowed(max_steps_in_flight, is_lazy):
    depths = []

    def life(world):
        submit = world.executor.submit

        def watched(step):
            ticket = submit(step)
            depths.append(len(world.executor.in_flight))
            return ticket

        world.executor.submit = watched
        yield from world.ready()
        yield from world.over(world.submit(PROMPT, max_tokens=20), world.submit(PROMPT[1:], max_tokens=20))

    ends(life, max_steps_in_flight=max_steps_in_flight, is_lazy=is_lazy)
    assert max(depths) == max_steps_in_flight


def test_tokens_leave_while_the_next_step_runs():
    order = []

    class Watched(SyncExecutor):
        def submit(self, step):
            order.append("submit")
            return super().submit(step)

        def collect(self, ticket):
            order.append("collect")
            return super().collect(ticket)

    def life(world):
        yield from world.ready()
        world.outbox.on_put(lambda: order.append("tokens") or world.client.take(world.outbox.drain()))
        order.clear()
        yield from world.over(world.submit(PROMPT, max_tokens=3))
        assert order[:9] == ["submit", "collect", "submit", "tokens", "collect", "submit", "tokens", "collect", "tokens"]

    ends(life, make_executor=Watched)


def test_credit_and_grants_pace_a_stream():
    def life(world):
        yield from world.ready()
        request_id = world.submit(PROMPT, max_tokens=9, credit_tokens=2)
        expected = world.client.requests[request_id]
        yield from world.until(lambda: world.scheduler.num_stalled == 1)
        yield
        assert len(expected.heard[0]) == 2
        world.send(Grant(request_id, 7))
        yield from world.over(request_id)
        assert len(expected.heard[0]) == 9

    ends(life)


def test_a_stream_without_credit_fails_in_the_end_though_nothing_else_happens():
    def life(world):
        yield from world.ready()
        request_id = world.submit(PROMPT, max_tokens=9, credit_tokens=2)
        yield from world.over(request_id)
        assert world.client.requests[request_id].code == "client_too_slow"

    ends(life, stall_timeout_s=3.0)


def test_an_abort_and_a_cut_choice_end_what_they_name():
    def life(world):
        yield from world.ready()
        both = world.submit(PROMPT, max_tokens=50, num_choices=2)
        other = world.submit(PROMPT[:20], max_tokens=50)
        yield from world.until(lambda: len(world.client.requests[both].heard[1]) > 2)
        world.send(FinishChoice(both, 1))
        world.send(Abort(other))
        world.send(Abort(b"unknown"))
        yield from world.over(both, other)
        assert world.client.requests[both].reasons == {0: "length", 1: "stop"}
        assert world.client.requests[other].reasons == {0: "aborted"}

    ends(life)


def test_a_row_that_is_not_finite_fails_alone():
    def life(world):
        yield from world.ready()
        good, bad = world.submit(PROMPT, max_tokens=8), world.submit([*PROMPT, POISON], max_tokens=8)
        yield from world.over(good, bad)
        assert world.client.requests[good].code == "done"
        assert world.client.requests[bad].code == "nonfinite_logits"

    ends(life)


def test_served_is_told_once_and_not_for_a_failure():
    def life(world):
        yield from world.ready()
        yield from world.over(world.submit([POISON] * 5))
        assert world.num_served == 0
        yield from world.over(world.submit(PROMPT), world.submit(PROMPT))
        assert world.num_served == 1

    ends(life)


def test_the_observer_hears_of_the_queue_and_of_each_round():
    def life(world):
        yield from world.ready()
        ids = [world.submit(PROMPT) for _ in range(4)]
        yield
        assert world.store.queue_depth == 3
        rounds, told = world.round, world.num_progress
        yield from world.over(*ids)
        assert world.store.queue_depth == 0
        assert world.num_progress - told == world.round - rounds

    ends(life, max_running=1)


def test_an_idle_loop_sleeps_no_longer_than_the_store_allows():
    sleeps = []

    def life(world):
        wait = world.inbox.wait
        world.inbox.wait = lambda timeout_s: sleeps.append(timeout_s) or wait(timeout_s)
        for delay_s in (0.002, 3.0):
            world.store.idle_delay = delay_s
            yield
            yield

    ends(life)
    assert set(sleeps) == {0.002, 0.25}


def test_background_eviction_keeps_the_watermark_free():
    def life(world):
        yield from world.ready()
        for letter in range(65, 95):
            yield from world.over(world.submit([letter] * 60, max_tokens=1))
        yield
        assert world.cache.num_free >= world.cache.watermark_blocks == 3

    ends(life, num_blocks=60)


def test_a_request_that_pins_leave_no_room_for_is_told_at_once():
    def life(world):
        yield from world.ready()
        yield from world.over(world.submit([97] * 81, max_tokens=1))
        running = world.submit(PROMPT, max_tokens=20)
        yield
        waiting = world.submit([*PROMPT, *PROMPT], max_tokens=20)
        pin = world.pin("system", [97] * 80)
        yield from world.over(running, waiting)
        assert world.client.requests[waiting].code == "kv_capacity"
        world.book.settle()
        yield from world.until(lambda: world.store.checkpoints)
        world.store.settle()
        yield from world.answered(pin)

    ends(life, num_blocks=12, max_running=1)


# ------------------------------------------------------------------------------------------------- states


def test_requests_before_ready_are_told_to_come_again():
    def life(world):
        early = world.submit(PROMPT)
        pin, unpin = world.pin("name", PROMPT), world.op(Unpin, "name")
        status = world.op(Query, "status")
        yield from world.over(early)
        yield from world.answered(pin, unpin, status)
        assert world.client.requests[early].code == "starting"
        assert {world.client.answers[pin].code, world.client.answers[unpin].code} == {"starting"}
        assert world.client.answers[status].result["state"] == "rehydrating"
        yield from world.ready()
        yield from world.over(world.submit(PROMPT))

    world = World(recipes=[recipe("system", PROMPT)], max_tokens_per_step=4)
    assert world.run(life(world), pins_deadline_s=world.clock.now_s + 60) is LoopEnd.DRAINED


def test_ready_waits_for_the_pins():
    def life(world):
        yield from world.ready()
        assert world.cache.pins()["system"].num_blocks == 3
        assert world.scheduler.stats()["steps"] > 10

    world = World(recipes=[recipe("system", PROMPT)], max_tokens_per_step=4)
    assert world.run(life(world), pins_deadline_s=world.clock.now_s + 60) is LoopEnd.DRAINED


def test_ready_comes_at_the_deadline_with_pins_pending_which_are_held_later():
    def life(world):
        yield from world.ready()
        assert not world.cache.pins()
        assert world.client.snapshots[-1].status["rehydration"]["pins_pending"] == 1
        yield from world.until(lambda: "system" in world.cache.pins())

    world = World(recipes=[recipe("system", PROMPT)], max_tokens_per_step=4)
    assert world.run(life(world), pins_deadline_s=world.clock.now_s + 0.03) is LoopEnd.DRAINED


def test_prefixes_are_computed_again_before_ready_and_cost_their_user_nothing():
    def life(world):
        yield from world.ready()
        request_id = world.submit(PROMPT)
        yield from world.over(request_id)
        assert world.client.requests[request_id].terminal.usage.recomputed_tokens == 48

    again = Submit(request_id=b"again", token_ids=pack_tokens(PROMPT), sampling=SamplingParams(), max_tokens=1)
    world = World()
    assert world.run(life(world), recompute=[again], recompute_deadline_s=world.clock.now_s + 60) is LoopEnd.DRAINED
    assert len(world.client.requests) == 1, "nobody is told of the work of the start"


def test_recomputing_ends_at_its_deadline():
    def life(world):
        yield from world.ready()
        assert world.clock.now_s < began_s + 1
        assert not world.scheduler.has_work()

    commands = [
        Submit(request_id=b"again%d" % index, token_ids=pack_tokens([index] * 200), sampling=SamplingParams(), max_tokens=1)
        for index in range(20)
    ]
    world = World(max_tokens_per_step=1)
    began_s = world.clock.now_s
    assert world.run(life(world), recompute=commands, recompute_deadline_s=began_s + 0.5) is LoopEnd.DRAINED


def test_a_snapshot_tells_each_state_and_says_it_again_while_the_start_takes_long():
    def life(world):
        world.round_s = 0.2
        yield from world.ready()

    world = World(recipes=[recipe("system", PROMPT)], max_tokens_per_step=2)
    assert world.run(life(world), pins_deadline_s=world.clock.now_s + 60) is LoopEnd.DRAINED
    states = [snapshot.state for snapshot in world.client.snapshots]
    assert states.count("rehydrating") > 3
    assert states[-2:] == ["ready", "draining"]
    assert all(0 < each.ready_in_s <= 2.0 for each in world.client.snapshots if each.state == "rehydrating")
    assert isinstance(world.client.snapshots[0], Snapshot)


# ------------------------------------------------------------------------------------------------- operations


def test_a_checkpoint_is_answered_with_what_was_written():
    def life(world):
        yield from world.ready()
        good, bad = world.op(CheckpointNow), world.op(CheckpointNow)
        yield
        assert world.store.checkpoints == [good, bad]
        world.store.settle()
        world.store.settle("no space left")
        yield from world.answered(good, bad)
        assert world.client.answers[good].result == {"blocks": 3, "bytes": 1536}
        assert world.client.answers[bad].code == "storage_error"
        assert "no space left" in world.client.answers[bad].message

    ends(life)


def test_a_checkpoint_knows_of_all_that_happened_before_it_was_asked_for():
    def life(world):
        yield from world.ready()
        request_id = world.submit(PROMPT, max_tokens=1)
        seen = []
        world.store.checkpoint_now = lambda op_id: seen.append(len(world.store.blocks)) or world.store.checkpoints.append(op_id)
        yield
        asked = world.op(CheckpointNow)  # the step is computed; its blocks have not been told yet
        yield from world.over(request_id)
        assert seen == [3]
        world.store.settle()
        yield from world.answered(asked)

    ends(life)


def test_an_unknown_report_is_refused():
    def life(world):
        yield from world.ready()
        op_id = world.op(Query, "weather")
        yield from world.answered(op_id)
        assert world.client.answers[op_id].code == "bad_request"

    ends(life)


# ------------------------------------------------------------------------------------------------- the drain


def test_a_drain_lets_running_requests_finish_and_refuses_new_ones():
    def life(world):
        yield from world.ready()
        running, waiting = world.submit(PROMPT, max_tokens=30), world.submit(PROMPT, max_tokens=5)
        yield
        op_id = world.op(Drain, 60.0)
        late, late_pin = world.submit(PROMPT), world.op(PinPrefix, recipe("name", PROMPT))
        yield from world.over(late, running, waiting)
        yield from world.answered(op_id, late_pin)
        assert world.client.answers[op_id].result == {"state": "draining"}
        assert world.client.requests[late].code == world.client.answers[late_pin].code == "draining"
        assert world.client.requests[running].reasons == {0: "length"}

    ends(life, max_running=1)


def test_a_drain_aborts_at_its_deadline():
    def life(world):
        yield from world.ready()
        request_id = world.submit(PROMPT, max_tokens=190, credit_tokens=3)
        yield from world.until(lambda: world.scheduler.num_stalled)
        world.op(Drain, 1.0)
        yield from world.over(request_id)
        assert world.client.requests[request_id].reasons == {0: "aborted"}
        assert world.clock.now_s >= world.drain_deadline_s

    ends(life)


def test_the_earliest_deadline_of_several_drains_holds():
    def life(world):
        yield from world.ready()
        world.submit(PROMPT, max_tokens=190, credit_tokens=3)
        ops = [world.op(Drain, timeout_s) for timeout_s in (500.0, 1.0, 900.0)]
        yield from world.answered(*ops)
        world.began_s = world.clock.now_s
        while True:
            yield

    world = ends(life)
    assert world.clock.now_s - world.began_s < 2.0


def test_a_drain_waits_for_what_the_disk_owes_but_not_past_the_deadline():
    def life(world):
        yield from world.ready()
        op_id = world.op(CheckpointNow)
        yield
        world.op(Drain, 5.0)
        for _ in range(8):
            yield
        assert world.end is None
        if is_answering:
            world.store.settle()
            yield from world.answered(op_id)
        while True:
            yield

    for is_answering in (True, False):
        world = ends(life)
        assert (world.clock.now_s < world.drain_deadline_s) == is_answering


def test_a_drain_during_the_start_gives_up_what_the_start_had_to_compute():
    def life(world):
        yield
        world.op(Drain, 600.0)
        while True:
            yield

    again = Submit(request_id=b"again", token_ids=pack_tokens([5] * 200), sampling=SamplingParams(), max_tokens=1)
    world = World(recipes=[recipe("system", PROMPT)], max_tokens_per_step=1)
    work = {"recompute": [again], "recompute_deadline_s": world.clock.now_s + 60, "pins_deadline_s": world.clock.now_s + 60}
    assert world.run(life(world), **work) is LoopEnd.DRAINED
    assert world.states == [State.DRAINING]
    assert world.round < 20


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("fault", ["fail_submit_at", "fail_step_at"])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_an_executor_failure_ends_everything(fault, max_steps_in_flight):
    def life(world):
        yield from world.ready()
        for _ in range(5):
            world.submit(PROMPT, max_tokens=30)
        world.pin("system", PROMPT[:40])
        while True:
            yield

    world = World(max_steps_in_flight=max_steps_in_flight, max_running=2, max_tokens_per_step=40)
    setattr(world.executor, fault, 4)
    assert world.run(life(world)) is LoopEnd.ENGINE_ERROR
    codes = [each.code for each in world.client.requests.values()]
    assert codes.count("engine_error") >= 1
    assert set(codes) <= {"engine_error", "draining"}
    assert not world.client.open_ops()
    assert not world.cache.pins()


def test_a_failed_step_leaves_nothing_of_it_in_the_tree():
    def life(world):
        yield from world.ready()
        world.submit(PROMPT)
        while True:
            yield

    world = World()
    world.executor.fail_step_at = 1
    assert world.run(life(world)) is LoopEnd.ENGINE_ERROR
    assert world.cache.num_cached == 0
    assert not world.store.blocks


def test_steps_are_logged_when_asked_for():
    def life(world):
        yield from world.ready()
        yield from world.over(world.submit(PROMPT, max_tokens=3))

    structlog.reset_defaults()  # another test of this process may have configured logging
    with structlog.testing.capture_logs() as lines:
        ends(life, log_steps=True)
    steps = [line for line in lines if line["event"] == "step"]
    assert [(line["step"], line["running"], line["num_tokens"]) for line in steps] == [(1, 1, len(PROMPT)), (2, 1, 1), (3, 1, 1)]
    assert all(line["blocks_used"] + line["blocks_cached"] + line["blocks_free"] == 64 for line in steps)
    assert steps[0]["blocks_shared"] == 0


# ----------------------------------------------------------------------------------------------- cold tier


@pytest.mark.parametrize(("max_steps_in_flight", "is_lazy"), [(1, False), (2, True)])
def test_storage_is_told_how_long_prompts_take(max_steps_in_flight, is_lazy):
    def life(world):
        collect = world.executor.collect

        def slow(ticket):
            world.clock.now_s += 0.5
            return collect(ticket)

        world.executor.collect = slow
        yield from world.ready()
        yield from world.over(world.submit(PROMPT, max_tokens=6))

    world = ends(life, max_steps_in_flight=max_steps_in_flight, is_lazy=is_lazy, max_tokens_per_step=32)
    told = world.store.prefills
    assert [num_tokens for num_tokens, _ in told if num_tokens] == [32, len(PROMPT) - 32]
    assert all(0.5 <= seconds < 0.6 for _, seconds in told), "each step's own time, also with two in flight"


def test_a_prefix_that_left_memory_is_read_while_others_run():
    def life(world):
        yield from world.ready()
        yield from world.over(world.submit(PROMPT, max_tokens=2))
        yield
        world.cache._blocks.evict(world.cache.num_blocks)
        yield
        again, other = world.submit(PROMPT, max_tokens=4), world.submit(PROMPT[::-1], max_tokens=4)
        yield from world.over(other)
        assert world.client.requests[again].terminal is None
        world.disk.read(100)
        yield from world.over(again)
        usage = world.client.requests[again].terminal.usage
        assert (usage.cached_tokens, usage.restored_tokens) == (48, 48)

    ends(life, disk=True)
