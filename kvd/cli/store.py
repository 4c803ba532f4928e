"""``kvd store check``, ``dump`` and ``stat``: look into a state directory. ``export`` and ``import`` are in ``store_transfer``, ``keygen`` and ``rekey`` in ``store_keys``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvd.cli.exits import CommandError, Exit
from kvd.cli.output import print_facts, print_json
from kvd.settings import loader as settings

_PARTS = ("recipes", "wal", "kv", "lock")
"""What a state directory holds, at least one of them (docs/storage-format.md)."""


def where(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--state-dir``, ``--store-encryption-key-file`` and ``--config``; the command gets the directory as ``state_dir`` and the key's file as ``key_file``."""

    @click.option(
        "--state-dir",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="State directory; otherwise the one that `kvd serve` would use.",
    )
    @click.option("--config", "config_file", metavar="FILE", type=click.Path(path_type=Path), help="TOML file; $KVD_CONFIG otherwise.")
    @click.option(
        "--store-encryption-key-file", "key_file", metavar="FILE", help="The directory's key; otherwise the one that `kvd serve` would use."
    )
    @functools.wraps(command)
    def wrapped(*, state_dir: Path | None, config_file: Path | None, key_file: str | None, **rest: Any) -> Any:
        if state_dir is None or (key_file is None and (state_dir / "keys").exists()):
            configured = settings.load({}, config_file=config_file).config.storage
            state_dir = state_dir or configured.state_dir
            key_file = configured.store_encryption_key_file if key_file is None else key_file
        return command(state_dir=state_dir, key_file=key_file or "", **rest)

    return wrapped


@click.group()
def group() -> None:
    """Check, measure, dump, export or import what a state directory keeps; make or change the key that encrypts it."""


@group.command("check")
@where
@click.option("--repair", is_flag=True, help="Do what a start would do and remove what fails its checks; not beside a live daemon.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check_command(state_dir: Path, key_file: str, repair: bool, as_json: bool) -> int:
    """Read every record, node and block and verify all checksums. Exit code 65 if there is damage.

    Without --repair nothing is written, also beside a live daemon. With it the report is that of the repaired directory. Of an encrypted directory
    without its key only the structure is checked.
    """
    with storage_errors():
        from kvd.storage.tools import check_store

        report = check_store(existing(state_dir), repair=repair, key_file=key_file)
    if as_json:
        print_json(report)
    else:
        print_facts([(name, shown(value)) for name, value in report.items()])
    return Exit.OK if report["ok"] else Exit.DATA


@group.command("dump", short_help="Print what is kept, one JSON object a line.")
@where
def dump_command(state_dir: Path, key_file: str) -> None:
    """Print what is kept, one JSON object a line: recipes, WAL records, nodes and blocks (without their bytes)."""
    with storage_errors():
        from kvd.storage.tools import dump_store

        for entry in dump_store(existing(state_dir), key_file=key_file):
            print_json(entry)


@group.command("stat", short_help="Print how big each part is on disk and what it counts.")
@where
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stat_command(state_dir: Path, key_file: str, as_json: bool) -> int:
    """Print how big each part is on disk and what it counts, without reading the blocks. Also beside a live daemon."""
    with storage_errors():
        from kvd.storage.encryption import reading_encryption
        from kvd.storage.store_stat import stat_store

        report = stat_store(existing(state_dir), reading_encryption(state_dir, key_file).codec)
    if as_json:
        print_json(report)
    else:
        print_facts([(name, shown(value)) for name, value in report.items()])
    return Exit.OK


def existing(path: Path) -> Path:
    """The state directory, once there is something of kvd in it.

    Raises:
        CommandError: it does not exist, or nothing in it is kvd's.
    """
    if not path.is_dir():
        raise CommandError(f"there is no state directory {path}", Exit.NO_INPUT)
    if not any((path / name).exists() for name in _PARTS):
        raise CommandError(f"no kvd state in {path}", Exit.NO_INPUT)
    return path


@contextmanager
def storage_errors() -> Iterator[None]:
    """Quiet logs, and the storage room's errors as exit codes."""
    from kvd.observe import logging
    from kvd.storage.errors import EncryptionKeyError, StateLockedError, StorageError, StoreBusyError
    from kvd.wal.record import WalFormatError

    logging.configure(level="warning")
    try:
        yield
    except (StateLockedError, StoreBusyError) as error:
        raise CommandError(str(error), Exit.TEMPORARY) from error
    except EncryptionKeyError as error:
        raise CommandError(str(error), Exit.CONFIG) from error
    except (StorageError, WalFormatError) as error:
        raise CommandError(str(error), Exit.DATA) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{error.filename or 'the state directory'}: {error.strerror or error}", Exit.IO) from error


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(shown, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items()) or "none"
    return "none" if value in (None, "") else str(value)
