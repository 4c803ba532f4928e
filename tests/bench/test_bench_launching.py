"""Servers that are started and killed: their whole tree, at any state."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kvd.bench.launching import Launched
from kvd.bench.measuring import BenchError


class FileServer:
    """Ready as soon as a file is there."""

    def __init__(self, path) -> None:
        self.path = path

    async def is_ready(self) -> bool:
        return self.path.exists()


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_it_is_ready_when_it_says_so_and_its_children_die_with_it(tmp_path):
    ready = tmp_path / "ready"
    command = f"sleep 60 & echo $! $KVD_BENCH_VISIT > {tmp_path}/child; sleep 0.1; touch {ready}; sleep 60"
    launched = Launched("a", command, tmp_path / "log", ready_timeout_s=20)
    launched.visit = "seven"
    assert asyncio.run(launched.start(FileServer(ready))) >= 0.1
    child, visit = (tmp_path / "child").read_text().split()
    assert visit == "seven"
    assert lives(int(child))
    assert launched.peak_start_bytes > 0
    launched.kill()
    assert not lives(int(child))
    assert launched.pid is None
    launched.kill()


def test_one_that_ends_early_is_quoted(tmp_path):
    launched = Launched("a", "echo no such model >&2; exit 3", tmp_path / "log", ready_timeout_s=20)
    with pytest.raises(BenchError, match=r"a ended with exit code 3 before it was ready.*no such model"):
        asyncio.run(launched.start(FileServer(tmp_path / "ready")))


def test_one_that_is_never_ready_is_killed(tmp_path):
    launched = Launched("a", f"{sys.executable} -c 'import time; time.sleep(60)'", tmp_path / "log", ready_timeout_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(BenchError, match="not ready within"):
        asyncio.run(launched.start(FileServer(tmp_path / "ready")))
    assert launched.pid is None
    assert time.monotonic() - began_s < 30


def test_an_address_that_is_taken_is_not_measured_by_mistake(tmp_path):
    (tmp_path / "ready").touch()
    with pytest.raises(BenchError, match="answers at its address already") as failure:
        asyncio.run(Launched("a", "true", tmp_path / "log", ready_timeout_s=1).start(FileServer(tmp_path / "ready")))
    assert failure.value.kind == "usage"


def test_children_of_one_that_ended_early_die_too(tmp_path):
    launched = Launched("a", f"sleep 60 & echo $! > {tmp_path}/child; exit 3", tmp_path / "log", ready_timeout_s=20)
    with pytest.raises(BenchError, match="exit code 3"):
        asyncio.run(launched.start(FileServer(tmp_path / "ready")))
    assert not lives(int((tmp_path / "child").read_text()))


def test_children_of_one_that_was_killed_by_others_die_too(tmp_path):
    ready = tmp_path / "ready"
    launched = Launched("a", f"sleep 60 & echo $! > {tmp_path}/child; touch {ready}; sleep 60", tmp_path / "log", ready_timeout_s=20)
    asyncio.run(launched.start(FileServer(ready)))
    os.kill(launched.pid, signal.SIGKILL)
    launched.kill()
    assert not lives(int((tmp_path / "child").read_text()))


def test_one_that_does_not_die_is_said(tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    launched = Launched("a", f"touch {ready}; sleep 60", tmp_path / "log", ready_timeout_s=20)
    asyncio.run(launched.start(FileServer(ready)))
    pid = launched.pid
    with monkeypatch.context() as patched:
        patched.setattr("kvd.bench.launching.os.kill", lambda *_: None)  # as if the kernel could not
        patched.setattr("kvd.bench.launching._DIE_S", 0.1)
        with pytest.raises(BenchError, match=f"a: processes .*{pid}.* outlive SIGKILL"):
            launched.kill()
    launched.kill()
    assert not lives(pid)
