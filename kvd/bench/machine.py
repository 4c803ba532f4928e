"""What the machine is and what it was doing: facts for the head of a result, processor time and memory of process trees, all from /proc."""

from __future__ import annotations

import datetime as dt
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_VERSIONS = ("kvd", "kvd-client", "torch", "numpy")


def machine() -> str:
    """Processor, cores, memory and system, for the head of a table."""
    name = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {gib} GiB, Linux {platform.release()}; Python {platform.python_version()}"


def today() -> str:
    """The date, UTC."""
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def versions() -> dict[str, str]:
    """The driver's own distributions; what is not installed is left out."""
    found = {}
    for name in _VERSIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def process_tree(pid: int) -> list[int]:
    """A process and all that came of it, parents first."""
    children: dict[int, list[int]] = {}
    for child, fields in _stats():
        children.setdefault(int(fields[1]), []).append(child)
    tree, waiting = [], [pid]
    while waiting:
        tree.append(waiting.pop())
        waiting += children.get(tree[-1], [])
    return tree


def living(pids: Sequence[int], *, session: int) -> list[int]:
    """Those of ``pids``, and of a session's processes, that are there and don't only wait to be reaped."""
    wanted = set(pids)
    return [pid for pid, fields in _stats() if (pid in wanted or int(fields[3]) == session) and fields[0] not in {"Z", "X"}]


def tree_cpu_s(pid: int) -> float:
    """Processor seconds of a process and its descendants that still live."""
    tree = set(process_tree(pid))
    return sum(int(fields[11]) + int(fields[12]) for each, fields in _stats() if each in tree) / _TICKS


def resident_bytes(pid: int) -> dict[str, int]:
    """Memory of a process tree now: ``pss`` (each page once, file pages too), and ``unshared`` (RssAnon + RssShmem: what files can't give back)."""
    tree = process_tree(pid)
    return {"pss": _sum_of(tree, "smaps_rollup", ("Pss:",)), "unshared": _sum_of(tree, "status", ("RssAnon:", "RssShmem:"))}


def unshared_bytes(pid: int) -> int:
    """RssAnon + RssShmem of a process tree now: quick enough to be asked for again and again."""
    return _sum_of(process_tree(pid), "status", ("RssAnon:", "RssShmem:"))


def _sum_of(pids: Sequence[int], file: str, names: tuple[str, ...]) -> int:
    """Bytes of the lines with these names; a process that is gone by now has none."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            lines = (_PROC / str(pid) / file).read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
    return total


def _stats() -> Iterator[tuple[int, list[str]]]:
    """Each process with the fields of its ``stat`` from the state on."""
    for path in _PROC.iterdir():
        if path.name.isdigit():
            with suppress(OSError, ValueError):
                text = (path / "stat").read_text()
                yield int(path.name), text[text.rindex(")") + 2 :].split()


def _busy_s() -> float:
    """Processor seconds of the whole machine, idle and waiting for disks left out."""
    fields = [int(each) for each in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


@dataclass(slots=True)
class Watch:
    """Who used the processors while something was measured: ``with Watch(pid) as watch: …``, then ``watch.found``.

    ``driver_cpu_s`` is this process's, ``server_cpu_s`` the server tree's (None without a pid), ``other_cores`` how many cores were busy with anything else
    meanwhile: a noisy neighbour shows here.
    """

    server_pid: int | None
    found: dict[str, Any]
    _began: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def __init__(self, server_pid: int | None) -> None:
        self.server_pid = server_pid
        self.found = {}

    def __enter__(self) -> Self:
        self._began = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s, busy_s, server_s, driver_s = (after - before for after, before in zip(self._now(), self._began, strict=True))
        self.found = {
            "wall_s": round(wall_s, 4),
            "driver_cpu_s": round(driver_s, 4),
            "server_cpu_s": None if self.server_pid is None else round(server_s, 3),
            "other_cores": None if self.server_pid is None else round(max(0.0, busy_s - server_s - driver_s) / max(wall_s, 1e-9), 2),
        }

    def _now(self) -> tuple[float, float, float, float]:
        server_s = tree_cpu_s(self.server_pid) if self.server_pid is not None else 0.0
        return time.perf_counter(), _busy_s(), server_s, time.process_time()
