"""Faults of the engine on real daemons: logits that are not finite, a step that raises, and a stop while torch and the weights are being loaded."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_models
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, errors
from struck import struck_at

from kvd.storage.tools import dump_store

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.socket, pytest.mark.store]

RULES = "Every visitor signs the ledger before the tour begins, and the museum closes at six. " * 4
FAST = ("--checkpoint-interval-s", "0.2")


def model_daemon(root: Path, model: Path, env: dict[str, str] | None = None) -> DaemonProcess:
    """A pool of 64 blocks, so that the blocks of requests that failed are soon those of others."""
    arguments = ("--model", str(model), "--dtype", "float32", "--kv-memory", "512KiB", "--threads", "1", *FAST)
    return DaemonProcess(root, *arguments, env=env, fake=False)


def greedy(client: Client, prompt: str | list[int], num_tokens: int = 24) -> tuple[int, ...]:
    return client.generate(prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True).token_ids


def stored_token_ids(root: Path) -> Iterator[int]:
    for entry in dump_store(root / "state"):
        yield from entry.get("token_ids", ())


def assert_checks_clean(root: Path) -> None:
    command = [sys.executable, "-m", "kvd", "store", "check", "--state-dir", str(root / "state")]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout + check.stderr


def test_only_the_request_that_meets_a_nan_fails(tmp_path: Path) -> None:
    """One row of the embedding is NaN. It is met in a prompt, in a pin, and as a token that was sampled; others run beside and after it unharmed.

    The whole model, which says what is right, leaves blocks with that token, and rightly: its daemon has a state of its own. A start takes what another
    fingerprint left from the index, but the log that held it goes some time after the first checkpoint, behind whatever the disk is at.
    """
    model = tiny_models.make_model(tmp_path / "model")
    whole = tmp_path / "whole"
    whole.mkdir()
    questions = [f"{RULES}Question {number}" for number in range(6)]
    with model_daemon(whole, model) as process:
        process.wait_ready()
        with process.client() as client:
            healthy = [greedy(client, question) for question in questions]
            known = {token for answer in healthy for token in answer}.union(*(client.tokenize(question) for question in questions))
            answers = {prompt: greedy(client, prompt, 48) for prompt in (f"Tell me of {number}" for number in range(20))}
            victim, poison = next(
                (prompt, token) for prompt, answer in answers.items() for token in answer[8:30] if token not in {*known, *answer[:8]}
            )
            client.checkpoint()
        process.kill()
    assert poison in set(stored_token_ids(whole)), "what was kept shows"
    told = answers[victim][: answers[victim].index(poison) + 1]

    tiny_models.make_model(model, poisoned_token_id=poison)
    with model_daemon(tmp_path, model) as process:
        process.wait_ready()
        with process.client() as client, ThreadPoolExecutor(9) as pool:
            ids = list(client.tokenize(RULES))

            def meet_it(suffix: int) -> None:
                with pytest.raises(errors.NonfiniteLogits):
                    greedy(client, [*ids, *[poison] * 3, *ids[: 40 + suffix]])

            failing = [pool.submit(meet_it, suffix) for suffix in range(3)]
            assert list(pool.map(lambda question: greedy(client, question), questions)) == healthy
            for each in failing:
                each.result()

            stream = client.generate(victim, stream=True, max_tokens=40, temperature=0.0, ignore_eos=True)
            seen: list[int] = []
            with pytest.raises(errors.NonfiniteLogits):
                seen.extend(token for chunk in stream for token in chunk.token_ids)
            assert tuple(seen) == told

            with pytest.raises(errors.NonfiniteLogits):
                client.pin("poisoned", [*ids, poison, *ids])
            assert client.prefixes()["pins"] == []
            for salt in range(8):  # each goes through blocks that held NaNs, or may have
                answer = client.generate(questions[0], max_tokens=24, temperature=0.0, ignore_eos=True, cache_salt=b"%d" % salt)
                assert (answer.usage.cached_tokens, answer.token_ids) == (0, healthy[0])
            blocks = client.status()["blocks"]
            assert (blocks["used"], blocks["free"] + blocks["cached"]) == (0, blocks["total"])
            client.checkpoint()
        process.kill()
    stored = set(stored_token_ids(tmp_path))
    assert set(ids) <= stored
    assert poison not in stored
    assert_checks_clean(tmp_path)
    with model_daemon(tmp_path, model) as process:
        process.wait_ready()
        with process.client() as client:
            assert [greedy(client, question) for question in questions] == healthy
            meet_it_again = client.generate(victim, max_tokens=len(told), temperature=0.0, ignore_eos=True)
            assert meet_it_again.token_ids == told
        process.kill()


def test_a_step_that_raises_ends_its_requests_and_the_daemon_comes_back_warm(tmp_path: Path) -> None:
    """Exit 70. What was running fails with engine_error, what still waited is answered by the next daemon, and nothing of the failed step is kept."""
    with DaemonProcess(tmp_path, *FAST) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES)
        assert process.terminate() == 0
    fresh = "A prompt that the failing step was to compute, of four blocks and more. "
    waited: list[tuple[int, ...]] = []
    with DaemonProcess(
        tmp_path, *FAST, "--max-running", "1", "--fake-step-ms", "100", env={"KVD_FAILPOINTS": "executor.step=raise@6"}
    ) as process:
        process.wait_ready()
        with process.client() as client:
            stream = client.generate(fresh, stream=True, max_tokens=100, temperature=0.0, ignore_eos=True)
            seen = list(next(stream).token_ids)
            waiting = threading.Thread(target=lambda: waited.append(greedy(client, RULES + "Who waits?", 8)))
            waiting.start()
            with pytest.raises(errors.EngineError) as failed:
                seen.extend(token for chunk in stream for token in chunk.token_ids)
            assert failed.value.code == "engine_error"
            assert seen == expected_tokens(fresh.encode(), 5)
            assert process.wait_dead() == 70
            assert "engine_error" in process.log()
            with DaemonProcess(tmp_path, *FAST) as restarted:
                waiting.join(60)
                assert waited == [tuple(expected_tokens((RULES + "Who waits?").encode(), 8))]
                restarted.wait_ready()
                status = client.status()
                assert status["store"]["failed_starts"] == 0, "an exception is no death"
                answer = client.generate(fresh, max_tokens=8, temperature=0.0, ignore_eos=True)
                assert list(answer.token_ids) == expected_tokens(fresh.encode(), 8)
                assert {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]} == {"rules": "held"}
                assert status["rehydration"]["blocks"] >= len(RULES) // 16
                assert restarted.terminate() == 0
    assert_checks_clean(tmp_path)


def test_a_first_step_that_raises_leaves_nothing(tmp_path: Path) -> None:
    prompt = "Nothing of this prompt was ever computed, so nothing of it is known. " * 3
    with DaemonProcess(tmp_path, *FAST, env={"KVD_FAILPOINTS": "executor.step=raise"}) as process:
        process.wait_ready()
        with process.client() as client, pytest.raises(errors.EngineError):
            greedy(client, prompt)
        assert process.wait_dead() == 70
    assert list(stored_token_ids(tmp_path)) == []
    assert_checks_clean(tmp_path)


def test_stopped_while_the_model_is_opened(tmp_path: Path) -> None:
    """In the middle of importing torch, where its C++ ends the process over any exception, or after it: an exit of 0, and no failed start."""
    model = tiny_models.make_model(tmp_path / "model")
    for place in ("numpy", "_c10d_init", "_multiprocessing_init", "kvd.executor.runner"):
        with model_daemon(tmp_path, model, env=struck_at(tmp_path, place)) as process:
            assert process.wait_dead(30) == 0, place
            assert "stopped_during_start" in process.log()
            assert not any(word in process.log() for word in ("Traceback", "terminate called", "Fatal Python error")), place
        assert not (tmp_path / "state" / "starting").exists()


@pytest.mark.model
def test_stopped_while_weights_are_loading(tmp_path: Path, smollm2: Path) -> None:
    with DaemonProcess(tmp_path, "--model", str(smollm2), "--kv-memory", "64MiB", "--threads", "1", fake=False) as process:
        deadline_s = time.monotonic() + 60
        while "loading weights" not in process.log():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert process.terminate(30) == 0
    assert not (tmp_path / "state" / "starting").exists()
