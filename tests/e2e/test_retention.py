"""How long blocks and pins are kept, on a real daemon: priorities of requests, and pins that end by themselves, whoever is killed when."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, errors

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SMALL_POOL = ("--kv-memory", "64KiB")
"""128 blocks."""
PATIENCE_S = 60.0


def text(name: str) -> str:
    return f"{name} is kept in the cabinet on the left, below the globe. " * 4


def cached(client: Client, name: str, **options: object) -> int:
    """Ask, compare with the oracle; the blocks that were there."""
    answer = client.generate(text(name), max_tokens=4, temperature=0.0, ignore_eos=True, **options)
    assert list(answer.token_ids) == expected_tokens(text(name).encode(), 4)
    return answer.usage.cached_tokens // 16


def pins(client: Client) -> dict[str, float | None]:
    """The time that each pin has left."""
    return {pin["name"]: pin["expires_in_s"] for pin in client.prefixes()["pins"]}


def test_blocks_of_a_higher_priority_outlast_a_flood_until_their_time_is_over(tmp_path: Path) -> None:
    def flood(client: Client, word: str) -> None:
        for number in range(20):
            cached(client, f"{word} number {number}")

    with DaemonProcess(tmp_path, *SMALL_POOL, "--no-persist") as process:
        process.wait_ready()
        with process.client() as client:
            cached(client, "The ledger", cache_priority=90)
            cached(client, "The telescope", cache_priority=90, cache_ttl_s=1.0)
            cached(client, "The inkwell")
            time.sleep(3.0)
            flood(client, "A visitor")
            assert [cached(client, name) > 0 for name in ("The ledger", "The telescope", "The inkwell")] == [True, False, False]
            with pytest.raises(errors.BadRequest, match="cache_priority is 101; it must be from 0 to 100"):
                client.generate("x", max_tokens=1, cache_priority=101)


def test_a_pin_with_an_end_is_there_before_it_and_gone_after_it_whenever_the_daemon_is_killed(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("long", text("The ledger"), ttl_s=3600.0)
            client.pin("lasting", text("The telescope"))
            assert client.pin("short", text("The inkwell"), ttl_s=1.0).details["expires_unix_s"] < time.time() + PATIENCE_S
            deadline_s = time.monotonic() + PATIENCE_S
            while "short" in pins(client):
                assert time.monotonic() < deadline_s, "the pin does not end"
                time.sleep(0.1)
            assert cached(client, "The inkwell") > 0  # unpinned, not dropped
            ends_s = time.time() + 2.0
            client.pin("meanwhile", text("The sundial"), ttl_s=2.0)
        process.kill()
    time.sleep(max(0.0, ends_s + 1.0 - time.time()))
    for _ in range(2):  # also after a start that found one over
        with DaemonProcess(tmp_path) as process:
            process.wait_ready()
            with process.client() as client:
                left = pins(client)
                assert set(left) == {"long", "lasting"}
                assert left["lasting"] is None
                assert left["long"] is not None
                assert 3000.0 < left["long"] <= 3600.0
                assert client.status()["blocks"]["pinned"] == (len(text("The ledger")) // 16 + len(text("The telescope")) // 16)
            process.kill()


def test_the_commands_say_it_too(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, "--no-persist") as process:
        process.wait_ready()

        def kvd(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "kvd", *arguments, "--connect", process.endpoint]
            return subprocess.run(command, input=text("The ledger"), capture_output=True, text=True, check=False, timeout=60)

        assert kvd("pin", "rules", "--prompt-file", "-", "--priority", "70", "--ttl", "7200").returncode == 0
        listed = kvd("prefixes").stdout
        assert "LEFT" in listed
        assert "70" in listed
        assert "1h" in listed
        assert kvd("generate", "--max-tokens", "2", "--cache-priority", "80", "--cache-ttl", "30").returncode == 0
        assert kvd("generate", "--max-tokens", "2", "--cache-priority", "101").returncode == 64
