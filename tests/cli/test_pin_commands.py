"""``kvd pin`` and ``kvd forget`` against a stub of the client library: what they take, send and say."""

from __future__ import annotations

import json

import pytest
from kvd_client.results import ForgetResult
from stub_client import only_object

from kvd.cli import app
from kvd.cli.exits import Exit


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
