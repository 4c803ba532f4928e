"""Eight streams decode while long prompts come in a flood: how long the streams wait for their next tokens."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from engine_world import World

from kvd.commands import Abort, TokensOut
from kvd.engine.loop import LoopEnd

STREAMS, PROMPTS, PROMPT_TOKENS = 8, 3, 4000
STEP_S, TOKEN_S = 0.008, 0.0005
"""An executor whose steps take so long, and so much longer for each token."""
BOUND_S = 0.06


def gaps_of_streams(*, max_steps_in_flight, **scheduler):
    """Seconds between two tokens of a stream, from the flood's arrival until its last prompt is done; and how long that took."""
    world = World(num_blocks=1600, max_model_len=5000, max_steps_in_flight=max_steps_in_flight, is_lazy=True, **scheduler)
    world.round_s = 0.0
    world.store.check_bytes = lambda block_hashes: None  # it computes each block's whole prefix again: quadratic
    collect, take = world.executor.collect, world.client.take
    told = defaultdict(list)

    def timed(ticket):
        num_tokens = sum(row.num_tokens for row in ticket.step.started) + sum(ticket.step.continued.num_tokens)
        world.clock.now_s += STEP_S + TOKEN_S * num_tokens
        return collect(ticket)

    def heard(events):
        for event in events:
            if isinstance(event, TokensOut):
                told[event.request_id].append(world.clock.now_s)
        take(events)

    world.executor.collect, world.client.take = timed, heard
    took = []

    def life():
        yield from world.ready()
        streams = [world.submit([20 + number, *range(100, 120)], max_tokens=900, credit_tokens=1000) for number in range(STREAMS)]
        yield from world.until(lambda: all(len(told[each]) > 5 for each in streams))
        began_s = world.clock.now_s
        flood = [world.submit([40 + number] * PROMPT_TOKENS, max_tokens=1) for number in range(PROMPTS)]
        yield from world.until(lambda: all(world.client.requests[each].terminal is not None for each in flood), max_rounds=2000)
        took.append(world.clock.now_s - began_s)
        for each in streams:
            times = [time_s for time_s in told[each] if time_s >= began_s]
            took.extend(after - before for before, after in pairwise(times))
            world.send(Abort(each))
        yield

    assert world.run(life()) is LoopEnd.DRAINED
    return took[1:], took[0]


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_flood_of_long_prompts_keeps_no_stream_waiting_longer_than_the_bound(max_steps_in_flight):
    paced, paced_s = gaps_of_streams(max_steps_in_flight=max_steps_in_flight, max_inter_token_ms=BOUND_S * 1000)
    chunked, chunked_s = gaps_of_streams(max_steps_in_flight=max_steps_in_flight, max_inter_token_ms=0.0)
    unchunked, _ = gaps_of_streams(max_steps_in_flight=max_steps_in_flight, max_tokens_per_step=8192, max_inter_token_ms=0.0)
    assert max(paced) <= BOUND_S
    assert max(chunked) > 4 * BOUND_S, "a whole step's budget of prompt tokens"
    assert max(unchunked) > 30 * BOUND_S, "a whole prompt and more"
    least_s = PROMPTS * PROMPT_TOKENS * TOKEN_S
    assert least_s < chunked_s < paced_s < 1.5 * least_s, "the bound costs the prompts little"
