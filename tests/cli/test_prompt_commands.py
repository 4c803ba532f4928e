"""The commands that take a prompt, generate, chat and tokenize, against a stub of the client library: what they send and what they print."""

from __future__ import annotations

import io
import sys

import pytest
from kvd_client.results import TokenLogprob
from stub_client import only_object

from kvd.cli import app
from kvd.cli.exits import Exit


def test_generate_prints_one_object_of_the_documented_shape(stub, capsys):
    assert app.main(["generate", "--prompt", "Hi", "--json"]) == 0
    assert only_object(capsys.readouterr().out) == {
        "text": "Hello there",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "seed": 7,
        "usage": {"prompt_tokens": 40, "cached_tokens": 32, "restored_tokens": 16, "recomputed_tokens": 0, "completion_tokens": 3},
        "timings": {"queue_ms": 0.5, "ttft_ms": 12.25, "total_ms": 30.0},
    }
    assert stub.calls == [("generate", ("Hi",), {})]


def test_several_choices_are_listed(stub, capsys):
    stub.texts = ("one", "two")
    assert app.main(["generate", "--prompt", "Hi", "--n", "2", "--json"]) == 0
    printed = only_object(capsys.readouterr().out)
    assert set(printed) == {"choices", "seed", "usage", "timings"}
    assert [choice["text"] for choice in printed["choices"]] == ["one", "two"]
    assert set(printed["choices"][0]) == {"text", "token_ids", "finish_reason"}
    assert app.main(["generate", "--prompt", "Hi", "--n", "2"]) == 0
    assert capsys.readouterr().out == "[0] one\n[1] two\n"


def test_every_flag_reaches_the_client_and_zero_is_a_value(stub):
    sampling = (
        "--temperature 0 --top-p 0.5 --top-k 0 --min-p 0 --repetition-penalty 1.5 --presence-penalty 0 --frequency-penalty -0.5 --seed 0"
    )
    ends = "--max-tokens 9 --min-tokens 0 --stop a --stop b --stop-token-id 0 --stop-token-id 7 --ignore-eos --n 1 --logprobs 0 --json"
    assert app.main(["generate", "--prompt", "Hi", *sampling.split(), *ends.split()]) == 0
    ((_, _, options),) = stub.calls
    assert options == {
        "max_tokens": 9,
        "min_tokens": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": -0.5,
        "stop_token_ids": (0, 7),
        "logprobs": 0,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.5,
        "seed": 0,
        "stop": ("a", "b"),
        "ignore_eos": True,
        "n": 1,
    }


def test_logprobs_are_part_of_the_object_where_they_were_asked_for(stub, capsys):
    stub.logprobs = (TokenLogprob(token_id=1, logprob=-0.5, top=((1, -0.5), (9, -2.0))), TokenLogprob(token_id=2, logprob=-0.25))
    assert app.main(["chat", "--prompt", "Hi", "--logprobs", "2", "--json"]) == 0
    assert only_object(capsys.readouterr().out)["logprobs"] == [
        {"token_id": 1, "logprob": -0.5, "top": [{"token_id": 1, "logprob": -0.5}, {"token_id": 9, "logprob": -2.0}]},
        {"token_id": 2, "logprob": -0.25, "top": []},
    ]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("flags", [[], ["--stream"], ["--json"], ["--stream", "--json"]], ids=" ".join)
def test_an_answer_that_a_drain_cut_short_is_printed_and_is_no_success(stub, capsys, command, flags):
    stub.finish_reason = "aborted"
    assert app.main([command, "--prompt", "Hi", *flags]) == Exit.TEMPORARY
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last.startswith("kvd: ")
    assert "drain" in last
    if "--json" in flags:
        assert only_object(printed.out)["finish_reason"] == "aborted"
    else:
        assert printed.out == "Hello there\n"


