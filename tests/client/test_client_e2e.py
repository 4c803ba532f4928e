"""The clients and their example programs against a real daemon that is killed and replaced."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from kvd_client import AsyncClient, errors

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "clients" / "python" / "examples"
SLOW = ("--fake-step-ms", "20")


def start_example(daemon: DaemonProcess, name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(EXAMPLES / name), "--connect", daemon.endpoint, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_example(daemon: DaemonProcess, name: str, *arguments: str, stdin: str = "") -> str:
    process = start_example(daemon, name, *arguments)
    out, err = process.communicate(stdin, timeout=60)
    assert (process.returncode, err) == (0, "")
    return out


def test_the_examples_run(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon:
        generated = run_example(daemon, "generate.py", "a prompt of more than sixteen tokens")
        assert generated.count("sample ") == 3
        assert "32 of them cached" in generated
        again = run_example(daemon, "generate.py", "a prompt of more than sixteen tokens")
        assert again.splitlines()[:-1] == generated.splitlines()[:-1]
        assert "8 answers, " in run_example(daemon, "async_many.py", "--requests", "8")
        scores = run_example(daemon, "score.py").splitlines()
        assert [line.split(": ")[-1][1:6] for line in scores[:2]] == ["Water", "Water"]
        assert scores[2].startswith("without ")
        beams = run_example(daemon, "beam_search.py", "--width", "4").splitlines()
        scores = [float(line.split("(score ")[1].split(",")[0]) for line in beams[:2]]
        assert scores == sorted(scores, reverse=True)
        assert "log probability -" in beams[2]
        structured = run_example(daemon, "structured.py")
        assert re.search(r"^mood: (glad|sad|angry)\ndate: \d{4}-\d{2}-\d{2}\nperson: {'name'", structured)
        assert "objekt" in structured
        waited = run_example(daemon, "deadlines.py").splitlines()
        assert sorted(line.split(",")[0] for line in waited) == [*(f"summary {number}" for number in range(6)), "the question"]
        chat = run_example(daemon, "chat_stream.py", stdin="hello\nand again\n")
        assert chat.count("> ") >= 3


def test_the_pin_example_is_answered_through_a_kill(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path)
    with daemon:
        daemon.wait_ready()
        example = start_example(daemon, "pin_and_restart.py", "--questions", "4")
        assert example.stdout is not None
        lines = [example.stdout.readline(), example.stdout.readline()]
        assert "recipe+bytes" in lines[0]
        daemon.kill()
    with DaemonProcess(tmp_path):
        out, err = example.communicate(timeout=60)
        assert (example.returncode, err) == (0, "")
    lines += out.splitlines()
    assert len(lines) == 5
    assert len({line.split(":")[0] for line in lines[1:]}) == 2
    restored = [int(line.split(" cached (")[1].split()[0]) for line in lines[1:]]
    assert restored[0] == 0
    assert max(restored) > 1000


def test_whole_answers_survive_sigkill_with_the_same_tokens_and_streams_say_so(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, *SLOW) as daemon, daemon.client() as client:
        client.wait_ready()
        expected = [client.generate(f"prompt {i}", max_tokens=30, temperature=0).token_ids for i in range(3)]
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(client.generate, f"prompt {i}", max_tokens=30, temperature=0) for i in range(3)]
            begun = client.generate("stream", stream=True, max_tokens=200)
            next(begun)
            daemon.kill()
            with pytest.raises(errors.Interrupted):
                list(begun)
            with DaemonProcess(tmp_path, *SLOW):
                assert [call.result(60).token_ids for call in calls] == expected


def test_asyncio_calls_survive_a_restart_in_good_order(tmp_path: Path) -> None:
    async def many(endpoint: str, daemon: DaemonProcess) -> None:
        async with AsyncClient(endpoint, timeout_s=90.0) as client:
            await client.wait_ready()
            tasks = [asyncio.create_task(client.generate(f"task {i}", max_tokens=40, seed=i)) for i in range(20)]
            while not (await client.status())["requests"]["running"]:
                pass
            await client.drain(0.2)
            late = asyncio.create_task(client.generate("late", max_tokens=5))
            assert await asyncio.to_thread(daemon.wait_dead) == 0
            with DaemonProcess(tmp_path):
                assert len((await late).token_ids) == 5
                reasons = {(await task).finish_reason for task in tasks}
            assert reasons <= {"length", "stop", "aborted"}

    with DaemonProcess(tmp_path, *SLOW) as daemon:
        asyncio.run(many(daemon.endpoint, daemon))
