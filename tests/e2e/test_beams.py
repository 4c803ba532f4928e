"""Beam search and best_of over a real daemon on the fake executor, with both clients and the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from beam_world import World
from daemon_process import DaemonProcess
from kvd_client import AsyncClient, Completion, errors

from kvd.executor.fake import EOS_TOKEN_ID
from kvd.types import BeamSearch, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

PROMPT = "a prompt of more than one block, for several beams"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("kvd")) as process:
        process.wait_ready()
        yield process


def expected(**options: Any) -> tuple[list[tuple[int, ...]], list[Any]]:
    """What a lone scheduler says: tokens and ends of the choices."""
    world = World(block_size=16, max_model_len=1000)
    request_id = world.submit(PROMPT.encode(), stop_token_ids=(EOS_TOKEN_ID,), **options)
    world.finish()
    ends = world.ends[request_id]
    return [tokens for tokens, _ in world.said(request_id)], [ends[choice] for choice in sorted(ends)]


def check(answer: Completion, tokens: list[tuple[int, ...]], ends: list[Any]) -> None:
    assert [choice.token_ids for choice in answer.choices] == tokens
    assert [choice.score for choice in answer.choices] == [end.score for end in ends]
    assert [choice.cumulative_logprob for choice in answer.choices] == [end.cumulative_logprob for end in ends]
    assert [choice.finish_reason for choice in answer.choices] == [end.reason for end in ends]
    assert answer.usage.completion_tokens == sum(map(len, tokens))


def test_beams_come_best_first_whole_and_as_a_stream(daemon: DaemonProcess) -> None:
    beam = BeamSearch(4, 0.5, None)
    wanted = expected(beam=beam, num_choices=3, max_tokens=200, sampling=SamplingParams(temperature=0.0))
    options: dict[str, Any] = {"beam_width": 4, "n": 3, "max_tokens": 200, "length_penalty": 0.5, "early_stopping": "never"}
    with daemon.client() as client:
        whole = client.generate(PROMPT, **options)
        stream = client.generate(PROMPT, stream=True, window_tokens=8, **options)
        pieces = list(stream)
    check(whole, *wanted)
    check(stream.completion, *wanted)
    assert "".join(piece.text for piece in pieces if piece.choice == 0) == whole.text
    assert whole.choices[0].score == max(choice.score for choice in whole.choices if choice.score is not None)

    async def ask() -> Completion:
        async with AsyncClient(daemon.endpoint) as client:
            return await client.generate(PROMPT, **options)

    check(asyncio.run(ask()), *wanted)


def test_long_answers_with_many_log_probabilities_come_in_pieces(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        answer = client.generate(PROMPT, beam_width=2, n=2, max_tokens=600, logprobs=20, ignore_eos=True)
    for choice in answer.choices:
        assert len(choice.token_ids) == len(choice.logprobs) == 600
        assert all(len(entry.top) == 20 for entry in choice.logprobs)
        assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in choice.logprobs))
        assert choice.score == pytest.approx(choice.cumulative_logprob / 600)


def test_the_best_of_several_samples(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        everything = client.generate(PROMPT, n=5, max_tokens=40, seed=3, logprobs=0)
        best = client.generate(PROMPT, n=2, best_of=5, max_tokens=40, seed=3)
    ranked = sorted(everything.choices, key=lambda choice: -(choice.cumulative_logprob or 0.0))
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.cumulative_logprob for choice in best.choices] == [choice.cumulative_logprob for choice in ranked[:2]]
    assert best.choices[0].logprobs == ()
    assert best.choices[0].score is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"beam_width": 2, "stop": "e"}, "give stop_token_ids instead"),
        ({"best_of": 2, "stop": "e"}, "give stop_token_ids instead"),
        ({"beam_width": 2, "n": 3}, "of 2 beams"),
        ({"beam_width": 2, "temperature": 0.7}, "draws nothing"),
        ({"beam_width": 200}, "width"),
        ({"best_of": 2, "temperature": 0.0}, "would be the same"),
        ({"length_penalty": 2.0}, "give beam_width"),
        ({"beam_width": 2, "early_stopping": "soon"}, "'never'"),
    ],
)
def test_what_does_not_go_together_is_refused(daemon: DaemonProcess, options: dict[str, Any], reason: str) -> None:
    with daemon.client() as client, pytest.raises(errors.BadRequest, match=reason):
        client.generate(PROMPT, max_tokens=4, **options)


def test_the_command_line_prints_scores(daemon: DaemonProcess) -> None:
    flags = ("--max-tokens", "12", "--beam-width", "3", "--n", "2", "--length-penalty", "2", "--early-stopping", "true", "--json")
    command = [sys.executable, "-m", "kvd", "generate", "--connect", daemon.endpoint, "--prompt", PROMPT, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    choices = json.loads(done.stdout)["choices"]
    wanted, ends = expected(beam=BeamSearch(3, 2.0, True), num_choices=2, max_tokens=12, sampling=SamplingParams(temperature=0.0))
    assert [tuple(choice["token_ids"]) for choice in choices] == wanted
    assert [choice["score"] for choice in choices] == [end.score for end in ends]
    command = [*command[: -len(flags)], "--max-tokens", "5", "--best-of", "3", "--seed", "1"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_stats_tell_what_sharing_saves(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        before = client.stats()["scheduler"]
        client.generate(PROMPT * 4, beam_width=4, max_tokens=20)
        after = client.stats()["scheduler"]
    blocks, saved = (after[name] - before[name] for name in ("beam_blocks", "beam_blocks_saved"))
    assert 0.6 < saved / blocks < 0.75
