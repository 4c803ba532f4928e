"""A real daemon with a draft model: the same answers, fewer steps, and the draft's part of a restored prefix is computed when it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from kvd_client import Client
from tiny_models import make_model, perturb

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.socket, pytest.mark.store]

PROMPT = "Every visitor signs the ledger before the tour begins, and the museum closes at six. " * 3
FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB", "--write-policy", "through", "--checkpoint-interval-s", "0.1")


def ask(client: Client, mode: str, **options):
    return client.generate(PROMPT, max_tokens=24, ignore_eos=True, speculation=mode, **options)


def serve(root: Path, model: Path, *flags: str) -> DaemonProcess:
    return DaemonProcess(root, "--model", str(model), *FLAGS, *flags, fake=False)


def test_drafts_change_no_answer_and_survive_a_restart_without_bytes_of_their_own(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target")
    draft = perturb(target, tmp_path / "draft", 0.05)
    kinds = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}, {"temperature": 1.0, "top_p": 0.9, "seed": 5})
    with serve(tmp_path, target, "--draft-model", str(draft)) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            told = client.status()["draft"]
            assert (told["model"], told["block_bytes"]) == ("draft", client.stats()["executor"]["block_bytes"])
            assert client.status()["blocks"]["total"] == ((8 << 20) - 4096) // (2 * told["block_bytes"])
            expected = [ask(client, "off", **kind).token_ids for kind in kinds]
            answers = [ask(client, "draft", **kind) for kind in kinds]
            assert [answer.token_ids for answer in answers] == expected
            # a draft of the target's own size doesn't pay, which is soon noticed: not every request need draft
            drafted, accepted = (
                sum(getattr(answer.usage, name) or 0 for answer in answers) for name in ("drafted_tokens", "accepted_tokens")
            )
            assert drafted > accepted > 0
            scheduler = client.stats()["scheduler"]
            assert (scheduler["drafted_tokens"], scheduler["accepted_tokens"]) == (drafted, accepted)
            client.checkpoint()
    with serve(tmp_path, target, "--draft-model", str(draft)) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            again = [ask(client, "draft", **kind) for kind in kinds]
            assert [answer.token_ids for answer in again] == expected
            assert again[0].usage.restored_tokens > 32
            assert sum(answer.usage.accepted_tokens or 0 for answer in again) > 0
    with serve(tmp_path, target) as daemon:  # the blocks are the target's, whoever drafted
        daemon.wait_ready()
        with daemon.client() as client:
            assert "draft" not in client.status()
            alone = ask(client, "off", **kinds[0])
            assert (alone.token_ids, alone.usage.restored_tokens > 32) == (expected[0], True)


def test_a_draft_of_other_tokens_is_refused_at_the_start(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target")
    other = make_model(tmp_path / "other", corpus=("zebras quickly jump over the lazy fox", "pack my box with five dozen jugs"))
    with serve(tmp_path, target, "--draft-model", str(other)) as daemon:
        assert daemon.process.wait(60) == 78
        assert "another vocabulary than the model's" in daemon.log()
        assert "flag --draft-model" in daemon.log()
