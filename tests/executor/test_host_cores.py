"""How many threads compute."""

from __future__ import annotations

import os

import pytest

from kvd.executor.host_cores import compute_threads


@pytest.mark.parametrize(("configured", "threads"), [(1, 1), (3, 3), (4, 3), (1024, 3)])
def test_no_more_threads_than_processors_that_this_process_may_use(configured: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads beyond them wait in a spin and take the time from those that compute."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7})
    assert compute_threads(configured) == threads


def test_none_configured_means_the_cores_among_them() -> None:
    assert 1 <= compute_threads(0) <= len(os.sched_getaffinity(0))
