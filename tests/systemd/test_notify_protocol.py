"""What a service manager hears from a real daemon: readiness, progress, the watchdog, the stop. Without a service manager."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

PROMPT = "The lighthouse keeper writes the weather of every hour into the log. " * 6
NUM_BLOCKS = len(PROMPT) // 16


class Manager:
    """The manager's end of NOTIFY_SOCKET; ``heard`` is everything that it was told, in order."""

    def __init__(self, root: Path) -> None:
        self.address = str(root / "notify.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self.heard: list[str] = []

    def close(self) -> None:
        self._socket.close()

    def environ(self, **more: str) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address, **more}

    def listen(self, timeout_s: float) -> str:
        """The next message; empty if none came within ``timeout_s``."""
        self._socket.settimeout(timeout_s)
        try:
            message = self._socket.recv(4096).decode()
        except TimeoutError:
            return ""
        self.heard.append(message)
        return message

    def listen_until(self, is_it: Callable[[str], bool], timeout_s: float = 60.0) -> str:
        deadline_s = time.monotonic() + timeout_s
        while not is_it(message := self.listen(max(0.0, deadline_s - time.monotonic()))):
            assert message, self.heard
        return message

    def await_silence(self, of: str, quiet_s: float, timeout_s: float = 30.0) -> None:
        """Until ``of`` has not been heard for ``quiet_s``."""
        deadline_s = time.monotonic() + timeout_s
        last_s = time.monotonic()
        while time.monotonic() - last_s < quiet_s:
            assert time.monotonic() < deadline_s, f"{of} goes on"
            if self.listen(0.1) == of:
                last_s = time.monotonic()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    each = Manager(tmp_path)
    yield each
    each.close()


def is_ready(message: str) -> bool:
    return message == "READY=1"


def fill(root: Path) -> None:
    """A first life whose prompt is on disk at its end."""
    with DaemonProcess(root) as process:
        process.wait_ready()
        with process.client() as client:
            for _ in range(2):
                client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
            client.checkpoint()
        assert process.terminate() == 0


def test_ready_comes_after_rehydration_and_the_way_there_is_told(tmp_path: Path, manager: Manager) -> None:
    fill(tmp_path)
    env = manager.environ(KVD_FAILPOINTS="rehydrate.before_copy_in=sleep:0.1")
    with DaemonProcess(tmp_path, "--checkpoint-bytes-per-step", "1", env=env) as process:  # block by block
        manager.listen_until(lambda message: message.startswith("STATUS=rehydrating: "))
        with process.client() as client:
            status = client.status()
            assert status["state"] == "rehydrating"
            assert status["progress"].startswith("rehydrating: "), "who asks the daemon hears the same"
            assert "READY=1" not in manager.heard
            manager.listen_until(is_ready)
            status = client.status()
        assert (status["state"], status["progress"]) == ("ready", "")
        assert status["rehydration"]["blocks"] >= NUM_BLOCKS
        before = manager.heard[: manager.heard.index("READY=1")]
        progress = [message for message in before if message.startswith("STATUS=rehydrating: ")]
        assert len(progress) >= 2, "told as it goes on"
        assert len(set(progress)) == len(progress)
        extensions = [int(message.partition("=")[2]) for message in before if message.startswith("EXTEND_TIMEOUT_USEC=")]
        assert len(extensions) >= len(progress)
        assert min(extensions) >= 5_000_000, "far longer than the time between two messages"
        assert before[-1] == "STATUS=ready"
        assert process.terminate() == 0


def test_sigterm_is_told_as_stopping_before_the_drain_is_over(tmp_path: Path, manager: Manager) -> None:
    with DaemonProcess(tmp_path, env=manager.environ(WATCHDOG_USEC="1000000")) as process:
        manager.listen_until(is_ready)
        with process.client() as client:
            # its window is smaller than what is asked for: it is not over before it is read
            stream = client.generate(PROMPT, stream=True, max_tokens=60, temperature=0.0, ignore_eos=True, window_tokens=8)
            first = list(next(stream).token_ids)
            process.process.send_signal(signal.SIGTERM)
            manager.listen_until(lambda message: message == "STOPPING=1")
            for _ in range(2):
                manager.listen_until(lambda message: message == "WATCHDOG=1")  # a drain may take longer than the watchdog has patience
            assert process.process.poll() is None
            assert len(first) <= 8
            rest = [token for chunk in stream for token in chunk.token_ids]
            assert first + rest == expected_tokens(PROMPT.encode(), 60), "what ran is finished"
        assert process.wait_dead() == 0
    while manager.listen(0.1):
        pass
    draining = manager.heard[manager.heard.index("STOPPING=1") :]
    assert any(message.startswith("EXTEND_TIMEOUT_USEC=") for message in draining)
    assert "WATCHDOG_USEC=0" in draining, "the last checkpoint is bounded by the stop timeout, no longer by the loop's rounds"
    assert manager.heard.count("READY=1") == manager.heard.count("STOPPING=1") == 1


def test_a_stop_during_the_start_is_told_too(tmp_path: Path, manager: Manager) -> None:
    fill(tmp_path)
    env = manager.environ(KVD_FAILPOINTS="rehydrate.before_copy_in=sleep:0.3")
    with DaemonProcess(tmp_path, "--checkpoint-bytes-per-step", "1", env=env) as process:
        manager.listen_until(lambda message: message.startswith("STATUS=rehydrating: "))
        assert process.terminate() == 0
    while manager.listen(0.1):
        pass
    assert "STOPPING=1" in manager.heard
    assert "READY=1" not in manager.heard


def test_the_watchdog_is_fed_idle_and_at_work_and_starves_when_the_loop_hangs(tmp_path: Path, manager: Manager) -> None:
    """Fed by the loop's rounds alone: a hanging executor stops it, though the daemon's other threads still answer."""
    env = manager.environ(WATCHDOG_USEC="2000000")
    with DaemonProcess(tmp_path, "--fake-step-ms", "10", env=env) as process:
        manager.listen_until(is_ready)
        for _ in range(3):
            manager.listen_until(lambda message: message == "WATCHDOG=1", timeout_s=20)
        with process.client() as client:
            stream = client.generate(PROMPT, stream=True, max_tokens=2000, temperature=0.0, ignore_eos=True)
            next(stream)
            for _ in range(3):
                manager.listen_until(lambda message: message == "WATCHDOG=1", timeout_s=20)
            stream.close()
        process.kill()
    with DaemonProcess(tmp_path, "--fake-step-ms", "600000", env=env) as process:
        manager.listen_until(is_ready)
        manager.listen_until(lambda message: message == "WATCHDOG=1")
        with process.client() as client:
            hangs = client.generate("a request that hangs", stream=True, max_tokens=4)
            manager.await_silence(of="WATCHDOG=1", quiet_s=3.0)
            assert client.ping().state == "ready", "the edge's thread lives on, and feeds nothing"
            process.kill()
            hangs.close()


def test_without_a_watchdog_interval_and_for_another_process_nothing_is_fed(tmp_path: Path, manager: Manager) -> None:
    with DaemonProcess(tmp_path, env=manager.environ(WATCHDOG_USEC="1000000", WATCHDOG_PID=str(os.getpid()))) as process:
        manager.listen_until(is_ready)
        assert process.terminate() == 0
    while manager.listen(0.1):
        pass
    assert "WATCHDOG=1" not in manager.heard
