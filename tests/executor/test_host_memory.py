"""How much memory a pool may ask for."""

from __future__ import annotations

import pytest

from kvd.config import ConfigError
from kvd.executor.host_memory import available_bytes, check_pool_fits


@pytest.fixture
def meminfo(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:  40 kB\nSwapTotal:  9 kB\nSwapFree:  2 kB\n")
    return path


def test_what_is_available_is_what_can_be_had_without_swapping(meminfo):
    assert available_bytes(meminfo) == 40 * 1024


def test_a_pool_may_take_what_memory_and_swap_have_left_and_no_more(meminfo):
    check_pool_fits(0, meminfo)
    check_pool_fits(42 * 1024, meminfo)
    with pytest.raises(ConfigError, match="kv_memory = 43009: this machine has 43008 bytes"):
        check_pool_fits(42 * 1024 + 1, meminfo)


def test_this_machine_has_some():
    assert available_bytes() > 1 << 20
