"""A daemon that was killed comes back on the same model, or on another one that is not the one its bytes were computed with.

One life fills a state directory: pins made of messages, of text and of ids, and a hot prefix. Each test goes on from a copy of it, with one thing
changed. Bytes of another fingerprint are never used; pins are computed again; answers are those of a daemon that never knew the other model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from daemon_process import DaemonProcess
from kvd_client import Client
from kvd_client.results import Usage

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.socket, pytest.mark.store]

RULES = "Every visitor signs the ledger before the tour begins, and the museum closes at six. " * 4
TEXT = "The tour begins at ten in the great hall, under the lamp that the founder hung. " * 4
HOT = "A note on the door: the museum is closed on the first day of every month, all day. " * 4
IDS = [2 + (7 * index) % 200 for index in range(75)]
PINS = {"rules", "text", "ids"}
LONG_ROPE = {
    "max_position_embeddings": 800,
    "rope_scaling": {
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 400,
        "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
        "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
    },
}


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy tokens and usage by prompt."""

    tokens: dict[str, tuple[int, ...]]
    usage: dict[str, Usage]

    def sources(self, name: str) -> tuple[int, int, int]:
        """Cached, restored and recomputed tokens of a prompt."""
        usage = self.usage[name]
        return usage.cached_tokens, usage.restored_tokens, usage.recomputed_tokens


class Models:
    """The model's directory, rewritten in place, and daemons on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "model"
        tiny_models.make_model(self.path)

    def daemon(self, root: Path, *arguments: str, dtype: str = "float32", env: dict[str, str] | None = None) -> DaemonProcess:
        root.mkdir(exist_ok=True)
        flags = ("--model", str(self.path), "--dtype", dtype, "--kv-memory", "2MiB", "--threads", "1")
        return DaemonProcess(root, *flags, *arguments, env=env, fake=False)

    def answers(self, root: Path, *arguments: str, dtype: str = "float32", expected_pins: set[str] = PINS) -> Answers:
        """What a daemon on ``root``'s state answers; it is killed afterwards."""
        with self.daemon(root, *arguments, dtype=dtype) as process:
            process.wait_ready()
            with process.client() as client:
                assert {pin["name"] for pin in client.prefixes()["pins"] if pin["state"] == "held"} == expected_pins
                found = ask(client)
                client.checkpoint()
            process.kill()
        return found

    def fresh_answers(self, root: Path, *arguments: str, dtype: str = "float32") -> Answers:
        """The same of a daemon that begins with nothing and gets the pins from a client."""
        with self.daemon(root, *arguments, dtype=dtype) as process:
            process.wait_ready()
            with process.client() as client:
                pin_everything(client)
                found = ask(client)
            process.kill()
        return found


def pin_everything(client: Client) -> dict[str, int]:
    """The pins; their tokens by name."""
    made = {
        "rules": client.pin("rules", messages=[{"role": "system", "content": RULES}]),
        "text": client.pin("text", TEXT),
        "ids": client.pin("ids", IDS),
    }
    assert {name: pin.details["durable"] for name, pin in made.items()} == dict.fromkeys(made, "recipe+bytes")
    return {name: pin.details["tokens"] for name, pin in made.items()}


def ask(client: Client) -> Answers:
    """One question on each pin and on the hot prefix."""
    options: Any = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    completions = {
        "rules": client.chat([{"role": "system", "content": RULES}, {"role": "user", "content": "When?"}], **options),
        "text": client.generate(TEXT + "And then", **options),
        "ids": client.generate([*IDS, 5, 6, 7, 8, 9, 10], **options),
        "hot": client.generate(HOT + "So what", **options),
    }
    return Answers(
        {name: answer.token_ids for name, answer in completions.items()}, {name: answer.usage for name, answer in completions.items()}
    )


@dataclass(frozen=True, slots=True)
class FirstLife:
    """What the life before the kill left: models, state, its answers, and the tokens of what it pinned or used often."""

    models: Models
    root: Path
    answers: Answers
    prefix_tokens: Mapping[str, int]
    fingerprint: str

    def copy(self, root: Path) -> Path:
        """A root with a copy of the state, for a life of its own."""
        shutil.copytree(self.root / "state", root / "state")
        return root


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> FirstLife:
    root = tmp_path_factory.mktemp("first")
    models = Models(root)
    with models.daemon(root) as process:
        process.wait_ready()
        with process.client() as client:
            prefix_tokens = pin_everything(client)
            for question in ("Who", "Why"):
                client.generate(HOT + question, max_tokens=4, temperature=0.0)
            answers = ask(client)
            client.checkpoint()
            fingerprint = client.status()["fingerprint"]
        process.kill()
    assert answers.usage["hot"].cached_tokens > 64
    return FirstLife(models, root, answers, {**prefix_tokens, "hot": answers.usage["hot"].cached_tokens}, fingerprint)


@pytest.fixture(autouse=True)
def original_model(first: FirstLife) -> None:
    """Each test begins with the model of the first life."""
    tiny_models.make_model(first.models.path)


