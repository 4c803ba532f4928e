"""SIGKILL in the middle of work, on the fake executor over real sockets, WAL and LMDB (``test_every_failpoint`` has the named places).

After each: the daemon starts, answers with the right tokens, keeps its pins, leaks no block, and its store checks clean.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client

from kvd.storage.tools import check_store

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SYSTEM = "The house rules say that every visitor signs the ledger before the tour begins. " * 10
PIN = "The pinned rules say that nobody touches the paintings, not even the curator. " * 8
FAST = ("--checkpoint-interval-s", "0.2")


def ask(client: Client, prompt: str, num_tokens: int = 16) -> int:
    """Ask, compare with the oracle, and return how many prompt tokens were restored."""
    answer = client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == expected_tokens(prompt.encode(), num_tokens)
    return answer.usage.restored_tokens


def await_stored(client: Client, num_blocks: int) -> None:
    deadline_s = time.monotonic() + 60
    while client.status()["store"]["blocks"] < num_blocks:
        assert time.monotonic() < deadline_s, client.status()["store"]
        time.sleep(0.02)


def assert_recovered(root: Path, *, restored: bool) -> None:
    """Start once more without a fault and hold the daemon to its promises."""
    with DaemonProcess(root, *FAST) as process:
        process.wait_ready()
        with process.client() as client:
            pins = {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]}
            assert pins == {"rules": "held"}
            num_restored = ask(client, SYSTEM + "after the crash")
            if restored:
                assert num_restored >= 16 * (len(SYSTEM) // 16)
            before = client.generate(PIN + "pinned?", max_tokens=8, temperature=0.0, ignore_eos=True)
            assert list(before.token_ids) == expected_tokens((PIN + "pinned?").encode(), 8)
            assert before.usage.cached_tokens >= 16 * (len(PIN) // 16), "an acknowledged pin is served from cache"
            status = client.status()
            blocks = status["blocks"]
            assert blocks["used"] == 0
            assert blocks["free"] + blocks["cached"] == blocks["total"]
        assert process.terminate() == 0
    report = check_store(root / "state")
    assert report["ok"], report["problems"]


def prepare(root: Path) -> None:
    """A first life with a pin acknowledged and a hot prefix on disk, ended by SIGKILL."""
    with DaemonProcess(root, *FAST) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", PIN)
            ask(client, SYSTEM + "one")
            ask(client, SYSTEM + "two")
            await_stored(client, len(SYSTEM) // 16 + len(PIN) // 16)
        process.kill()


def test_killed_idle(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert_recovered(tmp_path, restored=True)


def test_killed_twice_in_a_row(tmp_path: Path) -> None:
    prepare(tmp_path)
    with DaemonProcess(tmp_path, *FAST) as process:
        process.wait_ready()
        process.kill()
    assert_recovered(tmp_path, restored=True)


@pytest.mark.parametrize("after_tokens", [0, 5], ids=["mid-prefill", "mid-stream"])
def test_killed_at_work(tmp_path: Path, after_tokens: int) -> None:
    prepare(tmp_path)
    with DaemonProcess(tmp_path, *FAST, "--fake-step-ms", "30", "--max-tokens-per-step", "64") as process:
        process.wait_ready()
        with process.client() as client:
            stream = client.generate("x" * 3000, stream=True, max_tokens=500, temperature=0.0, ignore_eos=True)
            seen = 0
            if after_tokens:
                for chunk in stream:
                    seen += len(chunk.token_ids)
                    if seen >= after_tokens:
                        break
            else:
                time.sleep(0.3)
            process.kill()
    assert_recovered(tmp_path, restored=True)


def test_a_client_that_waits_through_the_restart_gets_its_answer(tmp_path: Path) -> None:
    prepare(tmp_path)
    answers: list[int] = []
    with Client(f"ipc://{tmp_path}/s.sock", timeout_s=60, connect_timeout_s=60) as client:
        waiting = threading.Thread(target=lambda: answers.append(ask(client, SYSTEM + "through the restart")))
        waiting.start()
        time.sleep(0.2)
        with DaemonProcess(tmp_path) as process:
            waiting.join(60)
            process.kill()
    assert answers == [16 * (len(SYSTEM) // 16)]
