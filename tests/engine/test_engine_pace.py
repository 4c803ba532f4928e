"""How many steps the loop lets wait behind one another."""

from __future__ import annotations

import pytest
from engine_world import World

from kvd.engine.loop import LoopEnd

PROMPT = list(range(2, 66))
CHUNK = 32


@pytest.mark.parametrize(("seconds_a_token", "is_queued"), [(0.01, False), (0.0001, True)])
def test_a_step_waits_behind_a_chunk_of_a_prompt_only_if_that_is_short(seconds_a_token, is_queued):
    world = World(max_steps_in_flight=2, is_lazy=True, max_tokens_per_step=CHUNK)
    behind = []

    def life():
        submit, collect = world.executor.submit, world.executor.collect

        def watched(step):
            behind.extend(flight.step.num_chunk_tokens for flight in world.executor.in_flight)
            return submit(step)

        def timed(ticket):
            world.clock.now_s += seconds_a_token * ticket.step.num_chunk_tokens
            return collect(ticket)

        world.executor.submit, world.executor.collect = watched, timed
        yield from world.ready()
        yield from world.over(world.submit(PROMPT, max_tokens=2))
        behind.clear()
        yield from world.over(*(world.submit(PROMPT[first::2], max_tokens=20) for first in (0, 1)))

    assert world.run(life()) is LoopEnd.DRAINED
    assert behind.count(0) > 10, "decodes do wait behind decodes"
    assert (max(behind) > CHUNK // 2) == is_queued
