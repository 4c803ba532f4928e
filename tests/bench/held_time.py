"""An event loop whose time goes on by its sleeps alone: what is measured in it is the same on a machine that stands still for a second."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any
from unittest import mock


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: where nothing is there, the time that would have been waited has passed."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        events = super().select(0)
        if not events:
            self.now_s += max(0.0, timeout)
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._held = _Selector()
        super().__init__(self._held)

    def time(self) -> float:
        return self._held.now_s


def run_in_held_time(work: Coroutine[Any, Any, Any]) -> Any:
    """As ``asyncio.run``; ``time.perf_counter`` is the loop's time meanwhile. For what needs no thread and no other process."""
    with asyncio.Runner(loop_factory=_Loop) as runner, mock.patch.object(time, "perf_counter", runner.get_loop().time):
        return runner.run(work)
