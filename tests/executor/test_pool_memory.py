"""A pool's pages are there before the first request, and what is written while they are made stays."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest

from kvd.executor import pool_memory
from kvd.executor.pool_memory import PoolMemory

MIB = 1 << 20


def anonymous_bytes() -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))


@pytest.mark.parametrize("num_bytes", [1, 4097, 8 * MIB, 96 * MIB])
def test_every_page_is_touched_and_zero(num_bytes):
    before = anonymous_bytes()
    memory = PoolMemory(num_bytes)
    memory.wait_touched()
    assert not memory.is_touching
    assert anonymous_bytes() - before > 0.95 * num_bytes - MIB
    assert memory.buffer[0] == memory.buffer[num_bytes - 1] == 0
    assert memory.buffer.find(b"\1") == -1


def test_what_is_written_meanwhile_stays():
    memory = PoolMemory(160 * MIB)
    for at in range(0, memory.num_bytes, MIB):
        memory.buffer[at] = 7
    memory.wait_touched()
    assert all(memory.buffer[at] == 7 for at in range(0, memory.num_bytes, MIB))


def test_a_kernel_that_can_not_populate_has_its_pages_written(monkeypatch):
    monkeypatch.setattr(pool_memory, "_MADV_POPULATE_WRITE", 12345)
    before = anonymous_bytes()
    memory = PoolMemory(96 * MIB)
    assert not memory.is_touching
    assert anonymous_bytes() - before > 90 * MIB
    memory.wait_touched()


def test_more_than_there_can_be_is_an_error():
    with pytest.raises((OSError, ValueError, OverflowError)):
        PoolMemory(1 << 60)


def test_touching_leaves_the_interpreter_to_others():
    memory = PoolMemory(128 * MIB)
    assert "kvd-pool-pages" in {thread.name for thread in threading.enumerate()} or not memory.is_touching
    memory.wait_touched()
    assert len(memory.buffer) % mmap.PAGESIZE == 0
