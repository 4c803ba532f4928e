"""``kvd generate``."""

from __future__ import annotations

from typing import Any

import click

from kvd.cli.answers import answer, generation_options
from kvd.cli.connect import Target, json_option, target_options
from kvd.cli.prompts import as_messages, prompt_or_stdin, system_options


@click.command()
@click.option("--prompt", metavar="TEXT", help="The text to go on from; without it, or for -, standard input.")
@system_options
@generation_options
@click.option("--stream", is_flag=True, help="Print the text as it comes; with --json on standard error.")
@json_option
@target_options
def command(*, target: Target, prompt: str | None, system: str | None, options: dict[str, Any], stream: bool, as_json: bool) -> None:
    """Complete a text.

    The prompt is sent as it is; with --system or --system-file it becomes the user's turn of a conversation, and the model's chat
    template is applied (as `kvd chat` does).
    """
    if stream and options.get("n", 1) > 1:
        raise click.UsageError("--stream shows one answer; leave --n away")
    text = prompt_or_stdin(prompt)
    with target.client(needs_ready=True) as client:
        answer(client, text if system is None else as_messages(system, text), options, stream=stream, as_json=as_json)
