"""A real daemon whose memory is too small for what it is asked: what fell out of it comes back from disk, while others are served, and nobody hears a wrong token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, Completion

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

ROW_BYTES = 512
NUM_BLOCKS = 64
MOST_TURNS = 20
FIRST, SECOND, THIRD = ("".join(f"{name} line {index} of the telephone book; " for index in range(15))[:490] for name in "ABC")
CACHED = 16 * (490 // 16)


@contextmanager
def serve(root: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[tuple[DaemonProcess, Client]]:
    """A daemon with room for two of the three prompts."""
    flags = (
        "--kv-memory",
        str(NUM_BLOCKS * ROW_BYTES),
        "--write-policy",
        "through",
        "--checkpoint-interval-s",
        "0.1",
        "--log-level",
        "debug",
    )
    with DaemonProcess(root, *flags, *arguments, env=env) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            yield daemon, client


def ask(client: Client, prompt: str, max_tokens: int = 12) -> Completion:
    answer = client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == expected_tokens(prompt.encode(), max_tokens)
    return answer


def fill(client: Client) -> None:
    """The first prompt is on disk and not in memory."""
    ask(client, FIRST)
    client.checkpoint()
    ask(client, SECOND)
    ask(client, THIRD)
    client.checkpoint()
    assert client.status()["store"]["blocks"] >= CACHED // 16 * 3


def cold_stats(client: Client) -> dict[str, Any]:
    return {key: value for key, value in client.stats()["store"].items() if key.startswith("cold_")}


def in_time(tmp_path: Path, attempt: Callable[[Path, float], bool], *delays_s: float) -> None:
    """``attempt`` with a disk that takes the first delay, and with ever slower ones where that was too quick for a busy machine to do anything meanwhile."""
    for delay_s in delays_s:
        (root := tmp_path / f"{delay_s}").mkdir()
        if attempt(root, delay_s):
            return
    pytest.fail(f"nothing could be done while the disk took {delays_s} s")


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def assert_nothing_is_held(client: Client) -> None:
    def is_idle() -> bool:
        blocks = client.status()["blocks"]
        return (
            blocks["used"] == 0
            and blocks["free"] + blocks["cached"] == blocks["total"]
            and client.stats()["scheduler"]["loading_blocks"] == 0
        )

    wait_until(is_idle)


def test_what_fell_out_of_memory_is_restored_while_others_are_answered(tmp_path: Path) -> None:
    def attempt(root: Path, delay_s: float) -> bool:
        with serve(root, "--cold-tier", "always", env={"KVD_FAILPOINTS": f"cold.before_read=sleep:{delay_s}"}) as (_, client):
            fill(client)
            with ThreadPoolExecutor(2) as pool:
                again = pool.submit(ask, client, FIRST)
                wait_until(lambda: cold_stats(client)["cold_loads"] == 1)
                loading = client.stats()["scheduler"]["loading_blocks"]
                assert ask(client, "a short one meanwhile", 30).usage.cached_tokens == 0
                twin = pool.submit(ask, client, FIRST)
                if again.done():
                    return False
                assert loading == CACHED // 16
                assert [(each.result().usage.cached_tokens, each.result().usage.restored_tokens) for each in (again, twin)] == [
                    (CACHED, CACHED),
                    (CACHED, 0),
                ]
            stats = cold_stats(client)
            assert (stats["cold_loads"], stats["cold_loaded_blocks"], stats["cold_failed_blocks"]) == (1, CACHED // 16, 0)
            assert stats["cold_loaded_bytes"] == CACHED // 16 * ROW_BYTES
            assert client.stats()["cache"]["hit_tokens_restored"] == 2 * CACHED
            for prompt in (SECOND, THIRD, FIRST, THIRD, SECOND):
                ask(client, prompt)
            assert_nothing_is_held(client)
            return True

    in_time(tmp_path, attempt, 0.7, 2.0, 4.0)


def test_where_computing_is_slow_the_disk_is_read_and_where_the_disk_is_slow_it_is_not(tmp_path: Path) -> None:
    slow_steps = ("--fake-step-ms", "25", "--max-tokens-per-step", "16")  # a prompt takes 31 steps
    (tmp_path / "a").mkdir()
    with serve(tmp_path / "a", *slow_steps) as (_, client):
        fill(client)
        assert [ask(client, prompt, 2).usage.restored_tokens for prompt in (FIRST, SECOND, THIRD)] == [CACHED] * 3
        stats = cold_stats(client)
        assert (stats["cold_loads"], stats["cold_refused_slower"]) == (3, 0)
    (tmp_path / "b").mkdir()
    with serve(tmp_path / "b", env={"KVD_FAILPOINTS": "cold.before_read=sleep:0.3"}) as (daemon, client):
        fill(client)
        assert [ask(client, prompt, 2).usage.restored_tokens for prompt in (FIRST, SECOND, THIRD)] == [CACHED, 0, 0]
        stats = cold_stats(client)
        assert (stats["cold_loads"], stats["cold_refused_slower"]) == (1, 2)
        assert client.stats()["store"]["prefill_tokens_per_s"] > 1000
        assert "cold.slower" in daemon.log()


def test_an_abort_while_loading_leaves_nothing_behind(tmp_path: Path) -> None:
    def attempt(root: Path, delay_s: float) -> bool:
        with serve(root, "--cold-tier", "always", env={"KVD_FAILPOINTS": f"cold.before_read=sleep:{delay_s}"}) as (_, client):
            fill(client)
            stream = client.generate(FIRST, stream=True, max_tokens=12, temperature=0.0)
            wait_until(lambda: cold_stats(client)["cold_loads"] == 1)
            stream.close()
            wait_until(lambda: client.status()["requests"] == {"running": 0, "waiting": 0, "stalled": 0})
            loading = client.stats()["scheduler"]["loading_blocks"]
            assert_nothing_is_held(client)
            if not loading:
                return False
            assert loading == CACHED // 16, "the load goes on"
            later = ask(client, FIRST)
            assert (later.usage.cached_tokens, later.usage.restored_tokens) == (CACHED, CACHED)
            assert cold_stats(client)["cold_loads"] == 1
            return True

    in_time(tmp_path, attempt, 0.5, 2.0, 4.0)


def test_blocks_damaged_under_the_daemon_are_computed_again(tmp_path: Path) -> None:
    with serve(tmp_path, "--cold-tier", "always") as (daemon, client):
        fill(client)
        damaged = damage_rows(daemon.state_dir)
        assert damaged >= CACHED // 16
        answer = ask(client, FIRST)
        assert answer.usage.restored_tokens == 0
        stats = cold_stats(client)
        assert stats["cold_failed_loads"] == {"checksum": 1}
        assert client.stats()["scheduler"]["failed_loads"] == 1
        assert_nothing_is_held(client)
        daemon.kill()
    with serve(tmp_path) as (_, client):
        for prompt in (FIRST, SECOND, THIRD):
            ask(client, prompt)


def damage_rows(state_dir: Path) -> int:
    """Flip a bit in every block's row of the store, under the daemon that has it open; how many."""
    (path,) = state_dir.glob("kv/*/data.mdb")
    data = path.read_bytes()
    starts = [start for start in range(16, len(data), 4096) if data.startswith(b"KVDB\x01\x00\x60\x00", start)]
    with path.open("r+b") as file:
        for start in starts:
            file.seek(start + 96 + 100)
            file.write(bytes([data[start + 96 + 100] ^ 1]))
    return len(starts)


