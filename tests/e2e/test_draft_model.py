"""A real daemon with a draft model: the same answers, fewer steps, and the draft's part of a restored prefix is computed when it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from kvd_client import Client, Completion
from tiny_models import make_model, perturb

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.socket, pytest.mark.store]

PROMPT = "Every visitor signs the ledger before the tour begins, and the museum closes at six. " * 3
FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB", "--write-policy", "through", "--checkpoint-interval-s", "0.1")


KINDS = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}, {"temperature": 1.0, "top_p": 0.9, "seed": 5})
MOST_TURNS = 60


def ask(client: Client, mode: str, **options):
    return client.generate(PROMPT, max_tokens=24, ignore_eos=True, speculation=mode, **options)


def ask_until_drafted(client: Client, expected: list[tuple[int, ...]]) -> tuple[Completion, int, int]:
    """With drafts until some of them were accepted and some were not; the first answer, and how many of both.

    A draft of the target's own size doesn't pay, which is soon noticed, the sooner the busier the machine: not every request drafts. It is tried anew when that is
    some time ago.
    """
    first, drafted, accepted = None, 0, 0
    for _ in range(MOST_TURNS):
        answers = [ask(client, "draft", **kind) for kind in KINDS]
        assert [answer.token_ids for answer in answers] == expected
        first = first or answers[0]
        drafted += sum(answer.usage.drafted_tokens or 0 for answer in answers)
        accepted += sum(answer.usage.accepted_tokens or 0 for answer in answers)
        if drafted > accepted > 0:
            return first, drafted, accepted
    pytest.fail(f"{drafted} tokens were drafted and {accepted} accepted in {MOST_TURNS} turns")


def serve(root: Path, model: Path, *flags: str) -> DaemonProcess:
    return DaemonProcess(root, "--model", str(model), *FLAGS, *flags, fake=False)


def test_drafts_change_no_answer_and_survive_a_restart_without_bytes_of_their_own(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target")
    draft = perturb(target, tmp_path / "draft", 0.05)
    with serve(tmp_path, target, "--draft-model", str(draft)) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            told = client.status()["draft"]
            assert (told["model"], told["block_bytes"]) == ("draft", client.stats()["executor"]["block_bytes"])
            assert client.status()["blocks"]["total"] == ((8 << 20) - 4096) // (2 * told["block_bytes"])
            expected = [ask(client, "off", **kind).token_ids for kind in KINDS]
            _, drafted, accepted = ask_until_drafted(client, expected)
            scheduler = client.stats()["scheduler"]
            assert (scheduler["drafted_tokens"], scheduler["accepted_tokens"]) == (drafted, accepted)
            client.checkpoint()
    with serve(tmp_path, target, "--draft-model", str(draft)) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            first, _, _ = ask_until_drafted(client, expected)
            assert first.usage.restored_tokens > 32
    with serve(tmp_path, target) as daemon:  # the blocks are the target's, whoever drafted
        daemon.wait_ready()
        with daemon.client() as client:
            assert "draft" not in client.status()
            alone = ask(client, "off", **KINDS[0])
            assert (alone.token_ids, alone.usage.restored_tokens > 32) == (expected[0], True)


def test_a_draft_of_other_tokens_is_refused_at_the_start(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target")
    other = make_model(tmp_path / "other", corpus=("zebras quickly jump over the lazy fox", "pack my box with five dozen jugs"))
    with serve(tmp_path, target, "--draft-model", str(other)) as daemon:
        assert daemon.process.wait(60) == 78
        assert "another vocabulary than the model's" in daemon.log()
        assert "flag --draft-model" in daemon.log()
