"""A short soak in each run of the tests; ``make soak`` has long ones."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from soak import soak
from soak_plan import plan_client, plan_life

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

MOST_TURNS = 5


def test_the_same_seed_gives_the_same_plan() -> None:
    names = ["a", "b"]
    assert [plan_life(7, number, names) for number in range(50)] == [plan_life(7, number, names) for number in range(50)]
    assert list(islice(plan_client(7, 1), 50)) == list(islice(plan_client(7, 1), 50))
    assert plan_life(7, 3, names) != plan_life(8, 3, names)


def test_twenty_seconds_of_random_deaths(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for turn in range(MOST_TURNS):  # on a busy machine a life takes long, and twenty seconds are few of them
        (root := tmp_path / f"{turn}").mkdir()
        counts = soak(root, seed=4 + turn, kills=100, seconds=20)
        print(counts)
        assert counts["wrong_tokens"] == counts["lost_pins"] == 0
        total.update(counts)
        if total["kills"] >= 3 and total["tokens_checked"] > 100:
            break
    assert total["kills"] >= 3
    assert total["tokens_checked"] > 100