def test_many_clients_over_many_prompts_in_little_memory(tmp_path: Path) -> None:
    """Loads, hits, evictions and aborts at once, with a disk that stumbles now and then."""
    prompts = [f"{number} is the number of this prompt. " * 9 for number in range(12)]
    expected = {prompt: expected_tokens(prompt.encode(), 6) for prompt in prompts}
    wrong: list[str] = []
    with serve(tmp_path, "--cold-tier", "always", "--fake-step-ms", "1", env={"KVD_FAILPOINTS": "cold.before_read=raise@9"}) as (_, client):

        def visit(number: int) -> None:
            for turn in range(15):
                prompt = prompts[(number * 5 + turn * 7) % len(prompts)]
                stream = client.generate(prompt, stream=True, max_tokens=6, temperature=0.0, ignore_eos=True)
                if (number + turn) % 6 == 0:
                    threading.Event().wait(0.003)
                    stream.close()
                    continue
                list(stream)
                if list(stream.completion.token_ids) != expected[prompt]:
                    wrong.append(prompt)

        for _ in range(MOST_TURNS):  # until the disk has kept up: nothing is loaded of what was not written before it left memory
            with ThreadPoolExecutor(6) as pool:
                list(pool.map(visit, range(6)))
            assert not wrong
            stats = cold_stats(client)
            if stats["cold_loads"] >= 10:
                break
        assert stats["cold_loads"] >= 10
        assert stats["cold_failed_loads"] == {"store_fault": 1}
        assert_nothing_is_held(client)
