"""What status and stats say of the store while the engine runs (docs/operations.md has what each field means)."""

from __future__ import annotations

from typing import Any

from kvd.config import StorageConfig
from kvd.storage.running import Running


def running_status(
    running: Running | None, config: StorageConfig, *, is_encrypted: bool, fault: str, damage: list[str], failed_starts: int, now_s: float
) -> dict[str, Any]:
    """``running`` None: nothing is persisted. ``fault``: of what there is all the same, such as recipes; ``now_s`` is monotonic."""
    kind = {"durability": config.durability, "encrypted": is_encrypted}
    if running is None:
        return {
            "nodes": 0,
            "blocks": 0,
            "bytes": 0,
            "wal_bytes": 0,
            **kind,
            "last_checkpoint_age_s": None,
            "degraded": bool(fault),
            "reason": fault or "off",
            "damage": damage,
        }
    index, planner = running.recovered.index, running.planner
    last_s, num_waiting = planner.last_checkpoint_s, planner.num_waiting
    reason = planner.fault or running.wal.fault or fault
    return {
        "nodes": len(index.nodes),
        "blocks": index.num_stored,
        "bytes": index.stored_bytes,
        "wal_bytes": running.wal.num_bytes,
        "write_policy": config.write_policy,
        "governor": running.governor.state.value,
        "waiting_blocks": num_waiting,
        "waiting_bytes": num_waiting * running.budget.block_bytes,
        "unwritten_blocks": index.num_unwritten,
        "refused_blocks": planner.num_refused,
        "max_block_bytes": running.budget.max_block_bytes,
        "max_bytes": config.store_max_bytes,
        **kind,
        "last_checkpoint_age_s": None if last_s is None else round(now_s - last_s, 3),
        "degraded": bool(reason),
        "reason": reason,
        "failed_starts": failed_starts,
        "damage": damage,
    }


def running_stats(running: Running) -> dict[str, Any]:
    """Counters since the start."""
    return {
        **running.wal.stats(),
        **running.planner.stats(),
        **(running.cold_tier.stats() if running.cold_tier is not None else {}),
        "checkpoint_copied_bytes": running.copy_out.num_copied_bytes,
        "governor": running.governor.state.value,
        "held_back": dict(running.governor.num_held()),
    }
