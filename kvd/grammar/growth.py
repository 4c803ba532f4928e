"""By how much the process grows while a thread works: what the thread's own page faults allow, of what the whole process grew by."""

from __future__ import annotations

import os
import resource
import weakref
from pathlib import Path

PAGE_BYTES = resource.getpagesize()

_STATM = "/proc/self/statm"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_BYTES = 2 << 20

Mark = tuple[int, int]


def num_faults() -> int:
    """Pages that this thread touched for the first time: while it doesn't, it takes no memory. Less than a microsecond."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


class Meter:
    """Measures the process that made it, at two microseconds a look: the file stays open."""

    def __init__(self) -> None:
        self._fault_bytes = _HUGE_BYTES if _has_huge_pages() else PAGE_BYTES
        try:
            self._descriptor = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1
        else:
            weakref.finalize(self, os.close, self._descriptor)

    def begin(self) -> Mark:
        """The calling thread is about to work."""
        return num_faults(), self.resident_bytes()

    def grown_bytes(self, mark: Mark, *, is_spread: bool = False) -> int:
        """Since the mark, by this thread's work; by anybody's, if others worked for it (``is_spread``)."""
        faults, resident_bytes = mark
        num_new = num_faults() - faults
        if not (num_new or is_spread):
            return 0
        grown_bytes = max(0, self.resident_bytes() - resident_bytes)
        return grown_bytes if is_spread else min(grown_bytes, num_new * self._fault_bytes)

    def resident_bytes(self) -> int:
        """What the process has in memory; 0 where the system doesn't tell."""
        if self._descriptor < 0:
            return 0
        return int(os.pread(self._descriptor, 96, 0).split(b" ", 2)[1]) * PAGE_BYTES


def _has_huge_pages() -> bool:
    """Whether one fault of ordinary memory may bring a huge page."""
    try:
        return "[always]" in _HUGE_PAGES.read_text() or "hugetlb" in os.environ.get("GLIBC_TUNABLES", "")
    except OSError:
        return False
