"""The tables of docs/operations.md, made from the code they describe: ``python -m kvd.cli.reference docs/operations.md`` rewrites them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from kvd.cli.app import COMMANDS
from kvd.cli.exits import MEANINGS
from kvd.settings import loader as settings


def commands_table() -> str:
    """Every command and its line of help."""
    return _table(("Command", "What it does"), ((f"`kvd {name}`", entry.summary) for name, entry in COMMANDS.items()))


def keys_tables() -> str:
    """Every configuration key by section: flag, default, what is allowed, meaning. The variable is the flat name in capitals, after ``KVD_``."""
    tables = []
    for section, keys in groupby(settings.all_keys(), key=lambda key: key.section):
        rows = ((f"`{key.name}`", _default(key), key.rule.allowed, key.doc) for key in keys)
        tables.append(f"### [{section}]\n\n{_table(('Key', 'Default', 'Allowed', 'Meaning'), rows)}")
    return "\n\n".join(tables)


def exits_table() -> str:
    """Every exit code and its meaning."""
    return _table(("Code", "Meaning"), ((str(int(code)), meaning) for code, meaning in MEANINGS.items()))


TABLES: Mapping[str, Callable[[], str]] = MappingProxyType({"commands": commands_table, "keys": keys_tables, "exits": exits_table})


def rewritten(document: str) -> str:
    """The document with each part between ``<!-- NAME -->`` and ``<!-- /NAME -->`` made anew.

    Raises:
        ValueError: a table has no place in the document.
    """
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(document):
            raise ValueError(f"the document has no place for the table {name!r}")
        table = make()
        document = pattern.sub(lambda match, table=table: f"{match[1]}{table}{match[2]}", document)  # type: ignore[misc]  # re's stub
    return document


def _default(key: settings.Key) -> str:
    text = settings.toml_value(key, key.default)
    return "" if text in {'""', "[]"} else f"`{text}`"


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text("utf-8")), "utf-8")
