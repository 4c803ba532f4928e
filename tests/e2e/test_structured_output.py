"""Constraints over real sockets, with the edge as a thread and as a process: every kind, every refusal, and beside everything else a request may ask."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import AsyncClient, Client, errors
from schema_check import matches

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store, pytest.mark.grammar]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CALL = 'start: NAME "(" /[0-9]{1,4}/ ")"\nNAME: /[a-z]{1,8}/\n'


@pytest.fixture(scope="module", params=["thread", "process"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("kvd"), "--frontend", request.param, "--max-waiting-constraints", "8") as process:
        process.wait_ready()
        yield process
        assert process.terminate() == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_kind_is_met_by_every_choice(daemon: DaemonProcess, temperature: float) -> None:
    with daemon.client() as client:

        def ask(**constraint: Any) -> list[str]:
            answer = client.generate("An answer: ", n=4, max_tokens=300, temperature=temperature, seed=3, **constraint)
            assert {choice.finish_reason for choice in answer.choices} == {"stop"}
            return [choice.text for choice in answer.choices]

        assert all(matches(json.loads(text), SCHEMA) for text in ask(json_schema=SCHEMA))
        assert ask(json_schema=json.dumps(SCHEMA)) == ask(json_schema=SCHEMA)
        assert all(re.fullmatch(r"[a-c]{2,5}é!", text) for text in ask(regex=r"[a-c]{2,5}é!"))
        assert set(ask(choice=["yes", "no, never", '"quoted"'])) <= {"yes", "no, never", '"quoted"'}
        assert all(re.fullmatch(r"[a-z]{1,8}\([0-9]{1,4}\)", text) for text in ask(lark=CALL))
        assert all(re.fullmatch("(yes|no)+", text) for text in ask(lark='root ::= ("yes" | "no")+'))
        assert all(isinstance(json.loads(text), bool | float | int | str | list | dict | None) for text in ask(json=True))


def test_a_seeded_answer_repeats_itself_and_streams_alike(daemon: DaemonProcess) -> None:
    options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 300, "temperature": 1.0, "seed": 11}
    with daemon.client() as client:
        whole = client.generate("Twice: ", **options)
        chunks = list(client.generate("Twice: ", stream=True, **options))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_drafts_and_without_it_is_the_same_answer(daemon: DaemonProcess, temperature: float) -> None:
    options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 300, "temperature": temperature, "seed": 5, "n": 2}
    with daemon.client() as client:
        answers = {mode: client.generate("Again: ", speculation=mode, **options) for mode in ("off", "ngram", "auto")}
        by_chance = client.generate(
            "Again: ", speculation="ngram", draft_acceptance="rejection", **{**options, "temperature": 1.0, "seed": None}
        )
        with pytest.raises(errors.BadRequest, match="draft model"):
            client.generate("x", speculation="draft", regex="a", max_tokens=5)
    texts = {mode: [choice.text for choice in answer.choices] for mode, answer in answers.items()}
    assert texts["off"] == texts["ngram"] == texts["auto"]
    assert not answers["off"].usage.accepted_tokens
    assert all(matches(json.loads(choice.text), SCHEMA) for choice in by_chance.choices)


def test_a_plain_request_beside_constrained_ones_answers_as_alone(daemon: DaemonProcess) -> None:
    expected = expected_tokens(b"Nothing special", 60)
    with daemon.client() as client:

        def constrained() -> None:
            client.generate("x", json_schema=SCHEMA, max_tokens=300, temperature=1.0)

        others = [threading.Thread(target=constrained) for _ in range(4)]
        for other in others:
            other.start()
        answers = [client.generate("Nothing special", max_tokens=60, temperature=0.0, ignore_eos=True) for _ in range(3)]
        for other in others:
            other.join()
    assert all(list(answer.token_ids) == expected for answer in answers)


def test_an_answer_that_is_cut_off_says_so(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        answer = client.generate("x", regex="[a-z]{50}", max_tokens=7)
    assert (answer.finish_reason, len(answer.text)) == ("length", 7)


def test_a_character_that_the_prompt_leaves_unfinished_is_no_part_of_the_answer(daemon: DaemonProcess) -> None:
    prompt = list("é".encode()[:1])
    with daemon.client() as client:
        assert client.generate(prompt, choice=["yes"], max_tokens=5).text == "yes"
        plain = client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
        assert plain.text.startswith("\ufffd"), "of a plain request it is"


def test_stop_strings_end_it_earlier(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        answer = client.generate("x", regex="[ab]{200}", stop="ab", max_tokens=300, temperature=1.0, seed=1)
    assert answer.finish_reason == "stop"
    assert re.fullmatch("b*a*", answer.text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": '{"type": "objekt"}'}, "objekt"),
    ({"json_schema": "{"}, "not JSON"),
    ({"json_schema": {"not": {"type": "string"}}}, "Unimplemented keys"),
    ({"regex": "[a"}, "unclosed"),
    ({"regex": "(?=a)b"}, "look-ahead"),
    ({"lark": "start: nothing"}, "nothing"),
    ({"choice": []}, "alternative"),
    ({"choice": ["", "a"]}, "empty"),
    ({"json_schema": {"enum": ["x" * 300_000]}}, "max_constraint_bytes"),
    ({"regex": "a", "beam_width": 2}, "beam don't go together"),
    ({"regex": "a", "json": True}, "one constraint at most"),
    ({"json": 3}, "True or False"),
    ({"choice": "yes"}, "sequence of strings"),
    ({"regex": ["a"]}, "a string"),
    ({"regex": "ab", "stop_token_ids": [98], "min_tokens": 0, "lark": None}, ""),
]


@pytest.mark.parametrize(("constraint", "words"), REFUSED, ids=[words or "fine" for _, words in REFUSED])
def test_what_makes_no_sense_is_refused_with_its_reason(daemon: DaemonProcess, constraint: dict[str, Any], words: str) -> None:
    with daemon.client() as client:
        if not words:
            assert client.generate("x", max_tokens=5, **constraint).text in ("a", "ab")
            return
        with pytest.raises(errors.BadRequest, match=re.escape(words)):
            client.generate("x", max_tokens=5, **constraint)
        assert client.generate("x", max_tokens=5, regex="ab").text == "ab"


def test_the_asyncio_client_constrains_as_well(daemon: DaemonProcess) -> None:
    async def ask() -> str:
        async with AsyncClient(daemon.endpoint) as client:
            return (await client.generate("x", choice=["left", "right"], max_tokens=20)).text

    assert asyncio.run(ask()) in ("left", "right")


def test_what_was_compiled_is_counted(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        client.generate("x", regex="[xyz]{3}", max_tokens=5)
        before = client.stats()["scheduler"]
        client.generate("x", regex="[xyz]{3}", max_tokens=5)
        after = client.stats()["scheduler"]
    assert after["constraints_hits"] == before["constraints_hits"] + 1
    assert after["constraints_compiled"] == before["constraints_compiled"]
    assert (after["compiling"], after["constraints_waiting"]) == (0, 0)


def test_a_daemon_may_be_told_to_take_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    with DaemonProcess(tmp_path_factory.mktemp("kvd"), "--no-constraints") as process:
        process.wait_ready()
        with process.client() as client:
            with pytest.raises(errors.BadRequest, match=r"grammar\.constraints"):
                client.generate("x", regex="a", max_tokens=5)
            assert client.generate("x", max_tokens=5).usage.completion_tokens <= 5


def test_a_stop_waits_for_no_compile(tmp_path: Path) -> None:
    failures: list[errors.KvdError] = []

    def ask(number: int) -> None:
        with Client(daemon.endpoint, wait_until_ready=False) as client:
            try:
                client.generate("x", lark="start: " + '("a" | "b")* ' * (16_000 + number), max_tokens=2)
            except errors.KvdError as error:
                failures.append(error)

    with DaemonProcess(tmp_path, "--constraint-timeout-s", "600") as daemon:
        started_in_s = daemon.wait_ready()
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        with daemon.client() as client:
            while client.stats()["scheduler"]["compiling"] < 8:
                time.sleep(0.01)
        began_s = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - began_s < max(5.0, 2 * started_in_s), "one compile takes far longer, on any machine"
        for thread in threads:
            thread.join()
    assert len(failures) == 8
