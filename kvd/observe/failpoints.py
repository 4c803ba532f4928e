"""Named places where a test may kill the process, between any two writes.

``KVD_FAILPOINTS="name=kill@3,other=kill"``: at the third (first) passage of the place the process dies by SIGKILL; ``name=sleep:0.5`` delays
each passage by half a second; ``name=raise`` raises OSError(EIO). Without the variable a passage costs one dictionary look-up in an empty dict. The names stand in ``NAMES``, so that tests can go through all of them.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass

NAMES: set[str] = set()
"""Every failpoint that the imported modules declare."""


@dataclass(slots=True)
class _Armed:
    action: str
    at: int
    passed: int = 0


def _parse(spec: str) -> dict[str, _Armed]:
    armed = {}
    for part in filter(None, (item.strip() for item in spec.split(","))):
        name, _, rest = part.partition("=")
        action, _, at = rest.partition("@")
        if action.partition(":")[0] not in {"kill", "raise", "sleep"}:
            message = f"KVD_FAILPOINTS: {part!r}: the action is kill, raise or sleep:SECONDS, with @N for the Nth passage"
            raise ValueError(message)
        armed[name] = _Armed(action, int(at) if at else 1)
    return armed


_armed = _parse(os.environ.get("KVD_FAILPOINTS", ""))
_lock = threading.Lock()


def declare(*names: str) -> None:
    """Register a module's failpoints."""
    NAMES.update(names)


def failpoint(name: str) -> None:
    """Pass the place ``name``."""
    armed = _armed.get(name)
    if armed is None:
        return
    with _lock:
        armed.passed += 1
        passed = armed.passed
    if armed.action.startswith("sleep"):
        time.sleep(float(armed.action.partition(":")[2] or 1))
    elif passed == armed.at and armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif passed == armed.at:
        raise OSError(errno.EIO, f"failpoint {name}")
