"""The real SmolLM2 under constraints: every answer validates, whatever it would have said, in a pool so small that requests preempt each other."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from kvd_client.results import Completion
from schema_check import matches

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.socket, pytest.mark.store, pytest.mark.torch, pytest.mark.grammar]

BLOCK_BYTES = 30 * 2 * 16 * 3 * 64 * 4
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_married": {"type": "boolean"},
        "children": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "is_married", "children"],
    "additionalProperties": False,
}
RECIPE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "difficulty": {"enum": ["easy", "medium", "hard"]},
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 2, "maxItems": 3},
        "rating": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 5}, {"type": "null"}]},
    },
    "required": ["title", "difficulty", "steps", "rating"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "leaf": {
            "type": "object",
            "properties": {"leaf": {"type": "string", "maxLength": 6}},
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {
        "left": {"$ref": "#/$defs/leaf"},
        "right": {"$ref": "#/$defs/leaf"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    },
    "required": ["left", "right", "code"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
WORDS = ["red", "dark red", "green", "blue"]
MOVE = 'start: MOVE ("," " "? MOVE){1,3}\nMOVE: /[a-h][1-8]-[a-h][1-8]/\n'
NUM_CASES = 100


def case(number: int) -> tuple[str, dict[str, Any], Any]:
    """(question, constraint, whether a text is right); no two of the hundred are alike, for seeds differ."""
    schemas = {"Describe a person as JSON.": PERSON, "Give me a short recipe as JSON.": RECIPE, "A tree of two leaves, please.": TREE}
    kinds: list[tuple[str, dict[str, Any], Any]] = [
        *(
            (question, {"json_schema": schema}, lambda text, schema=schema: matches(json.loads(text), schema))
            for question, schema in schemas.items()
        ),
        ("When was the first man on the moon?", {"regex": DATE}, lambda text: re.fullmatch(DATE, text) is not None),
        ("What is the colour of blood?", {"choice": WORDS}, lambda text: text in WORDS),
        (
            "Some moves of a chess game:",
            {"lark": MOVE},
            lambda text: re.fullmatch(r"[a-h][1-8]-[a-h][1-8](, ?[a-h][1-8]-[a-h][1-8]){1,3}", text) is not None,
        ),
    ]
    return kinds[number % len(kinds)]


@pytest.fixture(scope="module")
def daemon(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    flags = ("--model", str(smollm2), "--kv-memory", str(16 * BLOCK_BYTES), "--dtype", "float32", "--max-model-len", "256", "--no-persist")
    with DaemonProcess(tmp_path_factory.mktemp("kvd"), *flags, fake=False) as process:
        process.wait_ready()
        yield process
        assert process.terminate() == 0


def ask(daemon: DaemonProcess, number: int, **more: Any) -> tuple[int, Completion]:
    question, constraint, _ = case(number)
    options: dict[str, Any] = {"max_tokens": 200, "temperature": (0.0, 0.7, 1.3)[number % 3], "seed": number, **constraint, **more}
    with daemon.client(timeout_s=600.0) as client:
        return number, client.chat([{"role": "user", "content": question}], **options)


def check(daemon: DaemonProcess, numbers: range) -> None:
    began_s = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(daemon, number), numbers))
    seconds = time.monotonic() - began_s
    right = 0
    for number, answer in answers:
        assert answer.finish_reason == "stop", (case(number), answer.text)
        assert case(number)[2](answer.text), (case(number), answer.text)
        right += 1
    with daemon.client() as client:
        preemptions = client.stats()["scheduler"]["preemptions"]
    print(f"{right} of {len(numbers)} outputs validate, in {seconds:.1f} s, with {preemptions} preemptions")


def test_ten_outputs_of_all_kinds_validate(daemon: DaemonProcess) -> None:
    check(daemon, range(10))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_hundred_of_a_hundred_outputs_validate(daemon: DaemonProcess) -> None:
    check(daemon, range(NUM_CASES))


def test_an_answer_alone_is_the_answer_in_a_crowd(daemon: DaemonProcess) -> None:
    _, alone = ask(daemon, 0)
    with ThreadPoolExecutor(4) as pool:
        crowd = dict(pool.map(lambda number: ask(daemon, number), (0, 1, 4, 3)))
    assert crowd[0].token_ids == alone.token_ids


@pytest.mark.parametrize("number", [0, 1, 4])
def test_with_drafts_and_without_it_is_the_same_answer(daemon: DaemonProcess, number: int) -> None:
    _, without = ask(daemon, number, speculation="off")
    _, drafted = ask(daemon, number, speculation="auto")
    assert drafted.token_ids == without.token_ids
    usage = drafted.usage  # what nobody drafted is not counted
    print(f"{usage.accepted_tokens or 0} of {usage.drafted_tokens or 0} drafted tokens accepted, {len(drafted.token_ids)} in all")
