"""A real daemon on the fake executor over real sockets: what a client sees."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import errors

from kvd.types import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

SYSTEM = "You answer the telephone of a small museum. " * 12


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("kvd")) as process:
        process.wait_ready()
        yield process


def test_greedy_answer_is_the_oracles(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        answer = client.generate("What is a cache?", max_tokens=40, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == expected_tokens(b"What is a cache?", 40)
    assert answer.finish_reason == "length"
    assert answer.usage.prompt_tokens == 16
    assert answer.usage.completion_tokens == 40


def test_second_prompt_hits_the_shared_prefix_and_answers_the_same(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        first = client.generate(SYSTEM + "one", max_tokens=24, temperature=0.0, ignore_eos=True)
        second = client.generate(SYSTEM + "two", max_tokens=24, temperature=0.0, ignore_eos=True)
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 16 * (len(SYSTEM) // 16)
    assert list(second.token_ids) == expected_tokens((SYSTEM + "two").encode(), 24)


def test_streamed_text_is_the_whole_text(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        whole = client.generate("stream", max_tokens=30, temperature=0.0, ignore_eos=True)
        chunks = list(client.generate("stream", stream=True, max_tokens=30, temperature=0.0, ignore_eos=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)


def test_choices_differ_by_noise_and_repeat_by_seed(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        answer = client.generate("three choices", n=3, max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    sampling = SamplingParams(temperature=1.0, seed=7)
    for choice in answer.choices:
        assert list(choice.token_ids) == expected_tokens(b"three choices", 20, sampling=sampling, choice=choice.index)
    assert len({choice.token_ids for choice in answer.choices}) == 3


def test_stop_string_ends_the_answer_before_it(daemon: DaemonProcess) -> None:
    whole = bytes(token for token in expected_tokens(b"find a stop", 60) if token < 256).decode()
    stop = whole[20:23]
    with daemon.client() as client:
        answer = client.generate("find a stop", max_tokens=60, temperature=0.0, ignore_eos=True, stop=stop)
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


def test_refusals_name_the_numbers(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        with pytest.raises(errors.KvdError) as too_long:
            client.generate("x" * 9000, max_tokens=1)
        with pytest.raises(errors.KvdError) as bad:
            client.generate("x", temperature=-1.0)
    assert too_long.value.code == "prompt_too_long"
    assert "8192" in str(too_long.value)
    assert bad.value.code == "bad_request"
    assert "temperature" in str(bad.value)


def test_two_hundred_requests_that_share_fork_and_abort_leave_the_pool_whole(daemon: DaemonProcess) -> None:
    """Reference counts balance afterwards: nothing is in use, and everything that is not free is cached."""
    choose = random.Random(4)
    prompts = [SYSTEM * choose.randint(1, 3) + f" question {choose.randint(0, 40)}" for _ in range(200)]
    wrong: list[str] = []
    with daemon.client() as client, ThreadPoolExecutor(50) as pool:

        def ask(number: int) -> None:
            prompt, n = prompts[number], number % 3 + 1
            stream = client.generate(prompt, stream=True, n=n, max_tokens=30, temperature=0.8, seed=number, ignore_eos=True)
            if number % 4 == 0:
                next(stream)
                stream.close()
                return
            list(stream)
            for choice in stream.completion.choices:
                expected = expected_tokens(prompt.encode(), 30, sampling=SamplingParams(temperature=0.8, seed=number), choice=choice.index)
                if list(choice.token_ids) != expected:
                    wrong.append(f"request {number}, choice {choice.index}")

        list(pool.map(ask, range(200)))
        assert not wrong
        settled = threading.Event()
        for _ in range(1200):
            status = client.status()
            if status["requests"] == {"running": 0, "waiting": 0, "stalled": 0} and status["blocks"]["used"] == 0:
                settled.set()
                break
            threading.Event().wait(0.05)
        assert settled.is_set(), status
    blocks = status["blocks"]
    assert blocks["free"] + blocks["cached"] == blocks["total"]


def test_a_second_daemon_on_the_same_state_is_refused_by_name(daemon: DaemonProcess) -> None:
    other = DaemonProcess(daemon.root, "--listen", f"ipc://{daemon.root}/other.sock")
    assert other.wait_dead(30) == 75
    assert str(daemon.process.pid) in other.log()


def test_drain_finishes_what_runs_and_ends_cleanly(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            # its window is smaller than what is asked for: it is not over before it is read
            stream = client.generate("a long answer", stream=True, max_tokens=100, temperature=0.0, ignore_eos=True, window_tokens=8)
            tokens = list(next(stream).token_ids)
            process.process.terminate()
            while client.ping().state != "draining":
                time.sleep(0.01)
            assert len(tokens) <= 8
            tokens += [token for chunk in stream for token in chunk.token_ids]
            assert process.wait_dead() == 0
        assert stream.completion.finish_reason == "length"
        assert tokens == expected_tokens(b"a long answer", 100)
