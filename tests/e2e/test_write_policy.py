"""The write policies on a real daemon: what a crash leaves of them, and that one which rests writes nothing."""

from __future__ import annotations

import time

import pytest
from daemon_process import DaemonProcess
from kvd_client import Client

pytestmark = pytest.mark.e2e

FLAGS = ("--checkpoint-interval-s", "0.1", "--kv-memory", "16MiB")
PROMPTS = [[*range(30 * number, 30 * number + 80), 7] for number in range(1, 6)]
NUM_BLOCKS = 25


def ask_all(client: Client) -> None:
    for prompt in PROMPTS:
        client.generate(prompt, max_tokens=1, temperature=0.0)


def until(client: Client, condition, timeout_s: float = 60.0) -> dict:
    end = time.monotonic() + timeout_s
    while not condition(stats := client.stats()["store"]):
        assert time.monotonic() < end, stats
        time.sleep(0.02)
    return stats


def test_through_has_every_computed_block_on_disk_when_it_is_killed_and_nothing_else_to_write(tmp_path):
    with DaemonProcess(tmp_path, *FLAGS, "--write-policy", "through") as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            ask_all(client)
            stats = until(client, lambda stats: stats["checkpoint_blocks"] >= stats["computed_blocks"] >= NUM_BLOCKS)
            assert stats["checkpoint_blocks"] == stats["computed_blocks"] == NUM_BLOCKS
            assert_rests(client, daemon)
            assert client.status()["store"]["governor"] == "none"
        daemon.kill()
    with DaemonProcess(tmp_path, *FLAGS) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            assert client.status()["rehydration"]["blocks"] == NUM_BLOCKS
            assert client.generate(PROMPTS[0], max_tokens=1).usage.restored_tokens == 80


def resting_state(client: Client, daemon: DaemonProcess) -> tuple:
    stats = client.stats()["store"]
    written = [stats[name] for name in ("wal_records", "wal_written_bytes", "wal_syncs", "checkpoints", "checkpoint_bytes")]
    return written, {str(path): path.stat().st_mtime_ns for path in daemon.state_dir.rglob("*") if path.is_file()}


def assert_rests(client: Client, daemon: DaemonProcess, timeout_s: float = 60.0) -> None:
    """Behind the blocks come the last rows of nodes; after them, for many checkpoint intervals, nothing."""
    end = time.monotonic() + timeout_s
    before = resting_state(client, daemon)
    time.sleep(1.0)
    while (now := resting_state(client, daemon)) != before:
        assert time.monotonic() < end, (before, now)
        before = now
        time.sleep(1.0)


def test_shutdown_writes_its_pins_and_the_rest_at_the_end(tmp_path):
    with DaemonProcess(tmp_path, *FLAGS, "--write-policy", "shutdown") as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            ask_all(client)
            ask_all(client)
            assert client.pin("system", PROMPTS[0]).details["durable"] == "recipe+bytes"
            until(client, lambda stats: stats["computed_blocks"] >= NUM_BLOCKS)
            time.sleep(0.5)
            stats = client.stats()["store"]
            assert stats["computed_blocks"] == NUM_BLOCKS
            assert stats["checkpoint_blocks"] == 5
            assert stats["held_back"] == dict.fromkeys(stats["held_back"], 0)
        assert daemon.terminate() == 0
    with DaemonProcess(tmp_path, *FLAGS) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            assert client.status()["rehydration"]["blocks"] == NUM_BLOCKS
