"""The processors that computing may use; without torch."""

from __future__ import annotations

import os
from pathlib import Path


def compute_threads(configured: int) -> int:
    """Compute threads of the CPU executor, at most the processors that this process may use; 0 means the physical cores among them."""
    cpus = os.sched_getaffinity(0)
    if configured:
        return min(configured, len(cpus))  # threads wait for each other in a spin: more than can run take the time from those that compute
    siblings = set()
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.exists() else str(cpu))
    return len(siblings)
