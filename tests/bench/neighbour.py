"""A neighbour that never sleeps: another process that takes processor time from what is measured, in turns with leaving it alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Taken:
    """What the neighbour took: its processor time over that of all cores, 0 to 1."""

    share: float = 0.0


class Neighbour:
    """A process that is stopped but while ``with neighbour.running() as taken`` runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @contextlib.contextmanager
    def running(self) -> Iterator[Taken]:
        taken = Taken()
        before_s, began_s = processor_s(self.pid), time.perf_counter()
        os.kill(self.pid, signal.SIGCONT)
        try:
            yield taken
        finally:
            os.kill(self.pid, signal.SIGSTOP)
        wall_s = time.perf_counter() - began_s
        taken.share = (processor_s(self.pid) - before_s) / wall_s / len(os.sched_getaffinity(0))


@contextlib.contextmanager
def busy_neighbour() -> Iterator[Neighbour]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process.send_signal(signal.SIGSTOP)
        yield Neighbour(process.pid)
    finally:
        process.kill()
        process.wait()


def processor_s(pid: int) -> float:
    """Processor seconds of a process, those of its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
