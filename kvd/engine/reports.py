"""What the daemon says of itself: the reports behind ``kvd status``, ``kvd stats`` and ``kvd prefixes``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvd.cache.manager import CacheManager
from kvd.cache.tenants import pin_label, pin_tenant
from kvd.engine.adapters import Adapters
from kvd.engine.pins import Pins
from kvd.engine.ports import CacheObserver, Clock
from kvd.scheduler.scheduler import Scheduler
from kvd.types import BlockHash

_RATE_WINDOW_S = 60.0
_SAMPLE_INTERVAL_S = 1.0
_HOTTEST = 20


@dataclass(slots=True)
class StartFacts:
    """What is known once, at start: identity, and how the rehydration went (``rehydration`` is the report's own part)."""

    model: str
    fingerprint: str
    instance: str
    started_monotonic_s: float
    rehydration: dict[str, Any] = field(default_factory=dict)
    startup: dict[str, float] = field(default_factory=dict)
    kernels: str = ""
    """What computes: the kernel family of the fingerprint."""
    draft: dict[str, Any] = field(default_factory=dict)
    """The draft model and its KV group; empty where there is none."""


def starting_report(facts: StartFacts, clock: Clock, state: str, progress: str = "") -> dict[str, Any]:
    """The status report before there is an engine: the same keys, with what is known."""
    return {
        "state": state,
        "progress": progress,
        "model": facts.model,
        "fingerprint": facts.fingerprint,
        "kernels": facts.kernels,
        "instance": facts.instance,
        "uptime_s": round(clock.monotonic() - facts.started_monotonic_s, 3),
        "requests": {"running": 0, "waiting": 0, "stalled": 0},
        "blocks": {"total": 0, "used": 0, "shared": 0, "references": 0, "cached": 0, "free": 0, "pinned": 0},
        "store": {"nodes": 0, "blocks": 0, "bytes": 0, "wal_bytes": 0, "last_checkpoint_age_s": None, "degraded": None},
        "rehydration": {"blocks": 0, "tokens": 0, "bytes": 0, "seconds": 0.0, "pins_pending": 0, "pins_not_held": 0, "dropped": {}},
        "adapters": {"max_adapters": 0, "loaded": [], "waiting": 0},
        "startup_s": facts.startup,
    }


class Reports:
    """Builds the reports from the rooms' own counters. Used by the engine thread alone."""

    def __init__(
        self,
        *,
        facts: StartFacts,
        scheduler: Scheduler,
        cache: CacheManager,
        observer: CacheObserver,
        pins: Pins,
        adapters: Adapters,
        clock: Clock,
        executor_stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._facts = facts
        self._scheduler = scheduler
        self._cache = cache
        self._observer = observer
        self._pins = pins
        self._adapters = adapters
        self._clock = clock
        self._executor_stats = executor_stats
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def status(self, state: str) -> dict[str, Any]:
        """The status report; see docs/operations.md for the meaning of each key."""
        facts, cache, scheduler = self._facts, self._cache, self._scheduler
        return {
            "state": state,
            "progress": "computing pins and logged prefixes" if state == "rehydrating" else "",
            "model": facts.model,
            "fingerprint": facts.fingerprint,
            "kernels": facts.kernels,
            "instance": facts.instance,
            **({"draft": facts.draft} if facts.draft else {}),
            "uptime_s": round(self._clock.monotonic() - facts.started_monotonic_s, 3),
            "requests": {"running": scheduler.num_running, "waiting": scheduler.num_waiting, "stalled": scheduler.num_stalled},
            "blocks": {
                "total": cache.num_blocks,
                "used": cache.num_used,
                "shared": cache.num_shared,
                "references": cache.num_references,
                "cached": cache.num_cached,
                "free": cache.num_free,
                "pinned": cache.pinned_blocks,
            },
            "store": self._observer.status(),
            "rehydration": {
                **facts.rehydration,
                "pins_pending": self._pins.num_pending,
                "pins_not_held": self._pins.num_not_held,
            },
            "adapters": self._adapters.report(),
            "startup_s": facts.startup,
        }

    def stats(self) -> dict[str, Any]:
        """Counters since start, and rates a second over the last minute."""
        self.sample()
        counters = self._counters()
        now, newest = self._samples[-1]
        then, oldest = self._samples[0]
        elapsed = now - then
        rates = {key: round((newest[key] - oldest.get(key, 0.0)) / elapsed, 3) for key in newest} if elapsed > 0 else {}
        return {
            "uptime_s": round(self._clock.monotonic() - self._facts.started_monotonic_s, 3),
            **counters,
            "rates_per_s": rates,
            "rates_window_s": round(elapsed, 1),
        }

    def prefixes(self, tenant: str = "") -> dict[str, Any]:
        """The pins of a tenant, and those of its prefixes with the most uses. ``age_s`` counts since the last use; None where storage has not seen one."""
        now = self._clock.unix()

        def residency(block_hash: BlockHash) -> dict[str, Any]:
            is_stored, last_use_unix_s = self._observer.block_on_disk(block_hash)
            age_s = round(max(0.0, now - last_use_unix_s), 1) if last_use_unix_s else None
            return {"residency": "memory+disk" if is_stored else "memory", "age_s": age_s}

        held = self._cache.pins()
        pins = [
            {
                **entry,
                "name": pin_label(entry["name"]),
                **(residency(held[entry["name"]].block_hash) if entry["name"] in held else {"residency": "none", "age_s": None}),
            }
            for entry in self._pins.report(now)
            if pin_tenant(entry["name"]) == tenant
        ]
        hottest = [
            {"tokens": info.num_tokens, "hits": info.uses, "pinned": info.is_pinned, **residency(info.block_hash)}
            for info in self._cache.hottest(_HOTTEST, tenant)
        ]
        return {"pins": pins, "hottest": hottest}

    def sample(self) -> None:
        """Remember the counters for the rates; cheap, called about once a second and before each report."""
        now = self._clock.monotonic()
        if self._samples and now - self._samples[-1][0] < _SAMPLE_INTERVAL_S / 2:
            return
        flat = {
            key: float(value) for part in (self._scheduler.stats(), self._cache.stats()) for key, value in part.items() if _is_count(value)
        }
        self._samples.append((now, flat))
        while now - self._samples[0][0] > _RATE_WINDOW_S and len(self._samples) > 1:
            self._samples.popleft()

    def _counters(self) -> dict[str, Any]:
        return {
            "scheduler": self._scheduler.stats(),
            "cache": self._cache.stats(),
            "store": self._observer.stats(),
            "executor": self._executor_stats(),
            "adapters": self._adapters.stats(),
        }


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
