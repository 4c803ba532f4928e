"""A real daemon dies by SIGKILL at each failpoint that it knows, is started again, and has kept every promise.

Right tokens; acknowledged pins held and served from cache, unacknowledged ones either way; no block leaked; a store that checks clean; and the client of the daemon that
died was told so for each open request.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from failpoint_scenarios import NEXT, OTHER, RULES, SCENARIOS, SYSTEM, Ledger, die_at, scenario_of
from fake_oracle import expected_tokens
from kvd_client import Client
from kvd_client.results import Usage

import kvd.daemon  # noqa: F401 (declares the failpoints)
from kvd.observe import failpoints
from kvd.storage.tools import check_store

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

FLAGS = ("--kv-memory", "2MiB", "--wal-segment-bytes", "64KiB", "--fake-step-ms", "1")
BLOCK = 16
ON_THE_REAL_MODEL = {
    "checkpoint.between_blocks": 2,
    "recipes.copy.before_rename": 2,
    "store.before_commit": 2,
    "executor.step": 60,
    "rehydrate.before_copy_in": 1,
}
"""And the passage at which the daemon dies there."""
AFTER = " after the crash"
PINNED = " pinned?"


def points() -> list[str]:
    return sorted(failpoints.NAMES)


class FakeOracle:
    """What each prompt must be answered, computed aside."""

    def __call__(self, client: Client, prompt: str) -> Usage:
        answer = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == expected_tokens(prompt.encode(), 8)
        return answer.usage


class EarlierAnswers:
    """What each prompt was answered before, out of the cache: a later answer out of the same blocks is the same to the last bit."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, ...]] = {}

    def __call__(self, client: Client, prompt: str) -> Usage:
        answer = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        if prompt in self.answers:
            assert answer.token_ids == self.answers[prompt]
        elif answer.usage.cached_tokens:
            self.answers[prompt] = answer.token_ids
        return answer.usage


Oracle = Callable[[Client, str], Usage]


def full_blocks(client: Client, text: str) -> int:
    """Tokens of the full blocks of a text."""
    return len(client.tokenize(text)) // BLOCK * BLOCK


def prepare(process: DaemonProcess, oracle: Oracle) -> None:
    """A pin that was acknowledged and a hot prefix on disk."""
    process.wait_ready()
    with process.client() as client:
        client.pin("rules", RULES)
        for suffix in (" one", " two", AFTER, AFTER):
            oracle(client, SYSTEM + suffix)
        for text in (RULES, OTHER, NEXT):
            for _ in range(2):
                oracle(client, text + PINNED)
        client.checkpoint()


def check_promises(client: Client, ledger: Ledger, oracle: Oracle, *, keeps_bytes: bool = True) -> None:
    """Right after a start."""
    found = {pin["name"]: pin for pin in client.prefixes()["pins"]}
    assert all(pin["state"] == "held" for pin in found.values())
    for name, possible in ledger.pins.items():
        pin = found.pop(name, None)
        held = [text for text in possible if pin is not None and text is not None and full_blocks(client, text) == pin["tokens"]]
        assert held or (pin is None and None in possible), f"{name}: {pin}, of {possible}"
        for text in held:
            assert oracle(client, text + PINNED).cached_tokens >= full_blocks(client, text), "an acknowledged pin is served from cache"
        ledger.pins[name] = set(held) or {None}
    assert found == {}
    assert oracle(client, SYSTEM + AFTER).restored_tokens >= full_blocks(client, SYSTEM) or not keeps_bytes
    blocks = client.status()["blocks"]
    assert blocks["used"] == 0
    assert blocks["free"] + blocks["cached"] == blocks["total"]


def check_recovered(root: Path, ledger: Ledger, oracle: Oracle, *flags: str, keeps_bytes: bool, fake: bool = True) -> None:
    with DaemonProcess(root, *flags, fake=fake) as process:
        process.wait_ready()
        with process.client() as client:
            check_promises(client, ledger, oracle, keeps_bytes=keeps_bytes)
        assert process.terminate() == 0
    report = check_store(root / "state")
    assert report["ok"], report["problems"]


def kill_and_check(prepared: Path, root: Path, name: str) -> None:
    shutil.copytree(prepared / "state", root / "state")
    scenario = scenario_of(name)
    scenario.damage(root / "state")
    ledger = Ledger({"rules": {RULES}})
    # Checkpoints come when they are asked for, so that the passages can be counted.
    die_at(root, name, scenario, ledger, *FLAGS, "--checkpoint-interval-s", "60", *scenario.stays)
    check_recovered(root, ledger, FakeOracle(), *FLAGS, *scenario.stays, keeps_bytes=scenario.keeps_bytes)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """Two at a time, since a start is mostly waiting for imports: each chosen failpoint's death and what came after."""
    prepared = tmp_path_factory.mktemp("prepared")
    with DaemonProcess(prepared, *FLAGS) as process:
        prepare(process, FakeOracle())
        process.kill()
    names = [item.callspec.params["name"] for item in request.session.items if item.function is test_killed_at_every_failpoint]
    with ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(kill_and_check, prepared, tmp_path_factory.mktemp("killed"), name) for name in names}
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", points())
def test_killed_at_every_failpoint(outcomes: dict[str, Future[None]], name: str) -> None:
    outcomes[name].result()


@pytest.mark.model
def test_killed_at_five_failpoints_on_the_real_model(tmp_path: Path) -> None:
    """Each life checks what the one before has left, and then dies at the next failpoint."""
    flags = ("--kv-memory", "192MiB", "--checkpoint-interval-s", "60", "--dtype", "float32")
    oracle, ledger = EarlierAnswers(), Ledger({"rules": {RULES}})
    with DaemonProcess(tmp_path, *flags, fake=False) as process:
        prepare(process, oracle)
        process.kill()
    for name, at in ON_THE_REAL_MODEL.items():
        scenario = dataclasses.replace(scenario_of(name), at=at)
        die_at(tmp_path, name, scenario, ledger, *flags, fake=False, first=lambda client: check_promises(client, ledger, oracle))
    check_recovered(tmp_path, ledger, oracle, *flags, keeps_bytes=True, fake=False)


def test_no_scenario_is_left_over() -> None:
    assert len(points()) >= 38
    assert [start for start in SCENARIOS if not any(name.startswith(start) for name in points())] == []
    assert set(ON_THE_REAL_MODEL) <= set(points())
