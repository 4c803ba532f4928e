"""Clients of kvd, the inference daemon whose KV cache survives restarts: :class:`Client` and :class:`aio.AsyncClient`.

Names are loaded when they are first used: the daemon imports ``kvd_client.protocol`` and pays for nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvd_client.aio import AsyncClient as AsyncClient
    from kvd_client.aio import AsyncStream as AsyncStream
    from kvd_client.client import Client as Client
    from kvd_client.client import Stream as Stream
    from kvd_client.endpoints import default_endpoint as default_endpoint
    from kvd_client.errors import KvdError as KvdError
    from kvd_client.results import Chunk as Chunk
    from kvd_client.results import Completion as Completion

_HOMES = {
    "AsyncClient": "aio",
    "AsyncStream": "aio",
    "Chunk": "results",
    "Client": "client",
    "Completion": "results",
    "KvdError": "errors",
    "Stream": "client",
    "default_endpoint": "endpoints",
}

__all__ = ["AsyncClient", "AsyncStream", "Chunk", "Client", "Completion", "KvdError", "Stream", "default_endpoint"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
