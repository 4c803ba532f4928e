"""The commands against a stub of the client library: what they send, what they print, how they end."""

from __future__ import annotations

import io
import json
import re
import sys
import time
import types

import pytest
from kvd_client.errors import ConnectionLost, KvdError, Timeout
from kvd_client.results import (
    CheckpointResult,
    Choice,
    Chunk,
    Completion,
    ForgetResult,
    PingResult,
    PinResult,
    Timings,
    TokenLogprob,
    Usage,
)

from kvd.cli import app, connect, serve
from kvd.cli.exits import MEANINGS, Exit, exit_of_failure
from kvd.cli.output import print_rows
from kvd.config import ConfigError
from kvd.types import RETRYABLE_CODES, ErrorCode

USAGE = Usage(prompt_tokens=40, cached_tokens=32, restored_tokens=16, recomputed_tokens=0, completion_tokens=3)
TIMINGS = Timings(queue_ms=0.5, ttft_ms=12.25, total_ms=30.0)
STATUS = {
    "state": "ready",
    "model": "smollm2",
    "fingerprint": "ab" * 4,
    "instance": "cd" * 4,
    "uptime_s": 61.5,
    "requests": {"running": 2, "waiting": 1, "stalled": 0},
    "blocks": {"total": 100, "used": 10, "cached": 20, "free": 70},
    "store": {"nodes": 5, "blocks": 4, "bytes": 3 << 20, "wal_bytes": 1000, "last_checkpoint_age_s": 2.0, "degraded": False},
    "rehydration": {"blocks": 4, "tokens": 64, "bytes": 3 << 20, "seconds": 0.5, "pins_pending": 0, "dropped": {"checksum": 1}},
}
STATS = {
    "uptime_s": 10.0,
    "scheduler": {"prefill_tokens": 120},
    "transport": {"prefill_tokens": 7},
    "store": {
        "wal_bytes": 2048,
        "cold_bytes_per_s": 3 << 30,
        "prefill_tokens_per_s": 1663,
        "cold_latency_ms": None,
    },
    "rates_per_s": {"prefill_tokens": 12.5},
    "rates_window_s": 9.6,
}
PREFIXES = {
    "pins": [
        {"name": "support", "tokens": 1504, "hits": 7, "state": "held", "residency": "memory,disk", "priority": 50, "created_unix_s": 1.0}
    ],
    "hottest": [{"tokens": 96, "hits": 3, "residency": "memory", "age_s": 61.0}],
}


class StubStream:
    prompt = None

    def __init__(self, chunks, completion, fail):
        self._chunks, self.completion, self._fail = chunks, completion, fail
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def __iter__(self):
        yield from self._chunks
        if self._fail:
            raise self._fail


class StubClient:
    """Stands for kvd_client.Client; records the calls."""

    calls: list
    state = "ready"
    fail: BaseException | None = None
    texts = ("Hello there",)
    finish_reason = "stop"
    logprobs: tuple[TokenLogprob, ...] = ()
    made: dict

    def __init__(self, endpoint=None, **options):
        type(self).made = {"endpoint": endpoint, **options}
        self.endpoint = endpoint or "ipc:///default"
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def _record(self, name, *args, **kwargs):
        self.calls.append((name, args, kwargs))
        if self.fail:
            raise self.fail

    def ping(self, **_):
        return PingResult("cd" * 4, self.state, 0.002)

    def wait_ready(self, **_):
        self._record("wait_ready")

    def _answer(self, name, prompt, stream=False, **options):
        if stream:
            self.calls.append((name, (prompt,), {"stream": True, **options}))
        else:
            self._record(name, prompt, **options)
        choices = tuple(Choice(i, text, (1, 2, 3), self.finish_reason, self.logprobs) for i, text in enumerate(self.texts))
        completion = Completion(b"x" * 16, choices, USAGE, TIMINGS, 7)
        chunks = [Chunk(0, 0, (1,), "Hello"), Chunk(0, 1, (2, 3), " there"), Chunk(0, 3, (), "", finish_reason="stop")]
        return StubStream(chunks, completion, self.fail) if stream else completion

    def generate(self, prompt, **options):
        return self._answer("generate", prompt, **options)

    def chat(self, messages, **options):
        return self._answer("chat", messages, **options)

    def tokenize(self, prompt=None, *, messages=None):
        self._record("tokenize", prompt, messages=messages)
        return (5, 6, 7)

    def pin(self, name, prompt=None, *, messages=None, cache_salt=b"", adapter="", priority=50, ttl_s=0.0):
        salt = {"cache_salt": cache_salt} if cache_salt else {}
        salt |= {"adapter": adapter} if adapter else {}
        self._record("pin", name, prompt, messages=messages, priority=priority, ttl_s=ttl_s, **salt)
        return PinResult(name, {"tokens": 96, "blocks": 6, "durable": "recipe+bytes"})

    def unpin(self, name):
        self._record("unpin", name)

    forgets = ForgetResult(6, 1)

    def forget(self, prompt=None, *, messages=None, cache_salt=None, tenant=None, everything=False):
        self._record("forget", prompt, messages=messages, cache_salt=cache_salt, tenant=tenant, everything=everything)
        return self.forgets

    def prefixes(self):
        self._record("prefixes")
        return PREFIXES

    def status(self):
        self._record("status")
        return STATUS

    def stats(self):
        self._record("stats")
        return STATS

    def checkpoint(self):
        self._record("checkpoint")
        return CheckpointResult(3, 1 << 20)

    def drain(self, drain_timeout_s=None):
        self._record("drain", drain_timeout_s)


