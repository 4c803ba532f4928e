"""How a real daemon becomes ready when its pins take too long, and how it ends: by signal or by drain, at any moment of its life."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, errors
from struck import struck_at

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

PINS = {f"pin-{number}": f"{number} is the number of this rule of the house, long and dull to read. " * 18 for number in range(3)}
SLOW = ("--fake-step-ms", "60", "--max-tokens-per-step", "32")
"""Some 40 steps, or two and a half seconds, to compute a pin."""
PROMPT_S = 15.0
"""An end that waits for nothing takes no longer, on any machine."""


def prepare(root: Path, *, bytes_too: bool) -> None:
    """A life that leaves three pins, with or without their bytes."""
    with DaemonProcess(root, *(() if bytes_too else ("--no-persist",))) as process:
        process.wait_ready()
        with process.client() as client:
            for name, prompt in PINS.items():
                client.pin(name, prompt)
        assert process.terminate() == 0


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def impatient(process: DaemonProcess) -> Client:
    """A client that does not wait for a daemon to become ready (again)."""
    return Client(process.endpoint, wait_until_ready=False)


def pins_pending(client: Client) -> int:
    return int(client.status()["rehydration"]["pins_pending"])


def assert_intact(root: Path) -> None:
    """The next start counts no failed one, holds every pin, answers rightly, ends cleanly; and what is on disk is whole."""
    with DaemonProcess(root) as process:
        process.wait_ready()
        with process.client() as client:
            assert client.status()["store"]["failed_starts"] == 0
            assert {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]} == dict.fromkeys(PINS, "held")
            prompt = PINS["pin-1"] + "?"
            answer = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == expected_tokens(prompt.encode(), 8)
            assert answer.usage.cached_tokens == len(PINS["pin-1"]) // 16 * 16
        assert process.terminate() == 0
    command = [sys.executable, "-m", "kvd", "store", "check", "--state-dir", str(root / "state")]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout + check.stderr


# ------------------------------------------------------------------------------------------------ ready with pins pending


def test_ready_comes_at_the_timeout_and_pins_go_on_behind_the_users(tmp_path: Path) -> None:
    prepare(tmp_path, bytes_too=False)
    with DaemonProcess(tmp_path, *SLOW, "--rehydrate-timeout-s", "0.3") as process:
        process.wait_ready()
        with process.client() as client:
            assert pins_pending(client) >= 2
            assert "computing" in {pin["state"] for pin in client.prefixes()["pins"]}
            answer = client.generate("A question in between", max_tokens=4, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == expected_tokens(b"A question in between", 4)
            assert pins_pending(client) >= 1, "a user does not wait for the pins before him"
            wait_until(lambda: pins_pending(client) == 0)
            assert {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]} == dict.fromkeys(PINS, "held")
            answer = client.generate(PINS["pin-2"] + "?", max_tokens=2, temperature=0.0, ignore_eos=True)
            assert answer.usage.recomputed_tokens == len(PINS["pin-2"]) // 16 * 16
        process.kill()


def test_a_slow_disk_ends_with_the_timeout_and_the_rest_is_computed(tmp_path: Path) -> None:
    prepare(tmp_path, bytes_too=True)
    with DaemonProcess(tmp_path, "--rehydrate-timeout-s", "0.2", env={"KVD_FAILPOINTS": "rehydrate.before_read=sleep:0.5"}) as process:
        process.wait_ready()
        with process.client() as client:
            wait_until(lambda: pins_pending(client) == 0)
            assert {pin["state"] for pin in client.prefixes()["pins"]} == {"held"}
            for prompt in PINS.values():
                answer = client.generate(prompt + "?", max_tokens=4, temperature=0.0, ignore_eos=True)
                assert list(answer.token_ids) == expected_tokens((prompt + "?").encode(), 4)
                assert answer.usage.recomputed_tokens + answer.usage.restored_tokens == len(prompt) // 16 * 16
        process.kill()


# ------------------------------------------------------------------------------------------------ the end of a start


@pytest.mark.parametrize("place", ["rehydrate.before_read", "rehydrate.before_copy_in"])
def test_stopped_while_rehydrating(tmp_path: Path, place: str) -> None:
    """Three times: stops on request are no failed starts, so the store is not set aside."""
    prepare(tmp_path, bytes_too=True)
    for _ in range(3):
        with DaemonProcess(tmp_path, env={"KVD_FAILPOINTS": f"{place}=sleep:60"}) as process:
            with process.client() as client:
                wait_until(lambda client=client: client.ping().state == "rehydrating")
            assert process.terminate(PROMPT_S) == 0
        assert not (tmp_path / "state" / "starting").exists()
    assert_intact(tmp_path)


def test_stopped_while_the_store_is_opened(tmp_path: Path) -> None:
    """Its disk hangs: the thread inside is left behind, with nothing closed under it."""
    with DaemonProcess(tmp_path, env={"KVD_FAILPOINTS": "store.create.before_rename=sleep:60"}) as process:
        wait_until(lambda: '"kernels"' in process.log())
        assert process.terminate(PROMPT_S) == 0
        assert "stopped_during_start" in process.log()
    assert not (tmp_path / "state" / "starting").exists()
    prepare(tmp_path, bytes_too=True)
    assert_intact(tmp_path)


def test_stopped_just_when_a_lock_is_taken(tmp_path: Path) -> None:
    """Whatever the main thread was doing: no thread is left waiting for a lock that the way out would wait for in turn."""
    prepare(tmp_path, bytes_too=True)
    for nth_lock in (2, 4, 5, 7, 9, 11):
        # The rehydration is slow enough for the main thread to take that many, and the stop need not wait for it.
        env = {"KVD_FAILPOINTS": "rehydrate.before_read=sleep:1.0", **struck_at(tmp_path, nth_lock)}
        with DaemonProcess(tmp_path, env=env) as process:
            assert process.wait_dead(PROMPT_S) == 0, nth_lock
            assert "stopped_during_start" in process.log()
        assert not (tmp_path / "state" / "starting").exists()
    assert_intact(tmp_path)


def test_a_second_signal_ends_a_start_at_once(tmp_path: Path) -> None:
    """The first one waits a little for the disk."""
    prepare(tmp_path, bytes_too=True)
    with DaemonProcess(tmp_path, env={"KVD_FAILPOINTS": "rehydrate.before_read=sleep:60"}) as process:
        with process.client() as client:
            wait_until(lambda: client.ping().state == "rehydrating")
        process.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopped_during_start" in process.log())
        process.process.send_signal(signal.SIGTERM)
        assert process.wait_dead(PROMPT_S) == 128 + signal.SIGTERM


def test_stopped_while_computing_pins(tmp_path: Path) -> None:
    """Nobody waits for what the start computes: the stop does not either."""
    prepare(tmp_path, bytes_too=False)
    with DaemonProcess(tmp_path, "--fake-step-ms", "1000", "--max-tokens-per-step", "16", "--drain-timeout-s", "600") as process:
        with process.client() as client:
            wait_until(lambda: pins_pending(client) == 3)
            with impatient(process) as other, pytest.raises(errors.NotReady):
                other.generate("too early", max_tokens=1)
        assert process.terminate(PROMPT_S) == 0
    assert not (tmp_path / "state" / "starting").exists()
    assert_intact(tmp_path)


def test_stopped_at_once_after_exec(tmp_path: Path) -> None:
    """As early as the process can be reached; before it handles signals, they end it as they end any process."""
    prepare(tmp_path, bytes_too=True)
    for delay_s in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        with DaemonProcess(tmp_path) as process:
            time.sleep(delay_s)
            assert process.terminate(PROMPT_S) in {0, -signal.SIGTERM}
        assert not (tmp_path / "state" / "starting").exists()
    assert_intact(tmp_path)


# ------------------------------------------------------------------------------------------------ the end of a life


@pytest.mark.parametrize("frontend", ["thread", "process"])
def test_streams_that_do_not_end_in_time_are_aborted_with_a_last_word(tmp_path: Path, frontend: str) -> None:
    prepare(tmp_path, bytes_too=True)
    with DaemonProcess(tmp_path, "--fake-step-ms", "20", "--drain-timeout-s", "4", "--frontend", frontend) as process:
        process.wait_ready()
        with process.client() as client:
            short = client.generate("a short one", stream=True, max_tokens=8, temperature=0.0, ignore_eos=True)
            long = client.generate("a long one", stream=True, max_tokens=5000, temperature=0.0, ignore_eos=True, n=2)
            unread = client.generate("an unread one", stream=True, max_tokens=5000, temperature=0.0, ignore_eos=True, window_tokens=4)
            tokens = list(next(short).token_ids)
            next(long)
            next(unread)
            process.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.ping().state == "draining")
            with impatient(process) as other:
                with pytest.raises(errors.Draining):
                    other.generate("too late", max_tokens=1)
                with pytest.raises(errors.Draining):
                    other.pin("too-late", "x" * 64)
            tokens += [token for chunk in short for token in chunk.token_ids]
            assert short.completion.finish_reason == "length"
            assert tokens == expected_tokens(b"a short one", 8)
            list(long)
            assert [choice.finish_reason for choice in long.completion.choices] == ["aborted", "aborted"]
            list(unread)
            assert unread.completion.finish_reason == "aborted"
            assert process.wait_dead(PROMPT_S) == 0
    assert_intact(tmp_path)


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    prepare(tmp_path, bytes_too=True)
    with DaemonProcess(tmp_path, "--fake-step-ms", "20", "--drain-timeout-s", "600") as process:
        process.wait_ready()
        with process.client() as client:
            client.generate("one that ends", max_tokens=1)
            stream = client.generate("a long one", stream=True, max_tokens=5000, temperature=0.0, ignore_eos=True)
            next(stream)
            process.process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.ping().state == "draining")
            process.process.send_signal(signal.SIGTERM)
            assert process.wait_dead(PROMPT_S) == 128 + signal.SIGTERM
    assert_intact(tmp_path)


def test_drain_has_its_own_deadline_and_a_later_one_may_shorten_it(tmp_path: Path) -> None:
    prepare(tmp_path, bytes_too=True)
    with DaemonProcess(tmp_path, "--fake-step-ms", "20", "--drain-timeout-s", "600") as process:
        process.wait_ready()
        with process.client() as client:
            stream = client.generate("a long one", stream=True, max_tokens=5000, temperature=0.0, ignore_eos=True)
            next(stream)
            client.drain()
            wait_until(lambda: client.status()["state"] == "draining")
            assert client.status()["requests"]["running"] == 1
            command = [sys.executable, "-m", "kvd", "drain", "--drain-timeout", "0.2", "--connect", process.endpoint]
            assert subprocess.run(command, check=False).returncode == 0
            list(stream)
            assert stream.completion.finish_reason == "aborted"
            assert process.wait_dead(PROMPT_S) == 0
    assert_intact(tmp_path)
