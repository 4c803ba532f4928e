"""``kvd tokenize``."""

from __future__ import annotations

import click

from kvd.cli.connect import Target, json_option, target_options
from kvd.cli.output import print_json
from kvd.cli.prompts import as_messages, prompt_or_stdin, system_options


@click.command()
@click.option("--prompt", metavar="TEXT", help="The text; without it, or for -, standard input.")
@system_options
@json_option
@target_options
def command(target: Target, prompt: str | None, system: str | None, as_json: bool) -> None:
    """Show a text's token ids, as `kvd generate` with the same flags would send them to the model."""
    text = prompt_or_stdin(prompt)
    with target.client(needs_ready=True) as client:
        token_ids = client.tokenize(text) if system is None else client.tokenize(messages=as_messages(system, text))
    if as_json:
        print_json({"count": len(token_ids), "token_ids": list(token_ids)})
    else:
        click.echo(" ".join(map(str, token_ids)))
