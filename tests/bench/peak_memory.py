"""How much memory a process tree took at its most, of what files can't give back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from kvd.bench.machine import process_tree

POLL_S = 0.01
LOOKS_A_TREE = 50


class PeakMemory:
    """RssAnon + RssShmem at their most while ``with PeakMemory(pid) as memory`` runs, looked at a hundred times a second by a thread of its own.

    Args:
        pid: of the tree's first process; None as long as there is none.
    """

    def __init__(self, pid: Callable[[], int | None]) -> None:
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="peak-memory")
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        tree: list[int] = []
        looks = 0
        while not self._is_over.wait(POLL_S):
            if (pid := self._pid()) is None:
                continue
            if pid not in tree or looks % LOOKS_A_TREE == 0:
                tree = process_tree(pid)
            looks += 1
            self.peak_bytes = max(self.peak_bytes, sum(map(unshared_bytes, tree)))


def unshared_bytes(pid: int) -> int:
    """RssAnon + RssShmem of one process; of one that is gone none."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return 0
