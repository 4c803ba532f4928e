"""What a ``KvdPool`` and its caches refuse."""

from __future__ import annotations


class KvdCacheError(Exception):
    """The cache can't do what is asked of it; the message says what to do."""


class PoolFullError(KvdCacheError):
    """Living caches hold every block."""
