"""What this machine's memory can still take. Linux; without torch."""

from __future__ import annotations

import mmap
from pathlib import Path

from kvd.config import ConfigError

_MEMINFO = Path("/proc/meminfo")
_AUTO_POOL_MAX_BYTES = 4 << 30


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """Memory that can be had without swapping."""
    return _bytes_of(meminfo, "MemAvailable")


def automatic_pool_bytes(meminfo: Path = _MEMINFO) -> int:
    """A pool's size where none is configured."""
    return min(_AUTO_POOL_MAX_BYTES, available_bytes(meminfo) // 2)


def check_pool_fits(kv_memory: int, meminfo: Path = _MEMINFO) -> None:
    """Refuse a pool that the kernel would grant and then kill the process for.

    Raises:
        ConfigError: ``kv_memory`` bytes are more than memory and swap have left.
    """
    left = available_bytes(meminfo) + _bytes_of(meminfo, "SwapFree")
    if kv_memory > left:
        raise ConfigError(
            f"kv_memory = {kv_memory}: this machine has {left} bytes of memory left; give less, or nothing for an automatic size"
        )


def map_memory(num_bytes: int) -> memoryview:
    """Writable pages of their own, touched by whoever writes first."""
    return memoryview(mmap.mmap(-1, num_bytes))


def _bytes_of(meminfo: Path, name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith(f"{name}:"))
