"""A store, or a pin, that ends every start: a few starts later the daemon serves, keeps the pins, and says so."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

FLAGS = ("--kv-memory", "2MiB", "--wal-segment-bytes", "64KiB")
RULES = "The pinned rules say that nobody touches the paintings, not even the curator. " * 4
OTHER = "The other rules are about the garden, where one may touch what one likes. " * 3


def die(root: Path, spec: str, code: int) -> None:
    with DaemonProcess(root, *FLAGS, env={"KVD_FAILPOINTS": spec}) as process:
        assert process.wait_dead() == code


def pin(root: Path, name: str, text: str) -> None:
    with DaemonProcess(root, *FLAGS) as process:
        process.wait_ready()
        with process.client() as client:
            assert client.pin(name, text).details["durable"] == "recipe+bytes"
        wait_until_good(root)
        process.kill()


def wait_until_good(root: Path) -> None:
    """The marker goes, with an fsync of its own, just behind the answer that makes the start a good one."""
    end_s = time.monotonic() + 60
    while (root / "state" / "starting").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def look(root: Path, states: dict[str, str], failed_starts: int, spec: str = "") -> tuple[dict, str]:
    """A start that serves: its pins are in ``states``, held ones answer from cache; its status, and why pins are not held."""
    with DaemonProcess(root, *FLAGS, env={"KVD_FAILPOINTS": spec} if spec else {}) as process:
        process.wait_ready()
        with process.client() as client:
            pins = {pin["name"]: pin for pin in client.prefixes()["pins"]}
            assert {name: pin["state"] for name, pin in pins.items()} == states
            status = client.status()
            assert status["store"]["failed_starts"] == failed_starts
            assert status["rehydration"]["pins_not_held"] == sum(state == "not_held" for state in states.values())
            for name, text in {"rules": RULES, "other": OTHER}.items():
                if states.get(name) == "held" and not spec.startswith("executor"):
                    answer = client.generate(text + "?", max_tokens=4, temperature=0.0, ignore_eos=True)
                    assert list(answer.token_ids) == expected_tokens((text + "?").encode(), 4)
                    assert answer.usage.cached_tokens == len(text) // 16 * 16
        assert process.terminate() == 0
    return status, next((pin["reason"] for pin in pins.values() if pin["state"] == "not_held"), "")


def test_a_store_that_kills_its_reader_is_set_aside_at_the_third_start(tmp_path: Path) -> None:
    pin(tmp_path, "rules", RULES)
    for _ in range(2):
        die(tmp_path, "rehydrate.before_copy_in=kill", -9)
    status, _ = look(tmp_path, {"rules": "held"}, 2, "rehydrate.before_copy_in=kill")
    assert "set aside unread" in str(status["store"]["damage"])
    assert not status["store"]["degraded"]
    status, _ = look(tmp_path, {"rules": "held"}, 0)
    assert status["store"]["damage"] == []
    assert status["rehydration"]["blocks"] >= len(RULES) // 16


def test_a_sector_that_can_not_be_read_kills_two_starts_and_no_third(tmp_path: Path) -> None:
    """The real signal: the file is cut after it was checked, under the map."""
    pin(tmp_path, "rules", RULES)
    (data,) = (tmp_path / "state" / "kv").glob("[0-9]*/data.mdb")
    whole = data.read_bytes()
    for _ in range(2):
        data.write_bytes(whole)
        with DaemonProcess(tmp_path, *FLAGS, env={"KVD_FAILPOINTS": "rehydrate.before_read=sleep:1.5"}) as process:
            end_s = time.monotonic() + 60
            while "storage.opened" not in process.log():
                assert time.monotonic() < end_s
                time.sleep(0.02)
            os.truncate(data, 8192)
            assert process.wait_dead() == -7, "SIGBUS"
    data.write_bytes(whole)
    status, _ = look(tmp_path, {"rules": "held"}, 2)
    assert "set aside unread" in str(status["store"]["damage"])


def without_bytes(root: Path) -> None:
    """Let all pins have to be computed: recipes alone are left."""
    for name in ("kv", "wal"):
        shutil.rmtree(root / "state" / name)


def test_a_pin_that_kills_the_daemon_waits_from_the_fourth_start_on(tmp_path: Path) -> None:
    pin(tmp_path, "rules", RULES)
    without_bytes(tmp_path)
    for _ in range(3):
        die(tmp_path, "executor.step=kill", -9)
    status, reason = look(tmp_path, {"rules": "not_held"}, 3, "executor.step=kill")
    assert "3 starts" in reason
    assert status["rehydration"]["recompute_pins"] is False
    look(tmp_path, {"rules": "held"}, 0)


def test_a_pin_whose_computing_fails_waits_from_the_third_start_on_and_the_others_are_held(tmp_path: Path) -> None:
    pin(tmp_path, "other", OTHER)
    stored = tmp_path / "stored"
    shutil.copytree(tmp_path / "state" / "kv", stored)
    pin(tmp_path, "rules", RULES)
    without_bytes(tmp_path)
    shutil.copytree(stored, tmp_path / "state" / "kv")
    for _ in range(2):
        die(tmp_path, "executor.step=raise", 70)
    status, reason = look(tmp_path, {"rules": "not_held", "other": "held"}, 0, "executor.step=raise")
    assert "the executor failed in 2 starts" in reason
    assert status["rehydration"]["failed_computations"] == 2
    assert status["store"]["damage"] == []
    look(tmp_path, {"rules": "held", "other": "held"}, 0)


def test_an_executor_that_fails_while_serving_does_not_count(tmp_path: Path) -> None:
    pin(tmp_path, "rules", RULES)
    for _ in range(3):
        with DaemonProcess(tmp_path, *FLAGS, env={"KVD_FAILPOINTS": "executor.step=raise"}) as process:
            process.wait_ready()
            with process.client() as client, pytest.raises(Exception, match="engine_error"):
                client.generate("x" * 40, max_tokens=4)
            assert process.wait_dead() == 70
    status, _ = look(tmp_path, {"rules": "held"}, 0)
    assert status["rehydration"]["failed_computations"] == 0
