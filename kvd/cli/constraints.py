"""The flags that say what an answer must match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


def _text_or_file(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """A text, or ``@FILE`` for what a file holds (standard input is the prompt's)."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value[1:]}: {getattr(error, 'strerror', None) or error}") from error


OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--json-schema",
        {"callback": _text_or_file, "metavar": "JSON|@FILE", "help": "The answer is a JSON value that this schema describes."},
    ),
    ("--regex", {"metavar": "REGEX", "help": "The answer matches this regular expression as a whole."}),
    ("--choice", {"multiple": True, "metavar": "TEXT", "help": "The answer is this text, or another that is given so; repeat it."}),
    ("--lark", {"callback": _text_or_file, "metavar": "GRAMMAR|@FILE", "help": "The answer matches this grammar, in Lark or GBNF."}),
    ("--any-json", {"is_flag": True, "help": "The answer is any JSON value."}),
)
NAMES = {"any_json": "json"}
"""Flags whose option of the client has another name."""


def check(options: dict[str, Any]) -> None:
    """At most one of them.

    Raises:
        UsageError: several are given.
    """
    given = [flag for flag, _ in OPTIONS if (name := flag[2:].replace("-", "_")) in options or NAMES.get(name) in options]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)}: an answer matches one of them at most")