@pytest.fixture
def stub(monkeypatch):
    class Fresh(StubClient):
        calls: list = []  # noqa: RUF012  one list a test
        made: dict = {}  # noqa: RUF012

    module = types.ModuleType("kvd_client.client")
    module.Client = Fresh
    monkeypatch.setitem(sys.modules, "kvd_client.client", module)
    for variable in ("KVD_CONNECT", "KVD_TIMEOUT", "KVD_SERVER_KEY", "KVD_CLIENT_KEY_FILE"):
        monkeypatch.delenv(variable, raising=False)
    return Fresh


def only_object(text: str) -> dict:
    (line,) = text.splitlines()
    return json.loads(line)


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


def test_forget_says_what_went(stub, tmp_path, capsys):
    (tmp_path / "s.txt").write_text("You are.")
    assert app.main(["forget", "--system-file", str(tmp_path / "s.txt"), "--cache-salt", "s"]) == 0
    assert capsys.readouterr().out == "forgotten: 6 blocks, 1 pins; nothing of it is in the state directory\n"
    assert app.main(["forget", "--prompt-file", str(tmp_path / "s.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"blocks": 6, "pins": 1}
    assert app.main(["forget", "--all", "--tenant", "acme"]) == 0
    assert app.main(["forget", "--cache-salt", ""]) == 0
    assert app.main(["pin", "a", "--system", "x", "--cache-salt", "s"]) == 0
    nothing = {"messages": None, "cache_salt": None, "tenant": None, "everything": False}
    assert stub.calls == [
        ("forget", (None,), {**nothing, "messages": [{"role": "system", "content": "You are."}], "cache_salt": "s"}),
        ("forget", ("You are.",), nothing),
        ("forget", (None,), {**nothing, "tenant": "acme", "everything": True}),
        ("forget", (None,), {**nothing, "cache_salt": ""}),
        ("pin", ("a", None), {"messages": [{"role": "system", "content": "x"}], "priority": 50, "ttl_s": 0.0, "cache_salt": "s"}),
    ]


def test_forgetting_what_nobody_knew_says_so_and_is_no_failure(stub, capsys, monkeypatch):
    monkeypatch.setattr(stub, "forgets", ForgetResult(0, 0))
    assert app.main(["forget", "--cache-salt", "s"]) == 0
    assert capsys.readouterr().out == "nothing was known of it; nothing of it is in the state directory\n"


def test_pin_from_each_source(stub, tmp_path, capsys):
    (tmp_path / "s.txt").write_text("You are.", encoding="utf-8")
    (tmp_path / "m.json").write_text('[{"role": "system", "content": "x"}]', encoding="utf-8")
    assert app.main(["pin", "a", "--system-file", str(tmp_path / "s.txt"), "--json"]) == 0
    assert only_object(capsys.readouterr().out) == {"name": "a", "tokens": 96, "blocks": 6, "durable": "recipe+bytes"}
    assert app.main(["pin", "b", "--messages-file", str(tmp_path / "m.json"), "--priority", "90", "--ttl", "60"]) == 0
    assert capsys.readouterr().out == "pinned b: 96 tokens, 6 blocks; recipe and bytes are on disk\n"
    assert app.main(["pin", "c", "--prompt-file", str(tmp_path / "s.txt")]) == 0
    assert stub.calls == [
        ("pin", ("a", None), {"messages": [{"role": "system", "content": "You are."}], "priority": 50, "ttl_s": 0.0}),
        ("pin", ("b", None), {"messages": [{"role": "system", "content": "x"}], "priority": 90, "ttl_s": 60.0}),
        ("pin", ("c", "You are."), {"messages": None, "priority": 50, "ttl_s": 0.0}),
    ]


@pytest.mark.parametrize("content", ["{}", "[]", "[1]", '[{"content": "x"}]', "not json"])
def test_wrong_messages_are_refused_before_anything_is_sent(stub, tmp_path, content, capsys):
    (tmp_path / "m.json").write_text(content, encoding="utf-8")
    assert app.main(["pin", "a", "--messages-file", str(tmp_path / "m.json")]) == Exit.DATA
    message = capsys.readouterr().err
    assert "m.json" in message
    assert ("is not JSON" in message) == (content == "not json")
    assert stub.calls == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["status"], STATUS),
        (["stats"], STATS),
        (["prefixes"], PREFIXES),
        (["checkpoint"], {"blocks": 3, "bytes": 1 << 20}),
        (["unpin", "a"], {"name": "a", "unpinned": True}),
        (["drain"], {"draining": True}),
        (["ping"], {"endpoint": "ipc:///default", "state": "ready", "instance": "cd" * 4, "round_trip_ms": 2.0}),
    ],
)
def test_json_of_the_other_commands(stub, capsys, arguments, expected):
    assert app.main([*arguments, "--json"]) == 0
    assert only_object(capsys.readouterr().out) == expected


