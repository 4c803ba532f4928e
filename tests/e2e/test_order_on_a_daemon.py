"""Priorities and the times of requests, on a real daemon, from both clients, the command line and the gateway's fields."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from kvd_client import Client, errors
from kvd_client.aio import AsyncClient

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SLOW = ("--no-persist", "--max-running", "1", "--fake-step-ms", "10")
"""One request at a time, a token in 10 ms."""
MANY = 40
"""So many tokens that one answer comes long before the next, whoever's turn on the processor it is."""


def ended_s(client: Client, prompt: str, max_tokens: int, **options: object) -> float:
    client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, text=False, **options)
    return time.monotonic()


def wait_for(client: Client, **counts: int) -> None:
    """Until the scheduler has so many requests in each of these states."""
    until_s = time.monotonic() + 30.0
    while any(client.stats()["scheduler"][name] != count for name, count in counts.items()):
        assert time.monotonic() < until_s, client.stats()["scheduler"]
        time.sleep(0.01)


def test_priorities_and_times_from_both_clients_and_the_command_line(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, *SLOW) as process, ThreadPoolExecutor(8) as pool:
        process.wait_ready()
        with process.client() as client:
            stream = client.generate("Somebody who talks for long", max_tokens=8000, window_tokens=8000, ignore_eos=True, stream=True)
            next(iter(stream))
            low = pool.submit(ended_s, client, "low", MANY, priority=4)
            wait_for(client, waiting=1)
            plain = pool.submit(ended_s, client, "plain", MANY)
            wait_for(client, waiting=2)
            urgent = pool.submit(ended_s, client, "urgent", MANY, priority=-4)
            wait_for(client, waiting=3)
            with pytest.raises(errors.QueueTimeout, match="not begun to run within its queue_timeout_s") as timeout:
                client.generate("x", max_tokens=1, queue_timeout_s=0.1)
            assert timeout.value.retryable
            assert timeout.value.retry_after_s > 0
            with pytest.raises(errors.DeadlineExceeded, match="has not begun to run at the end of its deadline_s"):
                client.generate("x", max_tokens=1, deadline_s=0.1)
            stream.close()
            assert urgent.result(30) < plain.result(30) < low.result(30)

            async def late() -> int:
                async with AsyncClient(process.endpoint) as other:
                    heard = 0
                    async with await other.generate(
                        "x", max_tokens=1000, ignore_eos=True, deadline_s=2.0, priority=1, stream=True
                    ) as tokens:
                        with pytest.raises(errors.DeadlineExceeded, match="runs at the end of its deadline_s"):  # noqa: PT012
                            async for chunk in tokens:
                                heard += len(chunk.token_ids)
                    return heard

            assert 1 <= asyncio.run(late()) < 1000, "what came before the deadline is the client's"
            with pytest.raises(errors.BadRequest, match="priority is 11; it must be from -10 to 10"):
                client.generate("x", max_tokens=1, priority=11)

        def kvd(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "kvd", "generate", "--ignore-eos", *arguments, "--connect", process.endpoint]
            return subprocess.run(command, input="The ledger", capture_output=True, text=True, check=False, timeout=60)

        assert kvd("--max-tokens", "2", "--priority", "-1", "--deadline", "30", "--queue-timeout", "30").returncode == 0
        late_one = kvd("--max-tokens", "1000", "--deadline", "0.2")
        assert late_one.returncode == 75
        assert "deadline_exceeded" in late_one.stderr
