"""The flags that say what an answer must match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class TextOrFile(click.ParamType):
    """A text, or ``@FILE`` for what a file holds (standard input is the prompt's)."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not text.startswith("@"):
            return text
        try:
            return Path(text[1:]).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"{text[1:]}: {getattr(error, 'strerror', None) or error}", param, ctx)


OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--json-schema", {"type": TextOrFile(), "metavar": "JSON|@FILE", "help": "The answer is a JSON value that this schema describes."}),
    ("--regex", {"metavar": "REGEX", "help": "The answer matches this regular expression as a whole."}),
    ("--choice", {"multiple": True, "metavar": "TEXT", "help": "The answer is this text, or another that is given so; repeat it."}),
    ("--lark", {"type": TextOrFile(), "metavar": "GRAMMAR|@FILE", "help": "The answer matches this grammar, in Lark or GBNF."}),
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
