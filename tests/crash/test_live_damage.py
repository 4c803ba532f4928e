"""Files that are cut or removed under a live daemon: it may die of it once; the next start comes up, with its pins and the right tokens."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, errors

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

FLAGS = ("--kv-memory", "256KiB", "--wal-segment-bytes", "64KiB", "--checkpoint-interval-s", "0.1")
RULES = "The pinned rules say that nobody touches the paintings, not even the curator. " * 4
OTHER = "The other rules are about the garden, where one may touch what one likes. " * 3


def ask(client: Client, prompt: str) -> int:
    answer = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == expected_tokens(prompt.encode(), 8)
    return answer.usage.cached_tokens


def data(state: Path) -> Path:
    (path,) = (state / "kv").glob("[0-9]*/data.mdb")
    return path


def newest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.name)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "data.mdb cut within its meta pages": lambda state: os.truncate(data(state), 100),
    "data.mdb cut behind them": lambda state: os.truncate(data(state), 8192),
    "data.mdb removed": lambda state: data(state).unlink(),
    "the store removed": lambda state: shutil.rmtree(state / "kv"),
    "CURRENT cut": lambda state: os.truncate(state / "kv" / "CURRENT", 20),
    "CURRENT removed": lambda state: (state / "kv" / "CURRENT").unlink(),
    "a segment of the log cut": lambda state: os.truncate(newest(state / "wal"), 90),
    "the log removed": lambda state: shutil.rmtree(state / "wal"),
    "the newest recipes cut": lambda state: os.truncate(newest(state / "recipes"), 30),
    "the newest recipes removed": lambda state: newest(state / "recipes").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_under_a_live_daemon_kills_it_once_at_most(tmp_path: Path, damage: str) -> None:
    pins = {"rules"}
    with DaemonProcess(tmp_path, *FLAGS) as process:
        process.wait_ready()
        with Client(process.endpoint, timeout_s=60, reconnect_timeout_s=0.5) as client:
            client.pin("rules", RULES)
            client.checkpoint()
            DAMAGE[damage](tmp_path / "state")
            with contextlib.suppress(errors.ConnectionLost):
                for number in range(6):
                    ask(client, f"A text that is new to the daemon, number {number // 2}. " * 12)
                with contextlib.suppress(errors.StorageError):
                    client.checkpoint()
                client.pin("other", OTHER)
                pins.add("other")
                assert ask(client, RULES + "?") == len(RULES) // 16 * 16
        died_of = process.process.poll()
        assert died_of in {None, -7, -11}, "of the damaged map, and of nothing else"
        assert died_of is None or damage.startswith("data.mdb cut")
        if died_of is None:
            process.kill()
    with DaemonProcess(tmp_path, *FLAGS) as process:
        process.wait_ready()
        with process.client() as client:
            held = {pin["name"] for pin in client.prefixes()["pins"] if pin["state"] == "held"}
            assert pins <= held <= {"rules", "other"}
            for name, text in {"rules": RULES, "other": OTHER}.items():
                if name in pins:
                    assert ask(client, text + "?") == len(text) // 16 * 16
            assert client.pin("other", OTHER).details["durable"] == "recipe+bytes"
            assert not client.status()["store"]["degraded"]
        assert process.terminate() == 0
