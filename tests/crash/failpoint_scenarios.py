"""Ways to have a real daemon pass each failpoint: a state directory as prepared, damaged if need be, and work that gets it there.

A new failpoint is tried with the work that most of them need (``WORK``); where that does not reach it, the test says so, and ``SCENARIOS`` wants an entry.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from daemon_process import DaemonDiedError, DaemonProcess
from kvd_client import Client, errors

SYSTEM = ("The house rules say that every visitor signs the ledger before the tour begins. " * 5).strip()
RULES = ("The pinned rules say that nobody touches the paintings, not even the curator. " * 5).strip()
OTHER = ("The other rules are about the garden, where one may touch what one likes. " * 4).strip()
NEXT = ("The next edition of the other rules closes the garden on Mondays, all day long. " * 3).strip()
GONE = ("connection_lost", "interrupted")
"""What a client is told whose daemon died."""


@dataclass(slots=True)
class Ledger:
    """What clients were promised: for each pin the prefixes that it may hold now, None for "no such pin"."""

    pins: dict[str, set[str | None]] = field(default_factory=dict)

    def pin(self, client: Client, name: str, text: str) -> None:
        self.pins[name] = self.pins.get(name, {None}) | {text}
        client.pin(name, text)
        self.pins[name] = {text}

    def unpin(self, client: Client, name: str) -> None:
        self.pins[name] = self.pins[name] | {None}
        client.unpin(name)
        self.pins[name] = {None}


@dataclass(frozen=True, slots=True)
class Scenario:
    """``damage`` is done to the prepared state; ``at`` is the passage at which the daemon dies; ``in_start`` says that it dies before READY (None: about then).

    ``keeps_bytes`` is False where the prepared store is lost on the way. ``flags`` are the dying daemon's own, ``stays`` those of it and of all after it.
    """

    damage: Callable[[Path], None] = lambda _: None
    at: int = 1
    in_start: bool | None = False
    keeps_bytes: bool = True
    flags: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()
    forgets: bool = False
    """The work ends with a forget of what it has heated."""


def _tear_log(state_dir: Path) -> None:
    segment = max((state_dir / "wal").glob("*.wal"))
    segment.write_bytes(segment.read_bytes().rstrip(b"\0") + b"\1\2\3\4\5")


def _cut_store(state_dir: Path) -> None:
    for data in (state_dir / "kv").glob("[0-9]*/data.mdb"):
        data.write_bytes(data.read_bytes()[:-1])


def _drop_store(state_dir: Path) -> None:
    shutil.rmtree(state_dir / "kv")


def _cut_recipes(state_dir: Path) -> None:
    newest = max((state_dir / "recipes").iterdir(), key=lambda path: int(path.suffix[1:]))
    newest.write_bytes(newest.read_bytes()[:-1])


def _make_key(state_dir: Path) -> None:
    key_file = state_dir.with_name("store.key")
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)


WORK = Scenario()
SCENARIOS = {
    "wal.": Scenario(at=4),  # the first ones come with the start
    "wal.before_unlink": Scenario(in_start=None),
    "wal.segment.": Scenario(in_start=None),
    "wal.repair.": Scenario(_tear_log, in_start=True),
    "checkpoint.": Scenario(at=2),
    "store.": Scenario(at=2),
    "store.aside.": Scenario(_cut_store, in_start=True, keeps_bytes=False),
    "store.create.": Scenario(_drop_store, in_start=True, keeps_bytes=False),
    "store.current.": Scenario(_drop_store, in_start=True, keeps_bytes=False),
    "store.marker.": Scenario(in_start=True),
    "rehydrate.": Scenario(in_start=True),
    "forget.": Scenario(forgets=True),
    "keys.": Scenario(
        _make_key, in_start=True, keeps_bytes=False, stays=("--store-encryption-key-file", "store.key")
    ),  # the start that encrypts
    "cold.": Scenario(in_start=True, flags=("--rehydrate-max-fraction", "0", "--cold-tier", "always")),  # the pins come back so
    "recipes.restore.": Scenario(_cut_recipes, in_start=True),
    "recipes.": Scenario(at=2),  # of the pin that takes another's place
    "executor.step": Scenario(at=40),
}
"""By the beginning of the name; the longest that fits counts."""


def scenario_of(name: str) -> Scenario:
    fitting = [start for start in SCENARIOS if name.startswith(start)]
    return SCENARIOS[max(fitting, key=len)] if fitting else WORK


class OpenStream(threading.Thread):
    """A request that is under way when the daemon dies: ``end`` is what its client was told."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.client = Client(endpoint, timeout_s=60, reconnect_timeout_s=0.5)
        self.end = "nothing"
        self.begun = threading.Event()

    def run(self) -> None:
        try:
            for _ in self.client.generate(SYSTEM + " for a long time", stream=True, max_tokens=2000, temperature=0.0, ignore_eos=True):
                self.begun.set()
            self.end = "finished"
        except errors.KvdError as error:
            self.end = error.code
        finally:
            self.begun.set()
            self.client.close()


def work(process: DaemonProcess, ledger: Ledger, *, forgets: bool = False) -> str:
    """Pin, replace, unpin, heat prefixes, checkpoint, until the daemon dies of it; the code that the operation under way ended with."""
    stream = OpenStream(process.endpoint)
    try:
        with Client(process.endpoint, timeout_s=60, reconnect_timeout_s=0.5, wait_until_ready=False) as client:
            stream.start()
            stream.begun.wait(60)
            ledger.pin(client, "other", OTHER)
            ledger.pin(client, "other", NEXT)
            fresh = f"A prefix that was never seen before, nor will be again: {process.root.name}." * 4
            for suffix in (" one", " two", " three"):
                client.generate(fresh + suffix, max_tokens=4, temperature=0.0, ignore_eos=True)
            client.checkpoint()
            ledger.pin(client, "third", OTHER)
            ledger.unpin(client, "third")
            client.checkpoint()
            if forgets:
                client.forget(fresh)
            end_s = time.monotonic() + 3
            while time.monotonic() < end_s:
                client.generate(fresh + " again", max_tokens=4, temperature=0.0, ignore_eos=True)
    except errors.KvdError as error:
        return error.code
    else:
        return ""
    finally:
        stream.join(60)
        if stream.end not in GONE and process.process.poll() == -9:
            raise AssertionError(f"the client of an open stream was told {stream.end!r}")


def die_at(
    root: Path,
    name: str,
    scenario: Scenario,
    ledger: Ledger,
    *flags: str,
    fake: bool = True,
    first: Callable[[Client], None] = lambda _: None,
) -> None:
    """A life that ends at the failpoint ``name``, after ``first``; its open requests end with a clear error."""
    with DaemonProcess(root, *flags, *scenario.flags, env={"KVD_FAILPOINTS": f"{name}=kill@{scenario.at}"}, fake=fake) as process:
        told = ""
        with contextlib.suppress(DaemonDiedError):
            process.wait_ready()
            with process.client() as client:
                first(client)
            told = work(process, ledger, forgets=scenario.forgets)
            if told not in ("", *GONE):
                raise AssertionError(f"the client of the killed daemon was told {told!r}")
        if process.process.poll() is None and not told:
            raise AssertionError(f"{name} was not passed: give it a scenario in {Path(__file__).name}")
        assert process.wait_dead(10) == -9
        assert scenario.in_start in {None, told == ""}, f"{name} was passed {'after' if told else 'before'} READY"
