"""Servers that the benchmark starts, kills with SIGKILL and starts again: one at a time, since two of them would share the processors."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from kvd.bench.machine import living, process_tree, unshared_bytes
from kvd.bench.measuring import BenchError, Server

_POLL_S = 0.02
_LOOK_S = 0.1
_TAIL_BYTES = 1500
_DIE_S = 30.0


class Launched:
    """A server's processes, made of a command line. Its output goes to a file.

    The command finds ``KVD_BENCH_VISIT`` in its environment: the same for every start within one visit of the plan, another for each visit, so that a
    command can keep what a restart needs and forget what the last visit left.

    Args:
        name: the target's.
        command: as one would type it into a shell.
        log: where its output is appended.
        ready_timeout_s: until it must be ready.
    """

    def __init__(self, name: str, command: str, log: Path, *, ready_timeout_s: float) -> None:
        self._name = name
        self._command = command
        self._log = log
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self.visit = ""
        self.peak_start_bytes = 0
        """RssAnon + RssShmem of the tree at its most while it last started, looked at ten times a second."""

    @property
    def pid(self) -> int | None:
        """The first process of the tree, while there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def began_s(self) -> float:
        """The moment before exec, of ``time.perf_counter``."""
        return self._began_s

    async def start(self, server: Server) -> float:
        """Start it and wait until it is ready; seconds from exec to that.

        Raises:
            BenchError: something else serves there already, or it ends before it is ready, or takes too long.
        """
        if await server.is_ready():
            raise BenchError(
                f"{self._name}: something answers at its address already; stop it, or leave --server-command out", kind="usage"
            )
        with self._log.open("ab") as log:
            self._began_s = time.perf_counter()
            self._process = subprocess.Popen(  # noqa: ASYNC220  nothing else waits in this loop
                ["/bin/sh", "-c", self._command],
                env={**os.environ, "KVD_BENCH_VISIT": self.visit},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.peak_start_bytes, look_s = 0, 0.0
        while not await server.is_ready():
            if (now_s := time.perf_counter()) >= look_s:
                self.peak_start_bytes, look_s = max(self.peak_start_bytes, unshared_bytes(self._process.pid)), now_s + _LOOK_S
            if (code := self._process.poll()) is not None:
                self.kill()
                raise BenchError(f"{self._name} ended with exit code {code} before it was ready; {self._log} ends: {self._tail()}")
            if time.perf_counter() - self._began_s > self._ready_timeout_s:
                self.kill()
                raise BenchError(f"{self._name} was not ready within {self._ready_timeout_s:g} s; {self._log} ends: {self._tail()}")
            await asyncio.sleep(_POLL_S)
        ready_s = time.perf_counter() - self._began_s
        self.peak_start_bytes = max(self.peak_start_bytes, unshared_bytes(self._process.pid))
        return ready_s

    def kill(self) -> None:
        """SIGKILL all that the command started and wait until it is gone. Does nothing where none runs.

        That is its tree, with those that began a session of their own, and its session, with those whose parents have ended before them.

        Raises:
            BenchError: something of it still lives: the next server would not have the processors to itself.
        """
        if self._process is None:
            return
        tree = process_tree(self._process.pid) if self._process.poll() is None else []  # a number that was reaped may be another's
        deadline_s = time.monotonic() + _DIE_S
        while left := living(tree, session=self._process.pid):
            if time.monotonic() >= deadline_s:
                raise BenchError(f"{self._name}: processes {left} outlive SIGKILL")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(_POLL_S)
        self._process.wait()
        self._process = None

    def _tail(self) -> str:
        text = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        return " | ".join(line.strip() for line in text.splitlines()[-5:] if line.strip()) or "(empty)"
