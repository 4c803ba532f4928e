"""Beams, best_of, samples and plain requests crowd a small pool, are aborted, preempted and forgotten: each says what it says alone."""

from __future__ import annotations

import os
import random
from functools import cache

import pytest
from beam_world import World

from kvd.cache.tenants import Selection
from kvd.commands import RequestDone, RequestFailed
from kvd.executor.fake import EOS_TOKEN_ID
from kvd.types import BeamSearch, ErrorCode, SamplingParams, pack_tokens

POISON = 7


@cache
def alone(prompt, options, block_size):
    world = World(block_size=block_size, num_blocks=600)
    request_id = world.submit(prompt, **dict(options))
    world.finish()
    return world.told[request_id], world.ends[request_id]


def drawn(draw):
    prompt = draw.choice([b"abcdefgh", b"abcdefghij klm", b"abcd", b"x"]) + bytes(draw.choices(b"ab", k=draw.randrange(3)))
    options = {"max_tokens": draw.randint(1, 16), "stop_token_ids": (EOS_TOKEN_ID, *b"et")[: draw.randrange(4)]}
    options["min_tokens"] = draw.choice([0, 0, min(3, options["max_tokens"])])
    kind = draw.randrange(4)
    if kind == 0:
        options["beam"] = BeamSearch(draw.randint(1, 4), draw.choice([0.0, 1.0, 2.0]), draw.choice([True, False, None]))
        options["num_choices"] = draw.randint(1, options["beam"].width)
    else:
        options["num_choices"] = draw.randint(1, 2)
        options["sampling"] = SamplingParams(seed=draw.randrange(3), num_logprobs=draw.choice([None, 0, 2]))
        options["best_of"] = draw.choice([0, options["num_choices"] + draw.randrange(3)]) if kind == 1 else 0
    return prompt, tuple(sorted(options.items()))


def live(seed):
    draw = random.Random(seed)
    block_size = 4 if seed % 2 else 8  # a match may end inside the larger ones
    world = World(
        block_size=block_size,
        num_blocks=draw.randint(26, 44) * 4 // block_size,
        max_in_flight=draw.randint(1, 2),
        max_running=draw.randint(4, 8),
        max_tokens_per_step=draw.choice([3, 9, 32]),
        poison=POISON,
    )
    asked, aborted = {}, set()
    for _ in range(draw.randint(5, 14)):
        prompt, options = drawn(draw)
        if draw.random() < 0.08:
            prompt += bytes([POISON])
        request_id = world.submit(prompt, **dict(options))
        asked[request_id] = (prompt, options)
        for _ in range(draw.randrange(7)):
            world.round()
        fate = draw.random()
        seated = [each.request for each in world.scheduler._roster.seated() if not each.is_over]
        if fate < 0.3 and seated:
            world.scheduler._roster.preempt(draw.choice(seated))
        elif fate < 0.4:
            victim = draw.choice(list(asked))
            aborted.add(victim)
            world.take(world.scheduler.abort(victim))
        elif fate < 0.5:
            world.take(world.scheduler.forget(Selection("", b"", pack_tokens(list(b"abcdefgh"[:block_size]))))[1])
    world.finish()
    for request_id, (prompt, options) in asked.items():
        end, ends = world.terminal[request_id], world.ends[request_id]
        if isinstance(end, RequestFailed):
            assert end.code in (ErrorCode.NONFINITE_LOGITS, ErrorCode.KV_CAPACITY, ErrorCode.BAD_REQUEST)
            assert (POISON in prompt) == (end.code is ErrorCode.NONFINITE_LOGITS), end
        elif request_id not in aborted or all(each.reason != "aborted" for each in ends.values()):
            assert isinstance(end, RequestDone)
            assert (world.told[request_id], ends) == renamed(alone(prompt, options, block_size), request_id)
    return world.scheduler.stats()


def renamed(answer, request_id):
    told, ends = answer
    return told, {
        choice: type(end)(request_id, *(getattr(end, name) for name in end.__struct_fields__[1:])) for choice, end in ends.items()
    }


@pytest.mark.parametrize("seed", range(12))
def test_each_says_what_it_says_alone(seed):
    live(seed)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_each_says_what_it_says_alone_over_many_lives():
    first = int(os.environ.get("KVD_SIM_SEED", "0"))
    stats = [live(seed) for seed in range(first, first + 3000)]
    assert sum(each["preemptions"] for each in stats) > 3000
