"""A start's marker is its own: a timer that comes after the end takes nothing away from the start after it."""

from __future__ import annotations

import threading

import pytest

from kvd.observe.logging import get_logger
from kvd.storage.start_guard import MARKER_NAME, StartGuard, StartVerdict, read_failed_starts


class LateTimer:
    """Stands for ``threading.Timer``: its time has come, and its thread has not got to run yet."""

    made: list[LateTimer]

    def __init__(self, delay_s, function) -> None:
        self.function = function
        self.made.append(self)

    def start(self) -> None:
        pass

    cancel = start  # too late


@pytest.mark.parametrize("clean", [False, True])
def test_a_timer_that_comes_after_the_end_leaves_the_marker_of_the_next_start(tmp_path, monkeypatch, clean):
    monkeypatch.setattr(LateTimer, "made", [], raising=False)
    monkeypatch.setattr(threading, "Timer", LateTimer)
    verdict = StartVerdict(StartGuard(tmp_path), get_logger("test"))
    verdict.good_in(0.0)
    verdict.end(clean=clean)
    assert not (tmp_path / MARKER_NAME).exists()
    StartGuard(tmp_path)  # of the next start, which dies
    for timer in LateTimer.made:
        timer.function()
    assert read_failed_starts(tmp_path) == 1


def test_a_marker_that_could_not_be_removed_at_the_end_is_not_tried_again_by_a_timer(tmp_path, monkeypatch):
    monkeypatch.setattr(LateTimer, "made", [], raising=False)
    monkeypatch.setattr(threading, "Timer", LateTimer)
    guard = StartGuard(tmp_path)
    verdict = StartVerdict(guard, get_logger("test"))
    verdict.good_in(0.0)
    with monkeypatch.context() as patched:

        def refuse(*_):
            raise OSError(30, "Read-only file system")

        patched.setattr("kvd.storage.start_guard.remove_file", refuse)
        verdict.end(clean=True)
        LateTimer.made[0].function()
    assert len(LateTimer.made) == 1