def test_human_status(stub, capsys):
    assert app.main(["status"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    facts = {name.strip(): value.strip() for name, value in lines.items()}
    assert facts["state"] == "ready"
    assert facts["uptime"] == "1m 1s"
    assert facts["requests"] == "running 2, waiting 1, stalled 0"
    assert facts["store"] == "nodes 5, blocks 4, bytes 3.0 MiB, wal 1000 B, last checkpoint age 2.0s, degraded no"
    assert facts["dropped"] == "checksum 1"


def test_human_status_says_what_the_start_is_at(stub, capsys, monkeypatch):
    monkeypatch.setitem(STATUS, "progress", "loading weights: 40 %")
    assert app.main(["status"]) == 0
    assert "progress     loading weights: 40 %" in capsys.readouterr().out.splitlines()


def test_human_status_warns_of_pins_that_are_not_held(stub, capsys, monkeypatch):
    assert app.main(["status"]) == 0
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setitem(STATUS["rehydration"], "pins_not_held", 2)
    assert app.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split(maxsplit=1) == ["warning", "2 of the pins not held; `kvd prefixes` says why"]
    assert "not held" not in next(line for line in lines if line.startswith("rehydration"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "nothing holds copies to disk back"),
        ("rate", "checkpoint_bytes_per_s is used up"),
        ("queue", "more requests wait than checkpoint_pause_queue_depth"),
        ("staging", "the disk is slower than the copies"),
        ("in_flight", "as much as may be is under way"),
        ("disk", "the disk budget is full, or the store is degraded"),
        ("of-a-later-version", "holds copies back"),
    ],
)
def test_human_status_says_in_words_what_holds_copies_back(stub, capsys, monkeypatch, name, words):
    for key, value in (("governor", name), ("waiting_blocks", 3), ("waiting_bytes", 3 << 20)):
        monkeypatch.setitem(STATUS["store"], key, value)
    assert app.main(["status"]) == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()}
    assert lines["governor"] == f"{name}: {words}; 3 blocks (3.0 MiB) wait to be written"
    assert "waiting" not in lines["store"]


