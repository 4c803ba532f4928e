"""A real daemon as a child process, for the tests that kill it. Uses the installed ``kvd`` command and nothing of the daemon's inside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from kvd_client import Client, errors

START_TIMEOUT_S = 60.0


class DaemonDiedError(Exception):
    """The daemon ended before it was ready."""


class DaemonProcess:
    """``kvd serve`` on a state directory of its own.

    Args:
        root: an empty folder for state, socket and logs; a second daemon on the same root is a restart.
        arguments: further flags of ``kvd serve``.
        env: further environment, such as KVD_FAILPOINTS.
    """

    def __init__(self, root: Path, *arguments: str, env: dict[str, str] | None = None, fake: bool = True) -> None:
        self.root = root
        self.state_dir = root / "state"
        self.endpoint = f"ipc://{root}/s.sock"
        self.log_path = root / f"log.{len(list(root.glob('log.*')))}"
        command = [
            sys.executable,
            "-m",
            "kvd",
            "serve",
            "--state-dir",
            str(self.state_dir),
            "--listen",
            self.endpoint,
            "--log-format",
            "json",
        ]
        if fake:
            command += ["--executor", "fake"]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("KVD_") or key == "KVD_MODELS_DIR"}
        environ |= env or {}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=root)
        self.started_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if error is not None:
            sys.stderr.write(f"--- {self.log_path}\n{self.log()}\n")

    def client(self, timeout_s: float = 60.0) -> Client:
        return Client(self.endpoint, timeout_s=timeout_s)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Seconds from exec to READY.

        Raises:
            DaemonDiedError: at once, if it ends before.
        """
        with self.client() as client:
            while time.monotonic() < self.started_s + timeout_s:
                with contextlib.suppress(errors.Timeout):
                    client.wait_ready(timeout_s=1.0)
                    return time.monotonic() - self.started_s
                if self.process.poll() is not None:
                    raise DaemonDiedError(f"exit code {self.process.returncode}; its log: {self.log_path}")
        raise TimeoutError(f"not ready within {timeout_s:.0f} s")

    def kill(self) -> None:
        """SIGKILL, as a crash or the kernel's memory killer would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """It stands still: what is sent to it meanwhile, by clients that are connected, it finds all at once. Not for an edge in a process of its own."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def wait_dead(self, timeout_s: float = 60.0) -> int:
        """The exit code (negative: the signal) of a daemon that is expected to die by itself."""
        return self.process.wait(timeout_s)

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")
