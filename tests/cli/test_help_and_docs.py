"""Help that costs nothing, and a manual that can't fall behind the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvd.cli import app, reference
from kvd.cli.exits import Exit
from kvd.settings import loader as settings

MANUAL = Path(__file__).parents[2] / "docs" / "operations.md"
HEAVY = {"torch", "zmq", "structlog", "lmdb", "numpy", "tokenizers", "jinja2", "msgspec", "msgpack", "gguf", "urllib.request"}


def leaves(group: click.Group, path: tuple[str, ...] = ()):
    """Every command with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


PATHS = [path for path, _ in leaves(app.root)]


def test_the_commands_of_the_product_are_there():
    wanted = [
        "serve",
        "gateway",
        "pull",
        "generate",
        "chat",
        "tokenize",
        "pin",
        "unpin",
        "prefixes",
        "status",
        "stats",
        "ping",
        "checkpoint",
        "drain",
        "doctor",
        "version",
    ]
    assert {*((word,) for word in wanted), ("store", "check"), ("store", "dump")} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_explains_itself(path, capsys):
    assert app.main([*path, "--help"]) == Exit.OK
    text = capsys.readouterr().out
    assert f"kvd {' '.join(path)}" in text
    command = dict(leaves(app.root))[path]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.opts} of {path} has no help"
            assert parameter.opts[0] in text


@pytest.mark.parametrize("path", [(), ("store",)], ids=" ".join)
def test_no_line_of_a_groups_help_is_cut(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    app.main([*path, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and line.endswith("...")] == []


READERS = [path for path in PATHS if path not in {("serve",), ("gateway",), ("store", "dump")}]


@pytest.mark.parametrize("path", READERS, ids=" ".join)
def test_every_command_speaks_json(path):
    command = dict(leaves(app.root))[path]
    assert any("--json" in parameter.opts for parameter in command.params)


def test_serve_has_a_flag_for_every_key(capsys):
    app.main(["serve", "--help"])
    text = capsys.readouterr().out
    for key in settings.all_keys():
        assert key.flag in text
    for flag in [
        "--model",
        "--state-dir",
        "--listen",
        "--config",
        "--device",
        "--dtype",
        "--kv-memory",
        "--executor",
        "--frontend",
        "--store-max-bytes",
        "--print-config",
    ]:
        assert f"{flag} " in text


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_flags_say_what_they_do_not_do_alone(command, capsys):
    assert app.main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--echo Print the prompt before the answer; with --json it stands under `prompt`" in text
    assert "--num-draft N Where tokens are proposed: so many in a step, at most." in text


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["nonsense"], ["serve", "--print-config"]], ids=" ".join)
def test_nothing_heavy_is_imported(arguments):
    allowed = {"msgspec"} if arguments[0] == "serve" else set()
    code = f"""
import sys
import kvd.cli
from kvd.cli.app import main
main({arguments!r})
print(sorted(sys.modules.keys() & {sorted(HEAVY - allowed)!r}), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_module_is_the_script():
    done = subprocess.run([sys.executable, "-m", "kvd", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.USAGE
    assert "nonsense" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["serve", "--help"], ["version"]], ids=" ".join)
def test_a_reader_that_went_away_is_no_traceback(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvd", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == Exit.BROKEN_PIPE
    assert done.stderr == ""


def test_the_manuals_tables_are_those_of_the_code():
    text = MANUAL.read_text("utf-8")
    assert text == reference.rewritten(text), "run: python -m kvd.cli.reference docs/operations.md"


def test_the_manual_names_every_command_key_code_and_variable():
    text = MANUAL.read_text("utf-8")
    for path in PATHS:
        assert f"kvd {' '.join(path)}" in text.replace("\n", " "), f"docs/operations.md does not name kvd {' '.join(path)}"
    for key in settings.all_keys():
        assert f"| `{key.name}` |" in text
    for code in Exit:
        assert f"| {int(code)} |" in text
    for variable in settings.OTHER_VARIABLES:
        assert f"`{variable}`" in text


def test_a_manual_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="commands"):
        reference.rewritten("# Operations\n")
