"""``kvd pin``, ``kvd unpin`` and ``kvd prefixes``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvd.cli.connect import Target, json_option, target_options
from kvd.cli.exits import CommandError, Exit
from kvd.cli.output import print_json, print_rows
from kvd.cli.prompts import read_text, system_options
from kvd.settings.units import human_duration


@click.command()
@click.argument("name")
@system_options
@click.option(
    "--messages-file", metavar="FILE", type=click.Path(path_type=Path), help="JSON array of messages that conversations begin with."
)
@click.option("--prompt-file", metavar="FILE", type=click.Path(path_type=Path), help="Raw text, for `kvd generate` without a template.")
@click.option("--priority", type=click.IntRange(0, 100), default=50, show_default=True, metavar="N", help="Larger comes back earlier.")
@click.option("--ttl", type=click.FloatRange(min=0), default=0.0, metavar="S", help="Unpin by itself after so many seconds; 0: never.")
@click.option("--cache-salt", default="", metavar="TEXT", help="Share the prefix only with requests of this salt.")
@click.option("--adapter", default="", metavar="NAME", help="For requests with this LoRA adapter, as it is at each start.")
@json_option
@target_options
def pin_command(
    *,
    target: Target,
    name: str,
    system: str | None,
    messages_file: Path | None,
    prompt_file: Path | None,
    priority: int,
    ttl: float,
    cache_salt: str,
    adapter: str,
    as_json: bool,
) -> None:
    """Compute a prefix, keep it from eviction, write it to disk and bring it back first after a restart.

    Returns when that is durable. Give exactly one of --system, --system-file, --messages-file, --prompt-file.
    """
    if sum(given is not None for given in (system, messages_file, prompt_file)) != 1:
        raise click.UsageError("give exactly one of --system, --system-file, --messages-file, --prompt-file")
    prompt = read_text(prompt_file) if prompt_file is not None else None
    messages = [{"role": "system", "content": system}] if system is not None else read_messages(messages_file) if messages_file else None
    with target.client(needs_ready=True) as client:
        result = client.pin(name, prompt, messages=messages, cache_salt=cache_salt, adapter=adapter, priority=priority, ttl_s=ttl)
    if as_json:
        print_json({**result.details, "name": name})
    else:
        details = result.details
        durable = "recipe and bytes are" if details.get("durable") == "recipe+bytes" else "the recipe is"
        click.echo(f"pinned {name}: {details.get('tokens')} tokens, {details.get('blocks')} blocks; {durable} on disk")


@click.command()
@click.argument("name")
@json_option
@target_options
def unpin_command(*, target: Target, name: str, as_json: bool) -> None:
    """Let a pinned prefix go. Its blocks stay cached until the room is needed."""
    with target.client(needs_ready=True) as client:
        client.unpin(name)
    if as_json:
        print_json({"name": name, "unpinned": True})
    else:
        click.echo(f"unpinned {name}")


@click.command()
@json_option
@target_options
def prefixes_command(*, target: Target, as_json: bool) -> None:
    """List the pins and the hottest prefixes: tokens, hits, where they are (memory, disk), age."""
    with target.client(needs_ready=True) as client:
        report = client.prefixes()
    if as_json:
        print_json(report)
        return
    pins = report.get("pins", [])
    click.echo(f"{len(pins)} pins")
    if pins:
        print_rows(("NAME", "TOKENS", "HITS", "STATE", "RESIDENCY", "PRIORITY", "AGE", "LEFT"), [_pin_row(pin) for pin in pins])
    click.echo("\nhottest prefixes")
    print_rows(("TOKENS", "HITS", "RESIDENCY", "AGE"), [_prefix_row(prefix) for prefix in report.get("hottest", [])])


def _pin_row(pin: Mapping[str, Any]) -> tuple[str, ...]:
    created = pin.get("created_unix_s")
    age = human_duration(max(0.0, time.time() - created)) if created else "-"
    expires_in_s = pin.get("expires_in_s")
    left = "-" if expires_in_s is None else human_duration(expires_in_s)
    state = f"{pin.get('state', '-')}: {pin['reason']}" if pin.get("reason") else pin.get("state", "-")
    return (pin["name"], *_cells(pin, "tokens", "hits"), state, *_cells(pin, "residency", "priority"), age, left)


def _prefix_row(prefix: Mapping[str, Any]) -> tuple[str, ...]:
    age = prefix.get("age_s")
    return (*_cells(prefix, "tokens", "hits", "residency"), "-" if age is None else human_duration(age))


def _cells(entry: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    return tuple(str(entry.get(name, "-")) for name in names)


def read_messages(path: Path) -> list[dict[str, Any]]:
    """The messages of a JSON file.

    Raises:
        CommandError: it is no array of objects with a role.
    """
    try:
        messages = json.loads(read_text(path))
    except ValueError as error:
        raise CommandError(f"{path} is not JSON: {error}", Exit.DATA) from error
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in messages)
    ):
        raise CommandError(f'{path}: expected a JSON array of messages such as {{"role": "system", "content": "…"}}', Exit.DATA)
    return messages