def test_human_status_says_what_is_not_on_disk_and_why(stub, capsys, monkeypatch):
    values = {
        "unwritten_blocks": 300,
        "refused_blocks": 0,
        "max_block_bytes": 39 << 20,
        "max_bytes": 80 << 20,
        "encrypted": True,
        "damage": [],
    }
    for key, value in values.items():
        monkeypatch.setitem(STATUS["store"], key, value)

    def lines() -> dict[str, str]:
        assert app.main(["status"]) == 0
        return dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())

    shown = lines()
    assert shown["not on disk"] == "300 of the blocks in memory"
    assert shown["disk budget"] == "blocks may take 39.0 MiB of 80.0 MiB (store_max_bytes), and take 3.0 MiB"
    assert shown["store"].endswith("degraded no, encrypted yes, damage none")
    monkeypatch.setitem(STATUS["store"], "refused_blocks", 217)
    assert lines()["not on disk"] == "300 of the blocks in memory; 217 hot ones found no room under store_max_bytes"


def test_human_stats_and_prefixes(stub, capsys):
    assert app.main(["stats"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:2] == ["COUNTER", "VALUE"]
    assert ["scheduler.prefill_tokens", "120", "12.5"] in rows
    assert ["transport.prefill_tokens", "7", "-"] in rows, "a rate belongs to the counter of its own room"
    assert ["store.wal_bytes", "2.0", "KiB", "-"] in rows
    assert ["store.cold_bytes_per_s", "3.0", "GiB/s", "-"] in rows
    assert ["store.prefill_tokens_per_s", "1663", "-"] in rows
    assert ["store.cold_latency_ms", "-", "-"] in rows, "not measured yet"
    assert app.main(["prefixes"]) == 0
    text = capsys.readouterr().out
    assert "1 pins" in text
    assert "support" in text
    assert "1m 1s" in text


def test_tables_align_numbers_to_the_right(capsys):
    print_rows(("NAME", "N"), [("a", "5"), ("longer", "100")])
    assert capsys.readouterr().out == "NAME      N\na         5\nlonger  100\n"
    print_rows(("NAME",), [])
    assert capsys.readouterr().out == "none\n"


def test_where_to_connect_and_how_long(stub, monkeypatch):
    assert app.main(["status", "--connect", "tcp://127.0.0.1:1", "--timeout", "2"]) == 0
    assert stub.made["endpoint"] == "tcp://127.0.0.1:1"
    assert stub.made["timeout_s"] == 2
    assert stub.made["connect_timeout_s"] < 2
    monkeypatch.setenv("KVD_CONNECT", "ipc:///env")
    assert app.main(["status", "--timeout", "100", "--wait"]) == 0
    assert stub.made["endpoint"] == "ipc:///env"
    assert stub.made["connect_timeout_s"] == 100


def test_curve_keys_of_the_environment_are_for_tcp_endpoints(stub, monkeypatch, capsys):
    monkeypatch.setenv("KVD_SERVER_KEY", "k" * 40)
    monkeypatch.setenv("KVD_CLIENT_KEY_FILE", "/keys/client.key_secret")
    assert app.main(["status", "--connect", "tcp://127.0.0.1:1"]) == 0
    assert (stub.made["server_key"], str(stub.made["client_key_file"])) == ("k" * 40, "/keys/client.key_secret")
    for arguments in ([], ["--connect", "ipc:///here"]):
        assert app.main(["status", *arguments]) == 0
        assert (stub.made["server_key"], stub.made["client_key_file"]) == (None, None)
    monkeypatch.setenv("KVD_CONNECT", "tcp://127.0.0.1:1")
    assert app.main(["status"]) == 0
    assert stub.made["server_key"] == "k" * 40


@pytest.mark.parametrize("flag", ["--server-key", "--client-key-file"])
def test_a_curve_key_that_was_typed_for_an_ipc_endpoint_is_an_error_that_says_so(stub, capsys, flag):
    assert app.main(["status", "--connect", "ipc:///here", flag, "k" * 40]) == Exit.USAGE
    assert f"{flag} is for tcp endpoints; ipc:///here takes no CURVE keys" in capsys.readouterr().err
    assert stub.calls == []


@pytest.mark.parametrize("state", ["starting", "rehydrating", "draining"])
def test_a_daemon_that_is_not_ready_is_unavailable_unless_waited_for(stub, capsys, state):
    stub.state = state
    assert app.main(["generate", "--prompt", "Hi"]) == Exit.UNAVAILABLE
    assert f"is {state}; --wait" in capsys.readouterr().err
    assert stub.calls == []
    assert app.main(["generate", "--prompt", "Hi", "--wait"]) == 0
    assert [name for name, *_ in stub.calls] == ["wait_ready", "generate"]
    assert app.main(["status"]) == 0


def test_waiting_is_said_once_with_the_endpoint_and_only_if_it_takes_a_moment(stub, capsys, monkeypatch):
    assert app.main(["ping", "--wait"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(connect, "_SAY_AFTER_S", 0.01)
    said = []

    def until_said(_):
        until_s = time.monotonic() + 60
        while not "".join(said).endswith("\n") and time.monotonic() < until_s:
            time.sleep(0.01)
            said.append(capsys.readouterr().err)

    monkeypatch.setattr(stub, "wait_ready", until_said)
    assert app.main(["ping", "--wait"]) == 0
    assert "".join(said) + capsys.readouterr().err == "kvd: waiting for the daemon at ipc:///default to be ready\n"


@pytest.mark.parametrize(("state", "code"), [("ready", 0), ("starting", 69), ("rehydrating", 69), ("draining", 69)])
def test_ping_says_the_state_and_succeeds_only_when_ready(stub, capsys, state, code):
    stub.state = state
    assert app.main(["ping"]) == code
    assert capsys.readouterr().out == f"ipc:///default is {state}, answered in 2.0 ms\n"
    assert app.main(["ping", "--json"]) == code
    assert only_object(capsys.readouterr().out)["state"] == state


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionLost("no daemon answers"), 69),
        (Timeout("not over"), 75),
        (KvdError("full", code="overloaded", retryable=True), 75),
        (KvdError("restart", code="engine_error", retryable=True), 75),
        (KvdError("long", code="prompt_too_long"), 65),
        (KvdError("pins", code="pin_capacity"), 73),
        (KvdError("name", code="not_found"), 66),
        (KvdError("what", code="unsupported_version"), 76),
        (KvdError("key", code="authentication_failed"), 77),
        (KvdError("bug", code="internal"), 70),
        (KvdError("new", code="invented_later", retryable=True), 75),
        (KvdError("new", code="invented_later"), 70),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_a_failure_is_one_line_and_an_exit_code(stub, capfd, error, code, flags, monkeypatch):
    if isinstance(error, BrokenPipeError):
        monkeypatch.setattr("os.dup2", lambda *_: None)
    stub.fail = error
    assert app.main(["generate", "--prompt", "Hi", *flags]) == code
    if code not in {130, 141}:
        printed = capfd.readouterr()
        expected = "no daemon answers (at ipc:///default); `kvd serve` starts one" if isinstance(error, ConnectionLost) else str(error)
        assert printed.err == f"kvd: {expected}\n"
        assert printed.out == ("Hello there\n" if flags else ""), "what has come stays, on a line of its own"


def test_every_failure_code_has_an_exit_code_that_is_documented():
    for code in ErrorCode:
        exit_code = exit_of_failure(code, retryable=code in RETRYABLE_CODES)
        assert exit_code in MEANINGS
        assert exit_code != Exit.OK
    assert set(MEANINGS) == set(Exit)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["generate", "--no-such-flag"],
        ["generate", "--prompt", "x", "--n", "2", "--stream"],
        ["generate", "--prompt", "x", "--max-tokens", "many"],
        ["generate", "--prompt", "x", "--logprobs", "1"],
        ["generate", "--prompt", "x", "--system", "a", "--system-file", "b"],
        ["pin", "a"],
        ["forget"],
        ["forget", "--all", "--cache-salt", "s"],
        ["forget", "--tenant", "acme"],
        ["forget", "--system", "x", "--prompt-file", "y"],
        ["pin", "a", "--system", "x", "--prompt-file", "y"],
        ["pin"],
        ["status", "--timeout", "0"],
    ],
)
def test_a_wrong_command_line_exits_64(stub, capsys, arguments):
    assert app.main(arguments) == Exit.USAGE
    assert "Error:" in capsys.readouterr().err
    assert stub.calls == []


