"""How commands print: one JSON object, or aligned text. Data goes to standard output, messages to standard error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click


def print_json(data: Mapping[str, Any]) -> None:
    """One object on one line, as UTF-8."""
    click.echo(json.dumps(data, ensure_ascii=False, default=_plain))


def print_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with a header line; columns of numbers are right-aligned."""
    if not rows:
        click.echo("none")
        return
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    are_numbers = [all(cell[:1].isdigit() or cell == "-" for cell in column[1:]) for column in columns]
    for row in (header, *rows):
        cells = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, are_numbers, strict=True)]
        click.echo("  ".join(cells).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """A line per fact: its name, then its value."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{click.style(name.ljust(width), bold=True)}  {value}")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return str(value)
