"""Many more random lives than every change can wait for; a failure names its seed."""

from __future__ import annotations

import random

import pytest
from engine_life import Life, make_world, start_work

from kvd.engine.loop import LoopEnd

pytestmark = pytest.mark.full


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first_seed", range(10_000, 14_000, 500))
def test_five_hundred_lives(first_seed):
    for seed in range(first_seed, first_seed + 500):
        print(f"seed {seed}")
        rng = random.Random(seed)
        world = make_world(rng)
        life = Life(world, rng, num_rounds=rng.choice((60, 300)), storage_error_rate=rng.choice((0.0, 0.3)))
        assert world.run(life, **start_work(rng, world)) is LoopEnd.DRAINED
