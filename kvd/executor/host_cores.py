"""The processors that computing may use; without torch."""

from __future__ import annotations

import os
from pathlib import Path


def compute_threads(configured: int) -> int:
    """Compute threads of the CPU executor; 0 means the physical cores that this process may use."""
    if configured:
        return configured
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.exists() else str(cpu))
    return len(siblings)
