"""Flags that say what an answer must match: what reaches the client, and what is refused before it."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from kvd.cli.answers import generation_options


def given(*flags):
    """The options that a command gets, or its exit code and message."""
    seen = {}

    @click.command()
    @click.option("--json", "as_json", is_flag=True)
    @generation_options
    def command(*, options, as_json):
        seen.update(options)

    result = CliRunner().invoke(command, flags)
    return seen if result.exit_code == 0 else (result.exit_code, result.output)


def test_each_flag_is_the_clients_option(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert given("--json-schema", '{"type": "array"}') == {"json_schema": '{"type": "array"}'}
    assert given("--json-schema", f"@{schema}") == {"json_schema": '{"type": "object"}'}
    assert given("--regex", "@[a-z]+") == {"regex": "@[a-z]+"}
    assert given("--choice", "yes", "--choice", "no") == {"choice": ("yes", "no")}
    assert given("--lark", 'start: "a"') == {"lark": 'start: "a"'}
    assert given("--any-json") == {"json": True}
    assert given() == {}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--regex", "a", "--choice", "b"), ("--regex and --choice", "one of them at most")),
        (("--any-json", "--json-schema", "{}"), ("--json-schema and --any-json",)),
        (("--lark", "@/nowhere/at/all"), ("/nowhere/at/all", "No such file")),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(flags, words):
    code, output = given(*flags)
    assert code == 2
    assert all(word in output for word in words)


def test_a_file_that_is_no_text_is_named(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    code, output = given("--json-schema", f"@{binary}")
    assert code == 2
    assert "binary" in output
