"""``kvd generate`` with several prompts: all are answered, in their order."""

from __future__ import annotations

import io
import json
import sys
import types

import pytest
from kvd_client.results import Choice, Completion, PingResult, Timings, Usage

from kvd.cli import app
from kvd.cli.exits import Exit


class Stub:
    """What the command asks of a client; an answer is its prompt and two marks."""

    calls: list = []  # noqa: RUF012
    endpoint = "ipc:///stub"
    finish_reason = "stop"

    def __init__(self, *_args, **_options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        pass

    def ping(self, **_):
        return PingResult("cd" * 4, "ready", 0.002)

    def generate_many(self, prompts, *, n=1, **options):
        self.calls.append((prompts, options))
        texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
        return [
            Completion(bytes(16), tuple(Choice(i, f"{text}!{i}", (1,), self.finish_reason, ()) for i in range(n)), Usage(), Timings(), 0)
            for text in texts
        ]


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    class Fresh(Stub):
        calls: list = []  # noqa: RUF012

    module = types.ModuleType("kvd_client.client")
    module.Client = Fresh
    monkeypatch.setitem(sys.modules, "kvd_client.client", module)
    return Fresh


def test_each_prompt_has_its_answer(stub, capsys):
    assert app.main(["generate", "--prompt", "A", "--prompt", "B", "--max-tokens", "5"]) == 0
    assert stub.calls == [(["A", "B"], {"max_tokens": 5})]
    assert capsys.readouterr().out == "[0] A!0\n[1] B!0\n"
    assert app.main(["generate", "--prompt", "A", "--prompt", "B", "--n", "2"]) == 0
    assert capsys.readouterr().out == "[0.0] A!0\n[0.1] A!1\n[1.0] B!0\n[1.1] B!1\n"


def test_json_is_an_object_a_line(capsys):
    assert app.main(["generate", "--prompt", "A", "--prompt", "B", "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["A!0", "B!0"]


def test_a_system_prompt_begins_each(stub):
    assert app.main(["generate", "--system", "S", "--prompt", "A", "--prompt", "B"]) == 0
    ((prompts, _),) = stub.calls
    assert [[turn["content"] for turn in prompt] for prompt in prompts] == [["S", "A"], ["S", "B"]]


def test_standard_input_may_be_one_of_them(stub, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert app.main(["generate", "--prompt", "A", "--prompt", "-"]) == 0
    assert stub.calls[0][0] == ["A", "piped"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["generate", "--prompt", "A", "--prompt", "B", "--stream"], "--stream shows one answer"),
        (["generate", "--prompt", "-", "--prompt", "-"], "once"),
        (["chat", "--prompt", "A", "--prompt", "B"], "kvd generate takes several"),
    ],
)
def test_what_has_one_answer_alone_says_so(stub, capsys, flags, words):
    assert app.main(flags) == Exit.USAGE
    assert words in capsys.readouterr().err
    assert stub.calls == []


def test_an_answer_that_was_cut_short_is_printed_and_told(stub, capsys):
    stub.finish_reason = "aborted"
    assert app.main(["generate", "--prompt", "A", "--prompt", "B"]) == Exit.TEMPORARY
    assert capsys.readouterr().out == "[0] A!0\n[1] B!0\n"