def assert_pins_recomputed(found: Answers, prefix_tokens: Mapping[str, int], names: set[str] = PINS) -> None:
    """Nothing came from disk; what was pinned was computed before anybody asked."""
    for name in names:
        cached, restored, recomputed = found.sources(name)
        assert restored == 0, name
        assert cached >= recomputed >= prefix_tokens[name] > 0, name
    assert found.usage["hot"].restored_tokens == 0


def test_same_model_is_restored(first: FirstLife, tmp_path: Path) -> None:
    found = first.models.answers(first.copy(tmp_path))
    assert found.tokens == first.answers.tokens
    for name, num_tokens in first.prefix_tokens.items():
        cached, restored, recomputed = found.sources(name)
        assert restored >= num_tokens, name
        assert (cached, recomputed) == (restored, 0), name


def test_other_weights_under_the_same_name_and_back(first: FirstLife, tmp_path: Path) -> None:
    """The way back is a cold start for everything but the pins: a start forgets what other fingerprints left."""
    root = first.copy(tmp_path)
    tiny_models.make_model(first.models.path, seed=1)
    found = first.models.answers(root)
    assert_pins_recomputed(found, first.prefix_tokens)
    assert found.sources("hot") == (0, 0, 0)
    assert found.tokens == first.models.fresh_answers(tmp_path / "fresh").tokens
    assert all(found.tokens[name] != first.answers.tokens[name] for name in found.tokens)

    tiny_models.make_model(first.models.path)
    again = first.models.answers(root)
    assert again.tokens == first.answers.tokens
    assert_pins_recomputed(again, first.prefix_tokens)
    assert again.sources("hot") == (0, 0, 0)


def test_other_dtype(first: FirstLife, tmp_path: Path) -> None:
    found = first.models.answers(first.copy(tmp_path), dtype="bfloat16")
    assert_pins_recomputed(found, first.prefix_tokens)
    assert found.tokens == first.models.fresh_answers(tmp_path / "fresh", dtype="bfloat16").tokens


def test_other_block_size(first: FirstLife, tmp_path: Path) -> None:
    """And a restart at that size restores the pins, whose blocks are found by it."""
    root = first.copy(tmp_path)
    found = first.models.answers(root, "--block-size-tokens", "8")
    assert_pins_recomputed(found, first.prefix_tokens)
    assert found.tokens == first.answers.tokens
    again = first.models.answers(root, "--block-size-tokens", "8")
    assert again.tokens == first.answers.tokens
    for name in PINS:
        cached, restored, recomputed = again.sources(name)
        assert (restored, recomputed) == (cached, 0), name


def test_a_shorter_maximum_length_changes_nothing(first: FirstLife, tmp_path: Path) -> None:
    found = first.models.answers(first.copy(tmp_path), "--max-model-len", "300")
    assert found.tokens == first.answers.tokens
    for name in first.prefix_tokens:
        cached, restored, recomputed = found.sources(name)
        assert (restored, recomputed) == (cached, 0), name


def test_a_shorter_maximum_length_under_a_rope_that_depends_on_it(first: FirstLife, tmp_path: Path) -> None:
    tiny_models.make_model(first.models.path, **LONG_ROPE)
    root = tmp_path / "long"
    long = first.models.fresh_answers(root)
    found = first.models.answers(root, "--max-model-len", "300")
    assert_pins_recomputed(found, first.prefix_tokens)
    assert found.tokens != long.tokens, "the angles are those of short sequences now"


def test_changed_chat_template(first: FirstLife, tmp_path: Path) -> None:
    """Messages are rendered anew; text gives the same ids as before; ids alone may mean something else now, and wait for their owner."""
    tiny_models.write_template(first.models.path, "Be brief.\n" + tiny_models.CHAT_TEMPLATE)
    root = first.copy(tmp_path)
    with first.models.daemon(root) as process:
        process.wait_ready()
        with process.client() as client:
            pins = {pin["name"]: pin for pin in client.prefixes()["pins"]}
            assert {name: pin["state"] for name, pin in pins.items()} == {"rules": "held", "text": "held", "ids": "not_held"}
            assert "tokenizer" in pins["ids"]["reason"]
            found = ask(client)
            assert client.pin("ids", IDS).details["durable"] == "recipe+bytes"
            assert {pin["name"]: (pin["state"], pin["reason"]) for pin in client.prefixes()["pins"]}["ids"] == ("held", "")
        process.kill()
    cached, restored, recomputed = found.sources("rules")
    assert recomputed >= first.prefix_tokens["rules"]
    assert (cached, restored) == (recomputed, 0)
    cached, restored, recomputed = found.sources("text")
    assert (restored, recomputed) == (cached, 0)
    assert restored >= first.prefix_tokens["text"]
    assert found.tokens["text"] == first.answers.tokens["text"]
    assert found.tokens["ids"] == first.answers.tokens["ids"]
    assert found.usage["rules"].prompt_tokens > first.answers.usage["rules"].prompt_tokens


