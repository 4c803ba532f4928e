"""The power fails in the instant in which a client reads its pin's acknowledgement: of a real daemon, what was synced until then is left, and nothing else.

The next daemon, started on that, holds the pin and serves it from cache, restored or computed again before READY, with the right tokens.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from power_harness import compile_recorder, recording, scratch
from replay import Disk, Op, mark, materialise, read_log

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

FLAGS = ("--wal-segment-bytes", "64KiB", "--wal-max-bytes", "1MiB", "--kv-memory", "4MiB")
BLOCK = 16
PINS_PER_LIFE = 10


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = scratch(tmp_path)
    yield place
    shutil.rmtree(place)


def record_pins(folder: Path, texts: dict[str, str]) -> Path:
    """A daemon's life in which each of ``texts`` is pinned; the log has a mark where its acknowledgement was read."""
    root, log = folder / "recorded", folder / "io.log"
    root.mkdir()
    with DaemonProcess(root, *FLAGS, env=recording(compile_recorder(folder), root, log)) as process:
        process.wait_ready()
        with process.client() as client:
            for name, text in texts.items():
                client.pin(name, text)
                mark(log, acknowledged=name)
        process.kill()
    return log


def cuts(log: Path) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """At each acknowledgement: whose it is, and what had been synced."""
    disk = Disk(is_ignored=lambda path: path.endswith(("/lock", "/lock.mdb")))
    for record in read_log(log):
        if record.op is Op.MARK:
            yield json.loads(record.data)["acknowledged"], disk.tree()
        else:
            disk.play(record)


def held_after_the_cut(root: Path, name: str, text: str, seed: int) -> bool:
    with DaemonProcess(root, *FLAGS) as process:
        process.wait_ready()
        with process.client() as client:
            pins = {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]}
            prompt = f"{text} and then {seed}?"
            answer = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == expected_tokens(prompt.encode(), 8)
            damage = client.status()["store"]["damage"]
        assert process.terminate() == 0
    assert damage == []
    return pins.get(name) == "held" and answer.usage.cached_tokens >= len(text) // BLOCK * BLOCK


def texts_of(rng: random.Random, count: int) -> dict[str, str]:
    words = ("rules", "ledger", "curator", "tour", "visitor", "painting", "signs", "never")
    return {f"pin-{index}": " ".join(rng.choices(words, k=rng.randint(4, 80))) for index in range(count)}


def cut_at_acknowledgements(folder: Path, count: int, seed: int) -> int:
    """How many of ``count`` pins are held after the power failed as their acknowledgement was read."""
    num_held = 0
    for life in range(-(-count // PINS_PER_LIFE)):
        place = folder / f"life.{life}"
        place.mkdir()
        texts = texts_of(random.Random(f"{seed}:{life}"), min(PINS_PER_LIFE, count - life * PINS_PER_LIFE))
        for name, tree in cuts(record_pins(place, texts)):
            root = place / name
            root.mkdir()
            materialise(tree, root)
            num_held += held_after_the_cut(root, name, texts[name], seed)
            shutil.rmtree(root)
        shutil.rmtree(place)
    print(f"held after a power cut as the acknowledgement was read: {num_held} of {count}, seed {seed}")
    return num_held


def test_an_acknowledged_pin_outlives_the_power(folder):
    assert cut_at_acknowledgements(folder, 5, seed=1) == 5


@pytest.mark.full
def test_a_hundred_acknowledged_pins_outlive_the_power(folder):
    assert cut_at_acknowledgements(folder, 100, seed=2) == 100
