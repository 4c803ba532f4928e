"""What storage has done since the start, counted by the planner's thread and read by any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Counters:
    """Blocks, bytes and seconds since the start of the daemon."""

    num_computed_blocks: int = 0
    num_checkpoints: int = 0
    num_committed_blocks: int = 0
    num_committed_bytes: int = 0
    num_refused_blocks: int = 0
    num_evicted_unwritten: int = 0
    num_expired_bytes: int = 0
    num_trimmed_nodes: int = 0
    num_lost_events: int = 0
    num_degradations: int = 0
    commit_s_total: float = 0.0
    commit_s_max: float = 0.0

    def add_commit(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self.num_checkpoints += 1
        self.num_committed_blocks += num_blocks
        self.num_committed_bytes += num_bytes
        self.commit_s_total += seconds
        self.commit_s_max = max(self.commit_s_max, seconds)

    def as_dict(self) -> dict[str, Any]:
        """As the stats report names them."""
        return {
            "computed_blocks": self.num_computed_blocks,
            "checkpoints": self.num_checkpoints,
            "checkpoint_blocks": self.num_committed_blocks,
            "checkpoint_bytes": self.num_committed_bytes,
            "checkpoint_commit_ms_total": round(self.commit_s_total * 1e3, 3),
            "checkpoint_commit_ms_max": round(self.commit_s_max * 1e3, 3),
            "checkpoint_refused_blocks": self.num_refused_blocks,
            "checkpoint_evicted_blocks": self.num_evicted_unwritten,
            "expired_bytes": self.num_expired_bytes,
            "trimmed_nodes": self.num_trimmed_nodes,
            "lost_events": self.num_lost_events,
            "degradations": self.num_degradations,
        }
