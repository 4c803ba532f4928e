"""``kvd forget``."""

from __future__ import annotations

from pathlib import Path

import click

from kvd.cli.connect import Target, json_option, target_options
from kvd.cli.output import print_json
from kvd.cli.pins import read_messages
from kvd.cli.prompts import read_text, system_options


@click.command()
@system_options
@click.option(
    "--messages-file", metavar="FILE", type=click.Path(path_type=Path), help="JSON array of messages that conversations begin with."
)
@click.option("--prompt-file", metavar="FILE", type=click.Path(path_type=Path), help="Raw text that prompts begin with.")
@click.option("--cache-salt", metavar="TEXT", help="What was cached under this salt; with a prefix: the prefix under it.")
@click.option("--tenant", metavar="NAME", help="Another tenant than your own (operators: by ipc as root or the daemon's user).")
@click.option("--all", "everything", is_flag=True, help="Everything of the tenant, whatever the salts.")
@json_option
@target_options
def forget_command(
    *,
    target: Target,
    system: str | None,
    messages_file: Path | None,
    prompt_file: Path | None,
    cache_salt: str | None,
    tenant: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Have a prefix, a salt or a tenant leave memory and the state directory for good, pins included.

    Returns when that is durable. Give one of --system, --system-file, --messages-file, --prompt-file, with --cache-salt where the prefix was cached
    under one; or --cache-salt alone; or --all.
    """
    num_prefixes = sum(given is not None for given in (system, messages_file, prompt_file))
    if num_prefixes > 1:
        raise click.UsageError("give one prefix")
    if everything and (num_prefixes or cache_salt is not None):
        raise click.UsageError("--all goes with --tenant alone")
    if not (everything or num_prefixes or cache_salt is not None):
        raise click.UsageError("give a prefix, --cache-salt or --all")
    prompt = read_text(prompt_file) if prompt_file is not None else None
    messages = [{"role": "system", "content": system}] if system is not None else read_messages(messages_file) if messages_file else None
    with target.client(needs_ready=True) as client:
        result = client.forget(prompt, messages=messages, cache_salt=cache_salt, tenant=tenant, everything=everything)
    if as_json:
        print_json({"blocks": result.num_blocks, "pins": result.num_pins})
    elif not (result.num_blocks or result.num_pins):
        click.echo("nothing was known of it; nothing of it is in the state directory")
    else:
        click.echo(f"forgotten: {result.num_blocks} blocks, {result.num_pins} pins; nothing of it is in the state directory")
