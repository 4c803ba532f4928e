"""1,000 random requests over all features at once: none hangs, none leaks, each has one end that fits it, and each that can be repeated is.

``more_random_requests.py`` goes on with other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_requests_world import Alone, Pressed, make_adapters
from request_drawing import BYTES, Ask, crowds
from request_rules import Facts

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store, pytest.mark.grammar]

CROWD = 40
MOST_MORE = 20
SMALL_POOL = ("--kv-memory", "24KiB", "--max-model-len", "256", "--max-running", "10", "--max-choices", "4", "--max-tokens-per-step", "48")
FACTS = Facts(num_blocks=48, max_model_len=256, vocab_size=257, eos=(256,))
THREAD = (*SMALL_POOL, "--max-adapters", "2")
PROCESS = (
    *SMALL_POOL,
    "--frontend",
    "process",
    "--max-waiting",
    "6",
    "--max-adapters",
    "1",
    "--cold-tier",
    "always",
)
KILLED = (*SMALL_POOL, "--max-adapters", "3", "--write-policy", "through", "--checkpoint-interval-s", "0.2", "--max-inter-token-ms", "0")
PROCESS_FACTS = replace(FACTS, may_overload=True)
THE_SAME_EVERY_TIME = settings(
    database=None,
    deadline=None,
    phases=(Phase.generate,),  # to make a crowd smaller is nobody's help: when its requests meet is another matter each time
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[Alone]:
    alone = Alone(tmp_path_factory.mktemp("alone") / "kvd", adapters, "--kv-memory", "256KiB", "--max-model-len", "256")
    with alone.process:
        alone.wait_ready()
        yield alone
        alone.close()


def press(pressed: Pressed, crowds_seed: int, num_crowds: int, how: Callable[..., None] = Pressed.press) -> None:
    """That many crowds, the same ones for the same seed, one after the other on the same daemon."""

    @seed(crowds_seed)
    @settings(THE_SAME_EVERY_TIME, max_examples=num_crowds)
    @given(crowds(BYTES, size=CROWD))
    def one(crowd):
        how(pressed, crowd)
        pressed.check_quiet()

    pressed.process.wait_ready()
    one()
    print(dict(sorted(pressed.counts.items())))
    assert pressed.counts["requests"] >= num_crowds * CROWD


def press_until(pressed: Pressed, crowds_seed: int, num_crowds: int, **more_than: int) -> None:
    """That many crowds, and others until each of the counts is more than that: how much meets what is the machine's affair."""
    press(pressed, crowds_seed, num_crowds)
    for number in range(MOST_MORE):
        if all(pressed.counts[name] > least for name, least in more_than.items()):
            return
        press(pressed, 1000 * crowds_seed + number, 3)
    few = {name: pressed.counts[name] for name, least in more_than.items() if pressed.counts[name] <= least}
    assert not few, f"{few}; wanted are more than {more_than}"


def drawn(crowds_seed: int, num_crowds: int = 2) -> list:
    """Crowds as data, the simplest one left out."""
    found = []

    @seed(crowds_seed)
    @settings(THE_SAME_EVERY_TIME, max_examples=num_crowds)
    @given(crowds(BYTES, size=CROWD))
    def draw(crowd):
        found.append(crowd)

    draw()
    return found[1:]


def press_and_kill(pressed: Pressed, crowd: list) -> None:
    pressed.press_and_kill([replace(item, spoilt="") for item in crowd if isinstance(item, Ask)], after_s=0.1)


def test_in_a_small_pool(tmp_path: Path, adapters: Path, alone: Alone) -> None:
    with Pressed(tmp_path / "kvd", FACTS, adapters, *THREAD, alone=alone) as pressed:
        press_until(pressed, 1, 14, repeated=200, preemptions=10, partial_hit_tokens=100, accepted=20)
        for crowd in drawn(4):
            pressed.leave(crowd)
        pressed.check_quiet()
        assert pressed.process.terminate() == 0


def test_with_a_short_queue_and_the_edge_in_a_process_of_its_own(tmp_path: Path, adapters: Path, alone: Alone) -> None:
    with Pressed(tmp_path / "kvd", PROCESS_FACTS, adapters, *PROCESS, alone=alone, with_tenants=True) as pressed:
        press_until(pressed, 2, 8, **{"repeated": 50, "ended overloaded": 10})
        pressed.drain(drawn(5)[0])


def test_over_kills_of_the_daemon(tmp_path: Path, adapters: Path, alone: Alone) -> None:
    with Pressed(tmp_path / "kvd", FACTS, adapters, *KILLED, alone=alone) as pressed:
        press(pressed, 3, 3, press_and_kill)
        assert pressed.counts["repeated"] > 50
        assert pressed.counts["kills"] == 3
        assert pressed.process.terminate() == 0