def test_a_missing_file_exits_66(stub, capsys):
    assert app.main(["generate", "--prompt", "x", "--system-file", "/absent/file"]) == Exit.NO_INPUT
    assert "/absent/file" in capsys.readouterr().err


def test_a_fault_of_our_own_shows_its_traceback_and_exits_70(stub, capsys):
    stub.fail = ZeroDivisionError("oops")
    assert app.main(["status"]) == Exit.SOFTWARE
    assert "ZeroDivisionError: oops" in capsys.readouterr().err


def test_version(capsys):
    assert app.main(["version", "--json"]) == 0
    assert set(only_object(capsys.readouterr().out)) == {"version", "python"}
    assert app.main(["version"]) == 0
    line = capsys.readouterr().out
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == line


# ------------------------------------------------------------------------------------------------------------ serve


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    """A stub of the composition root; returns the list of configurations that it was run with."""
    runs = []
    module = types.ModuleType("kvd.daemon_process")
    module.run = lambda config: runs.append(config) or 7
    monkeypatch.setitem(sys.modules, "kvd.daemon_process", module)
    monkeypatch.setattr("kvd.observe.logging.configure", lambda **_: None)
    monkeypatch.setenv("KVD_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KVD_CONFIG", raising=False)
    return runs


def test_serve_runs_the_daemon_with_the_loaded_configuration(daemon, tmp_path):
    arguments = [
        "serve",
        "--executor",
        "fake",
        "--max-running",
        "3",
        "--listen",
        "tcp://127.0.0.1:1",
        "--listen",
        "ipc:///x",
        "--no-persist",
    ]
    assert app.main(arguments) == 7, "the daemon's exit status is the command's"
    (config,) = daemon
    assert config.scheduler.max_running == 3
    assert config.transport.listen == ("tcp://127.0.0.1:1", "ipc:///x")
    assert config.storage.persist is False
    assert config.storage.state_dir == tmp_path / "state" / "kvd"