def test_an_answer_that_a_drain_cut_short_is_no_turn_of_the_conversation(stub, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def ask(_prompt):
        stub.finish_reason = "stop" if stub.calls else "aborted"
        if len(stub.calls) == 2:
            raise EOFError
        return f"question {len(stub.calls)}"

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    assert app.main(["chat"]) == 0
    assert stub.calls[1][1] == ([{"role": "user", "content": "question 1"}],)
    assert "drain" in capsys.readouterr().err


def test_a_system_prompt_makes_it_a_conversation(stub, tmp_path):
    (tmp_path / "system.txt").write_text("Be brief.\n", encoding="utf-8")
    expected = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "Hi"}]
    assert app.main(["generate", "--prompt", "Hi", "--system-file", str(tmp_path / "system.txt")]) == 0
    assert app.main(["chat", "--prompt", "Hi", "--system", "Be brief.\n"]) == 0
    assert app.main(["chat", "--prompt", "Hi"]) == 0
    assert [(name, args) for name, args, _ in stub.calls] == [("chat", (expected,)), ("chat", (expected,)), ("chat", (expected[1:],))]


def test_tools_without_a_conversation_say_what_they_need(stub, tmp_path, capsys):
    (tmp_path / "tools.json").write_text('[{"name": "look_up"}]')
    tools = ("--prompt", "Hi", "--tools", str(tmp_path / "tools.json"))
    assert app.main(["generate", *tools]) == Exit.USAGE
    assert "use kvd chat, or give --system" in capsys.readouterr().err
    assert stub.calls == []
    assert app.main(["generate", *tools, "--system", "Be brief."]) == app.main(["chat", *tools, "--no-stream"]) == 0
    assert [(name, options) for name, _, options in stub.calls] == 2 * [("chat", {"tools": [{"name": "look_up"}]})]


def test_stream_prints_as_it_comes(stub, capsys):
    assert app.main(["generate", "--prompt", "Hi", "--stream"]) == 0
    assert capsys.readouterr().out == "Hello there\n"


def test_stream_with_json_keeps_standard_output_to_one_object(stub, capsys):
    assert app.main(["generate", "--prompt", "Hi", "--stream", "--json"]) == 0
    printed = capsys.readouterr()
    assert only_object(printed.out)["text"] == "Hello there"
    assert printed.err == "Hello there\n"


def test_the_prompt_may_come_from_standard_input(stub, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grüße\n".encode())))
    assert app.main(["generate"]) == 0
    assert stub.calls[0][1] == ("grüße\n",)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert app.main(["generate", "--prompt", "-"]) == Exit.DATA


def test_conversation_keeps_its_turns(stub, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    questions = iter(["one", "  ", "two"])

    def ask(_prompt):
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    assert app.main(["chat", "--system", "S", "--temperature", "0"]) == 0
    (_, (first,), options), (_, (second,), _) = stub.calls
    assert options == {"stream": True, "temperature": 0.0}
    assert first == [{"role": "system", "content": "S"}, {"role": "user", "content": "one"}]
    assert second == [*first, {"role": "assistant", "content": "Hello there"}, {"role": "user", "content": "two"}]
    assert capsys.readouterr().out.count("Hello there\n") == 2


def test_interrupting_an_answer_keeps_the_conversation_going(stub, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def ask(_prompt):
        if len(stub.calls) == 2:
            raise KeyboardInterrupt
        stub.fail = KeyboardInterrupt() if not stub.calls else None
        return f"question {len(stub.calls)}"

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    assert app.main(["chat"]) == Exit.INTERRUPTED
    assert stub.calls[1][1] == ([{"role": "user", "content": "question 1"}],), "the stopped answer is no part of the conversation"


def test_tokenize(stub, capsys):
    assert app.main(["tokenize", "--prompt", "abc", "--json"]) == 0
    assert only_object(capsys.readouterr().out) == {"count": 3, "token_ids": [5, 6, 7]}
    assert app.main(["tokenize", "--prompt", "abc", "--system", "S"]) == 0
    assert capsys.readouterr().out == "5 6 7\n"
    assert stub.calls[1][2]["messages"][0] == {"role": "system", "content": "S"}
