"""Random lives of the whole engine. Each is a function of its seed, which a failure prints; ``KVD_SIM_SEED=17 pytest tests/sim`` lives one again."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from engine_life import Life, make_world, start_work

from kvd.engine.loop import LoopEnd
from kvd.executor.worker import ExecutorThread

SEEDS = [int(os.environ["KVD_SIM_SEED"])] if "KVD_SIM_SEED" in os.environ else range(40)


@pytest.fixture(params=SEEDS)
def rng(request):
    print(f"KVD_SIM_SEED={request.param}")
    return random.Random(request.param)


def test_a_random_life_ends_drained(rng):
    world = make_world(rng)
    life = Life(world, rng, num_rounds=rng.choice((60, 150)), storage_error_rate=rng.choice((0.0, 0.3)))
    assert world.run(life, **start_work(rng, world)) is LoopEnd.DRAINED
    assert world.client.snapshots[-1].state == "draining"


def test_a_random_life_ends_in_an_executor_failure(rng):
    world = make_world(rng)
    at = rng.randint(1, 40)
    if rng.random() < 0.5:
        world.executor.fail_submit_at = at
    else:
        world.executor.fail_step_at = at
    life = Life(world, rng, num_rounds=400, storage_error_rate=0.1)
    end = world.run(life, **start_work(rng, world))
    has_come = world.scheduler.stats()["steps"] >= at
    assert end is (LoopEnd.ENGINE_ERROR if has_come else LoopEnd.DRAINED)
    assert world.executor.is_dead == has_come


def test_a_disk_that_never_answers_holds_up_no_drain(rng):
    world = make_world(rng)
    life = Life(world, rng, num_rounds=60, storage_error_rate=0.0, is_stuck=True)
    assert world.run(life, **start_work(rng, world)) is LoopEnd.DRAINED
    assert world.clock.now_s < world.drain_deadline_s + 1.0


def test_the_executors_thread_changes_nothing(rng):
    world = make_world(rng, make_executor=ExecutorThread)
    life = Life(world, rng, num_rounds=60, storage_error_rate=0.1)
    assert world.run(life, **start_work(rng, world)) is LoopEnd.DRAINED
    assert world.executor.close(5.0)


def test_the_lives_see_what_they_are_for():
    """Every kind of end, and the rare turns of the scheduler, come about in the lives above."""
    ends, answers, num_preemptions, num_replanned = Counter(), Counter(), 0, 0
    num_loads = num_failed_loads = 0
    for seed in range(60):
        rng = random.Random(seed)
        world = make_world(rng)
        world.run(Life(world, rng, num_rounds=100, storage_error_rate=0.3), **start_work(rng, world))
        ends.update(expected.code for expected in world.client.requests.values())
        answers.update(getattr(answer, "code", type(world.client.ops[op_id]).__name__) for op_id, answer in world.client.answers.items())
        num_preemptions += world.scheduler.stats()["preemptions"]
        num_replanned += world.scheduler.stats()["replanned"]
        num_loads += world.disk.num_ended if world.disk is not None else 0
        num_failed_loads += world.scheduler.stats()["failed_loads"]
    assert {"done", "nonfinite_logits", "client_too_slow", "kv_capacity", "overloaded", "starting", "draining"} <= set(ends)
    assert {"PinPrefix", "Unpin", "CheckpointNow", "Query", "pin_capacity", "storage_error"} <= set(answers)
    assert num_preemptions > 10
    assert num_replanned > 0
    assert num_loads > 50
    assert num_failed_loads > 5