def test_serve_without_the_model_names_the_one_command(daemon, capsys):
    assert app.main(["serve"]) == Exit.CONFIG
    assert capsys.readouterr().err == "kvd: model.model: smollm2 is not on this machine; run: kvd pull smollm2\n"
    assert daemon == []


def test_serve_resolves_the_models_name(daemon, tmp_path):
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"weights")
    assert app.main(["serve", "--model", "smollm2"]) == 7
    assert daemon[0].model.model == str(path)


def test_serve_offers_to_pull_on_a_terminal(daemon, tmp_path, monkeypatch):
    asked = []
    path = tmp_path / "pulled.gguf"
    monkeypatch.setattr(serve.sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(serve.sys, "stderr", types.SimpleNamespace(isatty=lambda: True, write=lambda _: None, flush=lambda: None))
    monkeypatch.setattr("click.confirm", lambda question, **_: asked.append(question) or True)
    monkeypatch.setattr("kvd.cli.pull.pull", lambda name: path if name == "smollm2" else None)
    assert app.main(["serve"]) == 7
    assert "smollm2" in asked[0]
    assert daemon[0].model.model == str(path)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    assert app.main(["serve"]) == Exit.CONFIG


def test_print_config_needs_no_model_and_starts_nothing(daemon, capsys):
    assert app.main(["serve", "--print-config", "--kv-memory", "2GiB"]) == 0
    assert 'kv_memory = "2GiB"' in capsys.readouterr().out
    assert daemon == []


def test_a_wrong_value_exits_78(daemon, capsys):
    assert app.main(["serve", "--max-running", "0"]) == Exit.CONFIG
    assert "flag --max-running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("device = 'cuda': torch finds no CUDA device here", "device = 'cuda': torch finds no CUDA device here (from env KVD_DEVICE)"),
        ("a model that can't be read", "a model that can't be read"),
    ],
)
def test_what_the_daemon_refuses_at_its_start_names_the_values_origin(daemon, monkeypatch, capsys, message, shown):
    def refuse(_config):
        raise ConfigError(message)

    monkeypatch.setattr(sys.modules["kvd.daemon_process"], "run", refuse)
    monkeypatch.setenv("KVD_DEVICE", "cuda")
    assert app.main(["serve", "--executor", "fake"]) == Exit.CONFIG
    assert capsys.readouterr().err == f"kvd: {shown}\n"
