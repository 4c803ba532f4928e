"""How many threads torch computes with, said for one thread: torch itself says it for every thread that has not used it yet, an application's too."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

_one_at_a_time = threading.Lock()
"""Else one thread takes another's number, which stands for a moment, for the process's, and leaves it behind."""


def _after_fork() -> None:
    global _one_at_a_time  # noqa: PLW0603  a thread of the parent may hold it
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def compute_here_with(num_threads: int) -> None:
    """Torch computes with ``num_threads`` for the thread that calls this; what other threads have, now and later, stays as it is."""
    elsewhere: list[int] = []
    with _one_at_a_time:
        _beside(lambda: elsewhere.append(torch.get_num_threads()))
        torch.get_num_threads()  # a thread's first use gives it the process's number, over what was set before
        torch.set_num_threads(num_threads)
        _beside(lambda: torch.set_num_threads(elsewhere[0]))


def _beside(work: Callable[[], None]) -> None:
    """On a thread that has not used torch."""
    thread = threading.Thread(target=work, name="kvd-torch-threads")
    thread.start()
    thread.join()
