"""kvd store check and dump: reports and exit codes, the tools themselves stubbed (tests/storage tests those)."""

from __future__ import annotations

import json
import sys
import types

import pytest

from kvd.cli import app
from kvd.cli.exits import Exit
from kvd.storage.errors import EncryptionKeyError, StateLockedError, UnknownFormatError

REPORT = {
    "ok": True,
    "state_dir": "/s",
    "in_use": False,
    "recipe_generations": [{"generation": 3, "recipes": 2}],
    "blocks": 4,
    "problems": [],
}


@pytest.fixture(autouse=True)
def _state(tmp_path):
    (tmp_path / "recipes").mkdir()


@pytest.fixture
def tools(monkeypatch):
    """The stubbed tools: what they are called with, return and raise may be set by the test."""
    stub = types.SimpleNamespace(calls=[], report=REPORT, error=None)

    def check_store(state_dir, *, repair=False, key_file=""):
        stub.calls.append((state_dir, repair, *filter(None, [key_file])))
        if stub.error:
            raise stub.error
        return stub.report

    def dump_store(state_dir, *, key_file=""):
        stub.calls.append((state_dir, None, *filter(None, [key_file])))
        yield {"kind": "node", "hash": b"\xab"}
        if stub.error:
            raise stub.error
        yield {"kind": "block"}

    monkeypatch.setitem(sys.modules, "kvd.storage.tools", types.SimpleNamespace(check_store=check_store, dump_store=dump_store))
    monkeypatch.setattr("kvd.observe.logging.configure", lambda **_: None)
    return stub


def test_a_clean_store(tools, tmp_path, capsys):
    assert app.main(["store", "check", "--state-dir", str(tmp_path), "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out) == REPORT
    assert app.main(["store", "check", "--state-dir", str(tmp_path), "--repair"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "yes"]
    assert "recipe_generations  generation 3, recipes 2" in lines
    assert lines[-1].split() == ["problems", "none"]
    assert tools.calls == [(tmp_path, False), (tmp_path, True)]


def test_the_key_comes_from_the_flag_else_for_an_encrypted_directory_from_the_configuration(tools, tmp_path, monkeypatch):
    at = ["--state-dir", str(tmp_path)]
    monkeypatch.setenv("KVD_STORE_ENCRYPTION_KEY_FILE", "/keys/configured")
    app.main(["store", "check", *at])
    app.main(["store", "check", *at, "--store-encryption-key-file", "/keys/given"])
    (tmp_path / "keys").mkdir()
    app.main(["store", "check", *at])
    app.main(["store", "check", *at, "--store-encryption-key-file", "/keys/given"])
    app.main(["store", "dump", *at])
    assert [call[2:] for call in tools.calls] == [(), ("/keys/given",), ("/keys/configured",), ("/keys/given",), ("/keys/configured",)]


def test_empty_values_are_shown_as_none(tools, tmp_path, capsys):
    tools.report = {**REPORT, "recipe_generations": [], "kinds": {}, "current": None, "name": "", "blocks": 0}
    app.main(["store", "check", "--state-dir", str(tmp_path)])
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert [shown[name] for name in ("recipe_generations", "kinds", "current", "name", "problems")] == ["none"] * 5
    assert shown["blocks"] == "0"


def test_damage_exits_65(tools, tmp_path, capsys):
    tools.report = {**REPORT, "ok": False, "problems": ["block ab: checksum", "node cd: parent"]}
    assert app.main(["store", "check", "--state-dir", str(tmp_path)]) == Exit.DATA
    assert "block ab: checksum; node cd: parent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StateLockedError("in use by process 7"), Exit.TEMPORARY),
        (UnknownFormatError("format 9"), Exit.DATA),
        (EncryptionKeyError("not the key"), Exit.CONFIG),
        (PermissionError(13, "Permission denied", "/s/lock"), Exit.IO),
    ],
)
@pytest.mark.parametrize("command", ["check", "dump"])
def test_what_storage_refuses_is_one_line_and_a_code(tools, tmp_path, capsys, error, code, command):
    tools.error = error
    assert app.main(["store", command, "--state-dir", str(tmp_path)]) == code
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(error.args[0] if code != Exit.IO else "/s/lock: Permission denied") in message


def test_dump_is_one_object_a_line(tools, tmp_path, capsys):
    assert app.main(["store", "dump", "--state-dir", str(tmp_path)]) == Exit.OK
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"kind": "node", "hash": "ab"}, {"kind": "block"}]


def test_the_directory_is_the_one_that_serve_would_use(tools, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVD_STATE_DIR", str(tmp_path))
    assert app.main(["store", "check"]) == Exit.OK
    assert tools.calls == [(tmp_path, False)]
    monkeypatch.setenv("KVD_STATE_DIR", str(tmp_path / "none"))
    assert app.main(["store", "check"]) == Exit.NO_INPUT
    assert f"{tmp_path}/none" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["check"], ["check", "--repair"], ["dump"]], ids=" ".join)
def test_a_directory_of_other_things_is_refused_and_left_alone(tools, tmp_path, capsys, command):
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").touch()
    assert app.main(["store", *command, "--state-dir", str(other)]) == Exit.NO_INPUT
    assert capsys.readouterr().err == f"kvd: no kvd state in {other}\n"
    assert tools.calls == []
    assert [path.name for path in other.iterdir()] == ["cat.jpg"]


@pytest.mark.parametrize("command", ["check", "dump"])
def test_the_configuration_file_says_where(tools, tmp_path, monkeypatch, command):
    monkeypatch.delenv("KVD_STATE_DIR", raising=False)
    (tmp_path / "kvd.toml").write_text(f'[storage]\nstate_dir = "{tmp_path}"\n', encoding="utf-8")
    assert app.main(["store", command, "--config", str(tmp_path / "kvd.toml")]) == Exit.OK
    assert tools.calls[0][0] == tmp_path
