"""The I/O priority of the thread that writes checkpoints."""

from __future__ import annotations

import ctypes
import platform

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_BEST_EFFORT = 2


def lower_io_priority() -> None:
    """Give this thread the lowest best-effort I/O priority (ioprio_set(2)), so that checkpoints yield to the log and to others.

    Not the idle class, for an acknowledgement may wait for this thread; not a nice value, for a thread that is descheduled with the interpreter's lock in hand
    would hold up the engine. Where the call isn't known, nothing changes.
    """
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None and platform.system() == "Linux":
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_BEST_EFFORT << 13 | 7)
