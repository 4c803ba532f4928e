"""Ctrl-C while nothing has begun and after everything is over: the process just ends.

A ``KeyboardInterrupt`` that is raised inside an import may get lost or show up as a traceback; where there is nothing to undo there is
no need for it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def end_at_once() -> None:
    """From here on Ctrl-C ends the process with exit code 130, unless it is ignored (as it is in a shell's background jobs)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From here on Ctrl-C raises ``KeyboardInterrupt`` again: there is something to undo."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_signum: int, _frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)
