"""The cache's named errors."""

from __future__ import annotations

from kvd.cache.tenants import pin_label


class CacheError(Exception):
    """Anything that the cache refuses."""


class PinCapacityError(CacheError):
    """A pin would hold more of the pool than ``max_pinned_fraction`` allows."""

    def __init__(self, name: str, *, num_new: int, num_pinned: int, max_pinned: int, block_size_tokens: int) -> None:
        super().__init__(
            f"pin {pin_label(name)!r} needs {num_new} further blocks ({num_new * block_size_tokens} tokens); "
            f"{num_pinned} of at most {max_pinned} blocks are pinned"
        )
        self.num_new = num_new
        self.num_pinned = num_pinned
        self.max_pinned = max_pinned


class PinNotReadyError(CacheError):
    """Not every full block of the prefix is in memory and ready."""

    def __init__(self, name: str, *, num_ready: int, num_blocks: int) -> None:
        super().__init__(f"pin {pin_label(name)!r}: {num_ready} of {num_blocks} blocks are in memory")
        self.num_ready = num_ready
        self.num_blocks = num_blocks


class PinTooShortError(CacheError):
    """A prefix without one full block."""

    def __init__(self, name: str, *, num_tokens: int, block_size_tokens: int) -> None:
        super().__init__(f"pin {pin_label(name)!r}: a prefix of {num_tokens} tokens holds no full block of {block_size_tokens}")
        self.num_tokens = num_tokens
        self.block_size_tokens = block_size_tokens
