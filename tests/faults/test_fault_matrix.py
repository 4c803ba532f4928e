"""A disk that fails while a daemon serves: requests go on with the right tokens, the status names the cause, the log says it once, and persistence heals by itself.

The real daemon with the fake executor; the disk fails through ``fail_io.c``, on command and part by part.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fail_layer import NO_COMPILER, FailLayer, name
from fake_oracle import expected_tokens
from kvd_client import Client, errors

from kvd.storage.tools import check_store

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.socket,
    pytest.mark.store,
    pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER),
]

FAST = ("--checkpoint-interval-s", "0.1", "--store-max-bytes", "64MiB", "--wal-max-bytes", "4MiB", "--wal-segment-bytes", "64KiB")
BLOCKS = 20
EVENTS = {
    "kv": ("storage.degraded", "storage.resumed"),
    "wal": ("wal.failed", "wal.resumed"),
    "recipes": ("recipes.failed", "recipes.resumed"),
}
READONLY = ("write", "open", "rename", "mkdir", "unlink", "allocate")


@dataclass(frozen=True)
class Rule:
    error: int
    classes: tuple[str, ...]
    under: str
    part: str = ""
    mode: str = "always"
    number: int = 1


@dataclass(frozen=True)
class Fault:
    """``parts`` are those of EVENTS that are to fail; ``causes`` what the status may name."""

    label: str
    parts: tuple[str, ...]
    rules: tuple[Rule, ...]
    is_full: bool = False

    @property
    def causes(self) -> set[str]:
        return {name(rule.error) for rule in self.rules}


def fault(label: str, parts: str, *rules: Rule, full: bool = True) -> Fault:
    return Fault(label, tuple(parts.split()), rules, full)


def _plain(part: str, under: str, *, full: bool = True) -> list[Fault]:
    """Each way of failing, of one part."""
    return [
        fault(f"{part}: no room to write", part, Rule(errno.ENOSPC, ("write", "allocate"), under), full=full),
        fault(f"{part}: no room for new files", part, Rule(errno.ENOSPC, ("open", "mkdir", "write"), under), full=full),
        fault(f"{part}: quota", part, Rule(errno.EDQUOT, ("write",), under), full=full),
        fault(f"{part}: writes fail", part, Rule(errno.EIO, ("write",), under), full=full),
        fault(f"{part}: syncs fail", part, Rule(errno.EIO, ("sync",), under), full=full),
        fault(f"{part}: read-only", part, Rule(errno.EROFS, READONLY, under), full=full),
        fault(
            f"{part}: no descriptors, and writes fail",
            part,
            Rule(errno.EIO, ("write",), under),
            Rule(errno.EMFILE, ("open", "open_read"), under),
        ),
    ]


FAULTS = [
    *_plain("kv", "kv/"),
    *_plain("wal", "wal/"),
    *_plain("recipes", "recipes/"),
    *_plain("kv wal recipes", ""),
    fault("kv: no fresh generation's folder", "kv", Rule(errno.EIO, ("sync",), "kv/", "data.mdb"), Rule(errno.ENOSPC, ("mkdir",), "kv/")),
    fault(
        "kv: CURRENT can't be replaced",
        "kv",
        Rule(errno.EIO, ("write",), "kv/", "data.mdb", "nth", 2),
        Rule(errno.EIO, ("rename",), "kv/", "CURRENT"),
    ),
    fault(
        "kv: lmdb's lock file",
        "kv",
        Rule(errno.EIO, ("write",), "kv/", "data.mdb", "nth", 2),
        Rule(errno.ENOSPC, ("allocate",), "kv/", "lock.mdb"),
    ),
    fault("kv: nothing is mapped", "kv", Rule(errno.EIO, ("write",), "kv/", "data.mdb", "nth", 2), Rule(errno.ENOMEM, ("map",), "kv/")),
    fault("wal: segments can't be named", "wal", Rule(errno.EIO, ("rename",), "wal/"), Rule(errno.EIO, ("sync",), "wal/", mode="nth")),
    fault("recipes: files can't be named", "recipes", Rule(errno.EIO, ("rename",), "recipes/")),
    # what every change runs; the rest is for make test-full
    fault("the store's disk is full", "kv", Rule(errno.ENOSPC, ("write",), "kv/", "data.mdb"), full=False),
    fault("the store's syncs fail, and every folder", "kv", Rule(errno.EIO, ("sync", "mkdir"), "kv/"), full=False),
    fault("the log's syncs fail", "wal", Rule(errno.EIO, ("sync",), "wal/"), full=False),
    fault("the recipes find no room", "recipes", Rule(errno.ENOSPC, ("write",), "recipes/"), full=False),
    fault("everything is read-only", "kv wal recipes", Rule(errno.EROFS, READONLY, ""), full=False),
    fault("every write fails", "kv wal recipes", Rule(errno.EIO, ("write", "sync"), ""), full=False),
]


class Life:
    """A daemon, its failing layer, and what it has promised."""

    def __init__(self, root: Path, process: DaemonProcess, client: Client, layer: FailLayer) -> None:
        self.root = root
        self.process = process
        self.client = client
        self.layer = layer
        self.pins: dict[str, str] = {}
        self.num_prompts = 0
        self._log_offset = 0

    def ask(self, prompt: str) -> None:
        answer = self.client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == expected_tokens(prompt.encode(), 8)

    def ask_new(self) -> None:
        """A new prefix, used twice: hot, so that storage wants it on disk."""
        self.num_prompts += 1
        prefix = f"prompt number {self.num_prompts}. ".ljust(16 * BLOCKS, "x")
        self.ask(prefix + " one")
        self.ask(prefix + " two")

    def pin(self) -> str:
        """What became of a new pin: its durability, or the error's text."""
        pin = f"pin-{len(self.pins)}-of-{self.num_prompts}"
        prompt = f"{pin}: ".ljust(16 * BLOCKS, "p")
        try:
            durable = str(self.client.pin(pin, prompt).details["durable"])
        except errors.StorageError as error:
            return str(error)
        self.pins[pin] = prompt
        return durable

    def store(self) -> dict:
        return self.client.status()["store"]

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.store()
            time.sleep(0.02)

    def events(self) -> list[str]:
        """What was logged since the last ``forget_events``."""
        lines = self.process.log()[self._log_offset :].splitlines(keepends=True)
        return [json.loads(line)["event"] for line in lines if line.startswith("{") and line.endswith("\n")]

    def forget_events(self) -> None:
        self._log_offset = len(self.process.log())


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    layer = FailLayer(tmp_path, tmp_path / "state")
    with DaemonProcess(tmp_path, *FAST, env=layer.env) as process:
        process.wait_ready()
        with process.client() as client:
            life = Life(tmp_path, process, client, layer)
            life.ask_new()
            assert life.pin() == "recipe+bytes"
            yield life


