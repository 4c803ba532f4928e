"""``kvd store keygen`` and ``kvd store rekey``: make and change the key that encrypts what is stored."""

from __future__ import annotations

from pathlib import Path

import click

from kvd.cli.exits import CommandError, Exit
from kvd.cli.output import print_facts, print_json
from kvd.cli.store import existing, storage_errors
from kvd.cli.store_transfer import group

__all__ = ["group"]

_FILE = click.Path(path_type=Path)


@group.command("keygen")
@click.argument("file", metavar="FILE", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def keygen_command(file: Path, as_json: bool) -> int:
    """Write a new random key to FILE, readable by its owner alone. An existing file is never replaced.

    Keep a copy where the state directory's backups are not: without the key nothing that it encrypts can be read.
    """
    with storage_errors():
        from kvd.storage.key_file import write_key_file

        try:
            write_key_file(file)
        except FileExistsError as error:
            raise CommandError(f"{file} exists; a key is never replaced", Exit.CANNOT_CREATE) from error
    if as_json:
        print_json({"file": str(file)})
    return Exit.OK


@group.command("rekey")
@click.option("--old", metavar="FILE", type=_FILE, required=True, help="The key that the directory is encrypted with.")
@click.option("--new", metavar="FILE", type=_FILE, required=True, help="The key that it shall be encrypted with.")
@click.option("--state-dir", metavar="DIR", type=_FILE, required=True, help="State directory, of a stopped daemon.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rekey_command(old: Path, new: Path, state_dir: Path, as_json: bool) -> int:
    """Have the key of NEW open what the key of OLD did. Quick: the tenants' keys are wrapped anew, what they encrypt stays as it is.

    Whoever had a copy of the directory and the old key can read that copy still.
    """
    with storage_errors():
        from kvd.storage.key_file import read_key_file
        from kvd.storage.keys_file import has_keys, rewrap_keys
        from kvd.storage.lock import StateLock

        old_key, new_key = read_key_file(old), read_key_file(new)
        if not has_keys(existing(state_dir)):
            raise CommandError(f"{state_dir} is not encrypted", Exit.CONFIG)
        lock = StateLock(state_dir)
        try:
            num_keys = rewrap_keys(state_dir, old_key, new_key)
        finally:
            lock.release()
    if as_json:
        print_json({"state_dir": str(state_dir), "keys": num_keys})
    else:
        print_facts([("keys wrapped anew", str(num_keys))])
    return Exit.OK
