"""The real time; tests and simulations have their own."""

from __future__ import annotations

import time


class SystemClock:
    """Seconds; what every room's ``Clock`` port asks for."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()
