"""The random requests of models that compute: a tiny one with a draft model and adapters for every change, SmolLM2 in float32 with the full tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import given, seed, settings
from lora_directories import module_sizes
from random_requests_world import Alone, Pressed, make_adapters
from request_drawing import Vocabulary, crowds
from request_rules import Facts
from test_random_requests import THE_SAME_EVERY_TIME
from tiny_models import CHAT_TEMPLATE, make_model, perturb
from wire_crowd import BreachError

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.socket, pytest.mark.store, pytest.mark.grammar]

TOOLS = "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
POOL = ("--max-model-len", "256", "--max-running", "8", "--max-choices", "4", "--max-tokens-per-step", "64", "--max-adapters", "2")
FLAGS = ("--dtype", "float32")


def press(
    root: Path,
    model: Sequence[str],
    draft: Path,
    adapters: Path,
    facts: Facts,
    vocabulary: Vocabulary,
    kv_memory: str,
    *,
    num_crowds: int,
    size: int,
    first_seed: int,
    tolerance: float,
) -> dict[str, int]:
    """Press crowds on a daemon with a draft model, and ask a roomy one without the same again; the counts."""
    room = ("--max-model-len", "256", "--kv-memory", "1GiB")
    alone = Alone(root / "alone", adapters, *model, *FLAGS, *room, fake=False, tolerance=tolerance)
    pressed_flags = (*model, *FLAGS, *POOL, "--kv-memory", kv_memory, "--draft-model", str(draft))
    with alone.process, Pressed(root / "kvd", facts, adapters, *pressed_flags, alone=alone, fake=False) as pressed:
        alone.wait_ready()
        pressed.process.wait_ready()
        with pressed.process.client() as client:
            pressed.facts = replace(facts, num_blocks=client.status()["blocks"]["total"])

        breaches: list[str] = []

        @seed(first_seed)
        @settings(THE_SAME_EVERY_TIME, max_examples=num_crowds)
        @given(crowds(vocabulary, size=size))
        def one(crowd):
            try:
                pressed.press(crowd, timeout_s=240)
            except BreachError as breach:
                breaches.append(str(breach))
            pressed.check_quiet()

        one()
        alone.close()
        print(dict(sorted(pressed.counts.items())))
        assert not breaches, "\n".join(breaches)
        assert pressed.counts["requests"] == num_crowds * size
        assert pressed.process.terminate() == 0
        return pressed.counts


def press_tiny(root: Path, *, num_crowds: int, first_seed: int, kernels: str = "native") -> dict[str, int]:
    """Crowds on a model of two layers, whose draft model is nearly the same."""
    model = make_model(root / "model", template=TOOLS + CHAT_TEMPLATE)
    sizes = module_sizes(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    return press(
        root,
        ("--model", str(model), "--threads", "1", "--kernels", kernels),
        perturb(model, root / "draft", 0.05),
        make_adapters(root / "adapters", sizes),
        Facts(num_blocks=0, max_model_len=256, vocab_size=320, eos=(1,), is_fake=False, has_draft=True),
        Vocabulary(likely=(1, *range(2, 320, 11)), eos=1, most_tokens=24, has_draft=True),
        "420KiB",
        num_crowds=num_crowds,
        size=30,
        first_seed=first_seed,
        tolerance=1e-4,
    )


def test_with_a_tiny_model(tmp_path: Path) -> None:
    counts = press_tiny(tmp_path, num_crowds=4, first_seed=4)
    assert counts["repeated"] > 50
    assert counts["accepted"] > 0


@pytest.mark.full
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_a_thousand_with_smollm2(tmp_path: Path, smollm2: Path) -> None:
    sizes = module_sizes(num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64)
    counts = press(
        tmp_path,
        ("--model", str(smollm2), "--kernels", "native"),
        smollm2,
        make_adapters(tmp_path / "adapters", sizes, size=0.02),
        Facts(num_blocks=0, max_model_len=256, vocab_size=49152, eos=(2,), is_fake=False, has_draft=True, takes_tools=False),
        Vocabulary(likely=(2, 28, 30, 198, 216, 253, 260, 282, 284, 288, 327, 1085), eos=2, most_tokens=12, has_draft=True),
        "72MiB",
        num_crowds=25,
        size=40,
        first_seed=5,
        tolerance=1e-3,
    )
    assert counts["repeated"] > 400
