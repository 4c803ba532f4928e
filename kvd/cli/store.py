"""``kvd store check`` and ``kvd store dump``: look at a state directory while no daemon uses it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvd.cli import settings
from kvd.cli.exits import CommandError, Exit
from kvd.cli.output import print_facts, print_json

_state_dir_option = click.option(
    "--state-dir", metavar="DIR", type=click.Path(path_type=Path), help="State directory; otherwise the one that `kvd serve` would use."
)


@click.group()
def group() -> None:
    """Check or dump a state directory that no daemon uses at the moment."""


@group.command("check")
@_state_dir_option
@click.option("--repair", is_flag=True, help="Set damaged parts aside, as a daemon's start would.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check_command(state_dir: Path | None, repair: bool, as_json: bool) -> int:
    """Read every record, node and block and verify all checksums. Exit code 65 if there is damage."""
    from kvd.storage.tools import check_store

    _quiet_logs()
    report = check_store(_existing(state_dir), repair=repair)
    if as_json:
        print_json(report)
    else:
        print_facts([(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)) for name, value in report.items()])
    return Exit.OK if report["ok"] else Exit.DATA


@group.command("dump")
@_state_dir_option
def dump_command(state_dir: Path | None) -> None:
    """Print what is kept, one JSON object a line: recipes, WAL records, nodes and blocks (without their bytes)."""
    from kvd.storage.tools import dump_store

    _quiet_logs()
    for entry in dump_store(_existing(state_dir)):
        print_json(entry)


def _existing(state_dir: Path | None) -> Path:
    """The state directory that is meant.

    Raises:
        CommandError: it does not exist.
    """
    path = state_dir or settings.load({}, environ=os.environ).config.storage.state_dir
    if not path.is_dir():
        raise CommandError(f"there is no state directory {path}", Exit.NO_INPUT)
    return path


def _quiet_logs() -> None:
    from kvd.observe import logging

    logging.configure(level="warning")
