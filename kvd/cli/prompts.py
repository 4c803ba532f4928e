"""Where a prompt comes from: flags, files, standard input."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvd.cli.exits import CommandError, Exit


def system_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--system`` and ``--system-file``; the command gets the text, or None, as ``system``."""

    @click.option("--system", "system_text", metavar="TEXT", help="System prompt; the model's chat template is applied.")
    @click.option(
        "--system-file", metavar="FILE", type=click.Path(path_type=Path), help="File with the system prompt; - is standard input."
    )
    @functools.wraps(command)
    def wrapped(*, system_text: str | None, system_file: Path | None, **rest: Any) -> Any:
        if system_text is not None and system_file is not None:
            raise click.UsageError("--system and --system-file exclude each other")
        return command(system=read_text(system_file) if system_file is not None else system_text, **rest)

    return wrapped


def read_text(path: Path) -> str:
    """The content of a file, or of standard input for ``-``, exactly as it is.

    Raises:
        CommandError: it can't be read or is no UTF-8.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except FileNotFoundError as error:
        raise CommandError(f"{path}: no such file", Exit.NO_INPUT) from error
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", Exit.NO_INPUT) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(
            f"{'standard input' if str(path) == '-' else path} is no UTF-8: {error.reason} at byte {error.start}", Exit.DATA
        ) from error


def prompt_or_stdin(prompt: str | None) -> str:
    """The prompt of ``--prompt``; without it (or for ``-``) standard input, unless that is a terminal.

    Raises:
        UsageError: nothing was given.
    """
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("give --prompt TEXT, or the prompt on standard input")
    return read_text(Path("-"))


def as_messages(system: str | None, user: str) -> list[dict[str, str]]:
    """A conversation of a system prompt, if there is one, and a user's turn."""
    beginning = [{"role": "system", "content": system}] if system is not None else []
    return [*beginning, {"role": "user", "content": user}]
