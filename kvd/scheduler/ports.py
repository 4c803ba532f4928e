"""What the scheduler needs of the world besides the cache."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, never going back."""
