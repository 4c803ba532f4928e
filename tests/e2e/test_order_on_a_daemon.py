"""Priorities and the times of requests, on a real daemon, from both clients, the command line and the gateway's fields."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from kvd_client import Client, errors
from kvd_client.aio import AsyncClient

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SLOW = ("--no-persist", "--max-running", "1", "--fake-step-ms", "10")
"""One request at a time, a token in 10 ms."""


def wait_for(client: Client, **counts: int) -> None:
    """Until the scheduler has so many requests in each of these states."""
    until_s = time.monotonic() + 30.0
    while any(client.stats()["scheduler"][name] != count for name, count in counts.items()):
        assert time.monotonic() < until_s, client.stats()["scheduler"]
        time.sleep(0.01)


def test_priorities_and_times_from_both_clients_and_the_command_line(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, *SLOW) as process:
        process.wait_ready()
        with process.client() as client:
            stream = client.generate("Somebody who talks for long", max_tokens=8000, window_tokens=8000, ignore_eos=True, stream=True)
            next(iter(stream))

            async def ended_in_order() -> list[str]:
                """All in one loop, which hears of every end in the order in which the daemon tells them."""
                ended: list[str] = []

                async def ask(other: AsyncClient, name: str, **options: object) -> None:
                    await other.generate(name, max_tokens=8, ignore_eos=True, text=False, **options)
                    ended.append(name)

                async with AsyncClient(process.endpoint) as other, asyncio.TaskGroup() as tasks:
                    for num_waiting, (name, options) in enumerate(
                        {"low": {"priority": 4}, "plain": {}, "urgent": {"priority": -4}}.items()
                    ):
                        tasks.create_task(ask(other, name, **options))
                        await asyncio.to_thread(wait_for, client, waiting=num_waiting + 1)
                    await asyncio.to_thread(give_up_waiting)
                    await asyncio.to_thread(stream.close)
                return ended

            def give_up_waiting() -> None:
                """Of token ids: a text's time may be over before it is tokenised, which is another message."""
                with pytest.raises(errors.QueueTimeout, match="not begun to run within its queue_timeout_s") as timeout:
                    client.generate([120], max_tokens=1, queue_timeout_s=0.1)
                assert timeout.value.retryable
                assert timeout.value.retry_after_s > 0
                with pytest.raises(errors.DeadlineExceeded, match="has not begun to run at the end of its deadline_s"):
                    client.generate([120], max_tokens=1, deadline_s=0.1)

            assert asyncio.run(ended_in_order()) == ["urgent", "plain", "low"]

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
