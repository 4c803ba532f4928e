"""``kvd store export`` and ``kvd store import``: carry pins from one machine to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvd.cli.exits import CommandError, Exit
from kvd.cli.output import print_facts, print_json
from kvd.cli.store import existing, group, shown, storage_errors, where
from kvd.settings import loader as settings

__all__ = ["group"]


@group.command("export")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@where
@click.option("--pin", "names", metavar="NAME", multiple=True, help="Only this pin; may be given several times.")
@click.option("--no-bytes", is_flag=True, help="Recipes alone: small, and computed anew where they are imported.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_command(
    *, file: Path, state_dir: Path, key_file: str, names: tuple[str, ...], no_bytes: bool, force: bool, as_json: bool
) -> int:
    """Write pins, and the bytes of their blocks, to FILE. Also beside a live daemon.

    FILE holds prompts in clear and is readable by its owner alone; guard it like the state directory.
    """
    if file.exists() and not force:
        raise CommandError(f"{file} exists; --force replaces it", Exit.CANNOT_CREATE)
    with storage_errors():
        from kvd.storage.encryption import seeing_codec
        from kvd.storage.pin_export import export_pins
        from kvd.storage.pin_sets import NoSuchPinError

        existing(state_dir)
        try:
            report = export_pins(
                state_dir, file, names=names, with_bytes=not no_bytes, open_codec=lambda: seeing_codec(state_dir, key_file)
            )
        except NoSuchPinError as error:
            raise CommandError(str(error), Exit.NO_INPUT) from error
    _print(report, as_json=as_json)
    return Exit.OK


@group.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--state-dir", metavar="DIR", help="State directory; otherwise the one that `kvd serve` would use. Made if it is not there.")
@click.option("--config", "config_file", metavar="FILE", type=click.Path(path_type=Path), help="TOML file; $KVD_CONFIG otherwise.")
@click.option(
    "--store-encryption-key-file", "key_file", metavar="FILE", help="The directory's key; otherwise the one that `kvd serve` would use."
)
@click.option("--no-bytes", is_flag=True, help="Recipes alone; the next start computes them.")
@click.option("--replace", "replace_pins", is_flag=True, help="Replace pins whose names are taken; otherwise they stay as they are.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_command(
    *, file: Path, state_dir: str | None, key_file: str | None, config_file: Path | None, no_bytes: bool, replace_pins: bool, as_json: bool
) -> int:
    """Take the pins of FILE into a state directory that no daemon holds.

    FILE is checked to its end before anything is changed. Bytes of another model, dtype or format are refused and counted; recipes never are: the next
    start computes what has no bytes. Import only what you trust: that bytes belong to their tokens can't be checked.
    """
    config = settings.load({"state_dir": state_dir, "store_encryption_key_file": key_file}, config_file=config_file).config.storage
    if not file.exists():
        raise CommandError(f"there is no file {file}", Exit.NO_INPUT)
    with storage_errors():
        from kvd.storage.pin_import import import_pins

        report = import_pins(config, file, replace_pins=replace_pins, with_bytes=not no_bytes)
    _print(report, as_json=as_json)
    return Exit.OK


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        print_facts([(name, shown(value)) for name, value in report.items()])
