"""Memory of a KV pool on the host, its pages touched before the first request, by a thread beside the rest of the start. Without torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from typing import Any, Protocol

_MADV_POPULATE_WRITE = 23
"""Linux 5.14: makes the pages be there without changing what is in them, so that others may write meanwhile."""
_STRIDE_BYTES = 32 << 20
"""Touched at once: between two strides others may map memory, as every import does."""
_BESIDE_BYTES = 64 << 20
"""Less is touched before ``__init__`` returns."""


class HostMemory(Protocol):
    """What a pool on the host lies in."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def buffer(self) -> Any:
        """Writable bytes."""

    @property
    def touched_s(self) -> float:
        """How long touching took, once it is over."""

    def wait_touched(self) -> None: ...


class MemoryPart:
    """Some bytes of a ``PoolMemory``, for a pool beside the first."""

    def __init__(self, whole: PoolMemory, start: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.buffer = memoryview(whole.buffer)[start : start + num_bytes]
        self.touched_s = 0.0
        self.wait_touched = whole.wait_touched


class PoolMemory:
    """Private zeroed pages, huge ones where the machine gives them.

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self.buffer.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._thread: threading.Thread | None = None
        self.touched_s = 0.0
        """How long touching took, once it is over."""
        if not self._populate(0, min(num_bytes, mmap.PAGESIZE)):
            ctypes.memset(self._address, 0, num_bytes)
        elif num_bytes > _BESIDE_BYTES:
            self._thread = threading.Thread(target=self._touch, name="kvd-pool-pages", daemon=True)
            self._thread.start()
        else:
            self._touch()

    def part(self, start: int, num_bytes: int) -> MemoryPart:
        """``num_bytes`` from ``start`` on; there are so many."""
        return MemoryPart(self, start, num_bytes)

    @property
    def is_touching(self) -> bool:
        """Whether some pages are not there yet."""
        return self._thread is not None and self._thread.is_alive()

    def wait_touched(self) -> None:
        """Return when every page is there."""
        if self._thread is not None:
            self._thread.join()

    def _touch(self) -> None:
        begun_s = time.monotonic()
        for start in range(0, self.num_bytes, _STRIDE_BYTES):
            self._populate(start, min(_STRIDE_BYTES, self.num_bytes - start))
        self.touched_s = time.monotonic() - begun_s

    def _populate(self, start: int, num_bytes: int) -> bool:
        """Whether the kernel can; a call through ctypes leaves the interpreter to the other threads."""
        return num_bytes == 0 or self._madvise(self._address + start, num_bytes, _MADV_POPULATE_WRITE) == 0
