"""How the commands fail: one line or a traceback, and an exit code that is documented."""

from __future__ import annotations

import pytest
from kvd_client.errors import ConnectionLost, KvdError, Timeout

from kvd.cli import app
from kvd.cli.exits import MEANINGS, Exit, exit_of_failure
from kvd.types import RETRYABLE_CODES, ErrorCode


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
