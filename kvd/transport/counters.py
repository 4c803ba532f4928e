"""What the edge counts; the ``transport`` part of the stats report."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Since the start of the daemon. Plain integers, written by the edge's thread alone."""

    messages_received: int = 0
    messages_sent: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    malformed: int = 0
    oversized: int = 0
    unknown_type: int = 0
    unsupported_version: int = 0
    refused: int = 0
    duplicates: int = 0
    requests: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    tokens_sent: int = 0
    clients_gone: int = 0
    clients_too_slow: int = 0
    messages_dropped: int = 0
    curve_denied: int = 0
    tenants_unknown: int = 0
    internal_errors: int = 0

    def as_dict(self) -> dict[str, int]:
        """By name, for the report."""
        return asdict(self)
