"""How a start's rehydration went, for the status report and the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvd.commands import Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class RehydrationReport:
    """How a start's rehydration went.

    ``recompute`` are requests that compute prefixes anew which were used twice or more and whose bytes are gone, the most valuable first;
    ``recompute_pins`` is False after several starts that died early or failed while they computed.
    """

    num_blocks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    dropped: dict[str, int] = field(default_factory=dict)
    pins_pending: tuple[str, ...] = ()
    recompute_pins: bool = True
    recompute: tuple[Submit, ...] = ()
    failed_starts: int = 0
    failed_computations: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The ``rehydration`` part of the status report."""
        return {
            "blocks": self.num_blocks,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "pins_pending": len(self.pins_pending),
            "dropped": dict(self.dropped),
            "failed_starts": self.failed_starts,
            "failed_computations": self.failed_computations,
            "recompute_pins": self.recompute_pins,
        }
