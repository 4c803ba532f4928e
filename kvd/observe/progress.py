"""Progress of the daemon's start: one bar on a terminal, log records elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from kvd.observe.logging import get_logger

_BAR_WIDTH = 30
_START_OF_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """How far something with a known end is. Cheap to call often: it draws at whole percents, and logs at whole tenths.

    Args:
        label: what goes on, such as ``loading weights``.
        stream: where the bar is drawn if it is a terminal; standard error by default.
        log: takes the records otherwise, called as ``log(event, **values)``.
    """

    def __init__(self, label: str, *, stream: TextIO | None = None, log: Callable[..., Any] | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._log = log or get_logger("progress").info
        self._is_bar = self._stream.isatty()
        self._last = -1

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total`` units, bytes or blocks; a total of 0 is complete."""
        num_marks = 100 if self._is_bar else 10
        mark = done * num_marks // total if total else num_marks
        if mark == self._last:
            return
        self._last = mark
        if not self._is_bar:
            self._log(self._label, done=done, total=total, percent=mark * 10)
            return
        self._draw("")

    def close(self) -> None:
        """Leave the bar on a line of its own; another one, drawn meanwhile by another thread, goes on below."""
        if self._is_bar and self._last >= 0:
            self._draw("\n")

    def _draw(self, end: str) -> None:
        filled = self._last * _BAR_WIDTH // 100
        bar = f"{self._label} [{'#' * filled}{'-' * (_BAR_WIDTH - filled)}] {self._last:3d} %"
        self._stream.write(f"{_START_OF_CLEAR_LINE}{bar}{end}")
        self._stream.flush()