def test_a_template_that_refuses_the_messages_now(first: FirstLife, tmp_path: Path) -> None:
    tiny_models.write_template(first.models.path, "{{ raise_exception('this model takes no system prompt') }}")
    with first.models.daemon(first.copy(tmp_path)) as process:
        process.wait_ready()
        with process.client() as client:
            pins = {pin["name"]: pin for pin in client.prefixes()["pins"]}
        process.kill()
    assert {name: pin["state"] for name, pin in pins.items()} == {"rules": "not_held", "text": "held", "ids": "not_held"}
    assert "this model takes no system prompt" in pins["rules"]["reason"]


def test_changed_tokenizer(first: FirstLife, tmp_path: Path) -> None:
    tiny_models.write_tokenizer(first.models.path, corpus=("nothing of all this was said or written anywhere before",))
    found = first.models.answers(first.copy(tmp_path), expected_pins={"rules", "text"})
    for name in ("rules", "text"):
        cached, restored, recomputed = found.sources(name)
        assert (recomputed, restored) == (cached, 0), name
        assert recomputed > 0, name
        assert found.usage[name].prompt_tokens != first.answers.usage[name].prompt_tokens, name
    assert found.tokens["ids"] == first.answers.tokens["ids"]


def test_a_dated_template_moves_the_pin_to_another_day(first: FirstLife, tmp_path: Path) -> None:
    """Nothing has changed but the day that the template sees: the pin is that of the new day's chats."""
    tiny_models.write_template(first.models.path, tiny_models.DATED_TEMPLATE)
    with first.models.daemon(tmp_path, "--template-date", "2026-01-31") as process:
        process.wait_ready()
        with process.client() as client:
            num_tokens = pin_everything(client)["rules"]
        process.kill()
    found = first.models.answers(tmp_path, "--template-date", "2026-02-01")
    cached, restored, recomputed = found.sources("rules")
    assert cached >= num_tokens
    assert recomputed > restored, "only what stands before the date is shared"
    assert cached == restored + recomputed


def kept(root: Path) -> dict[str, list[dict[str, Any]]]:
    """What a stopped daemon's store keeps, by kind."""
    command = [sys.executable, "-m", "kvd", "store", "dump", "--state-dir", str(root / "state")]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        entry = json.loads(line)
        found.setdefault(entry["kind"], []).append(entry)
    return found


def test_another_version_of_the_kv_format(first: FirstLife, tmp_path: Path) -> None:
    """As an upgrade that lays a block's bytes out differently: nothing of the old ones is read."""
    root = first.copy(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from kvd.executor.models import fingerprint\nfingerprint.KV_FORMAT_VERSION += 1\n", encoding="utf-8"
    )
    with first.models.daemon(root, env={"PYTHONPATH": str(tmp_path / "site")}) as process:
        process.wait_ready()
        with process.client() as client:
            assert client.status()["fingerprint"] != first.fingerprint
            found = ask(client)
        process.kill()
    assert_pins_recomputed(found, first.prefix_tokens)
    assert found.tokens == first.answers.tokens


def test_what_another_model_left_leaves_the_disk(first: FirstLife, tmp_path: Path) -> None:
    """Namespaces, nodes and bytes of the old fingerprint are gone with the first checkpoint; the pins' new ones are there."""
    root = first.copy(tmp_path)
    before = kept(root)
    assert {entry["fingerprint"] for entry in before["namespace"]} == {first.fingerprint}
    tiny_models.make_model(first.models.path, seed=1)
    with first.models.daemon(root) as process:
        process.wait_ready()
        with process.client() as client:
            client.checkpoint()
            new = client.status()["fingerprint"]
        process.kill()
    after = kept(root)
    assert {entry["fingerprint"] for entry in after["namespace"]} == {new} != {first.fingerprint}
    old_hashes = {entry["hash"] for entry in before["block"]}
    assert old_hashes
    assert {entry["hash"] for entry in after["block"]}.isdisjoint(old_hashes)
    assert {entry["hash"] for entry in after["node"]}.isdisjoint({entry["hash"] for entry in before["node"]})
    assert len(after["block"]) >= sum(tokens // 16 for name, tokens in first.prefix_tokens.items() if name in PINS) - len(PINS)


def test_pins_that_the_budget_left_over_are_computed_behind_the_first_users(first: FirstLife, tmp_path: Path) -> None:
    root = first.copy(tmp_path)
    tiny_models.make_model(first.models.path, seed=1)
    with first.models.daemon(root, "--rehydrate-timeout-s", "0") as process:
        process.wait_ready()
        with process.client() as client:
            deadline_s = time.monotonic() + 30
            while any(pin["state"] != "held" for pin in client.prefixes()["pins"]):
                assert time.monotonic() < deadline_s, client.prefixes()
                time.sleep(0.05)
            found = ask(client)
        process.kill()
    assert_pins_recomputed(found, first.prefix_tokens)
