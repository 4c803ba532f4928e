"""``kvd version``."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from kvd.cli.output import print_json


def version() -> str:
    """The installed version of kvd."""
    try:
        return metadata.version("kvd")
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show the version of kvd and, with --json, of its Python. `kvd --version` does it too."""
    if as_json:
        print_json({"version": version(), "python": platform.python_version()})
    else:
        click.echo(f"kvd {version()}")