def go_through(life: Life, fault: Fault) -> None:
    life.forget_events()
    for index, rule in enumerate(fault.rules):
        life.layer.arm(rule.error, *rule.classes, under=rule.under, part=rule.part, mode=rule.mode, number=rule.number, rule=index)
    life.ask_new()
    during = life.pin()
    if "recipes" in fault.parts:
        assert any(f"{cause}: " in during for cause in fault.causes), during
    else:
        assert during in {"recipe", "recipe+bytes"}
    life.until(lambda: all(EVENTS[part][0] in life.events() for part in fault.parts) and life.store()["degraded"])
    assert life.store()["reason"].partition(": ")[0] in fault.causes
    num_failed = [life.layer.num_failed(rule) for rule in range(len(fault.rules))]
    if fault.parts != ("recipes",):  # which are tried again with the next pin, or after ten seconds
        life.until(lambda: any(life.layer.num_failed(rule) > before for rule, before in enumerate(num_failed)))
    life.ask_new()
    assert life.store()["degraded"]
    begun = life.events()
    for part in EVENTS:
        assert begun.count(EVENTS[part][0]) == (part in fault.parts), (part, begun)
        assert EVENTS[part][1] not in begun
    life.forget_events()
    life.layer.clear()
    if "recipes" in fault.parts:
        life.pin()
    life.until(lambda: not life.store()["degraded"])
    # what was hot before, during and after is stored, and so are all pins
    life.ask_new()
    assert life.pin() == "recipe+bytes"
    num_hot = BLOCKS * (life.num_prompts + len(life.pins))
    life.until(lambda: life.store()["blocks"] >= num_hot)
    ended = life.events()
    for part, (failed, resumed) in EVENTS.items():
        assert ended.count(resumed) == (part in fault.parts), (part, ended)
        assert failed not in ended


def assert_kept(life: Life) -> None:
    """After SIGKILL: every pin that was acknowledged is held, tokens are right, and the store checks clean."""
    life.process.kill()
    with DaemonProcess(life.root, *FAST) as process:
        process.wait_ready()
        with process.client() as client:
            assert {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]} == dict.fromkeys(life.pins, "held")
            assert client.status()["store"]["degraded"] is False
            for prompt in life.pins.values():
                answer = client.generate(prompt + "?", max_tokens=4, temperature=0.0, ignore_eos=True)
                assert list(answer.token_ids) == expected_tokens(f"{prompt}?".encode(), 4)
                assert answer.usage.cached_tokens == 16 * BLOCKS
        assert process.terminate() == 0
    report = check_store(life.root / "state")
    assert report["ok"], report["problems"]


def test_a_life_through_many_faults(life):
    for each in FAULTS:
        if not each.is_full:
            go_through(life, each)
    assert_kept(life)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.label)
def test_each_fault(life, fault):
    for _ in range(2):
        go_through(life, fault)
    assert_kept(life)
