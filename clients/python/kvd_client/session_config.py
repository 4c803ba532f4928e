"""What a session is told about time and names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Times in seconds; ``kvd_client.client.Client`` documents them."""

    connect_timeout_s: float = 10.0
    reconnect_timeout_s: float = 60.0
    heartbeat_interval_s: float = 5.0
    heartbeat_timeout_s: float = 20.0
    wait_until_ready: bool = True
    client_name: str = "kvd-client"
    endpoint: str = ""
    """For messages."""
