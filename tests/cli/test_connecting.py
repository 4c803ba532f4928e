"""Where the commands connect and with which keys, and what they do while the daemon is not ready."""

from __future__ import annotations

import time

import pytest
from stub_client import only_object

from kvd.cli import app, connect
from kvd.cli.exits import Exit


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
