"""``kvd generate``."""

from __future__ import annotations

from typing import Any

import click

from kvd.cli.answers import answer, answer_each, generation_options
from kvd.cli.connect import Target, json_option, target_options
from kvd.cli.prompts import as_messages, prompt_or_stdin, system_options


@click.command()
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="The text to go on from; without it, or for -, standard input. May be repeated: all are answered, in this order.",
)
@system_options
@generation_options
@click.option("--stream", is_flag=True, help="Print the text as it comes; with --json on standard error.")
@json_option
@target_options
def command(*, target: Target, prompts: tuple[str, ...], system: str | None, options: dict[str, Any], stream: bool, as_json: bool) -> None:
    """Complete a text, or several.

    The prompt is sent as it is; with --system or --system-file it becomes the user's turn of a conversation, and the model's chat
    template is applied (as `kvd chat` does). Several prompts run side by side; with --json each answer is an object on a line of its own.
    """
    if stream and options.get("n", 1) > 1:
        raise click.UsageError("--stream shows one answer; leave --n away")
    if stream and len(prompts) > 1:
        raise click.UsageError("--stream shows one answer; give one --prompt")
    if prompts.count("-") > 1:
        raise click.UsageError("standard input is one prompt; give --prompt - once")
    if system is None and "tools" in options:
        raise click.UsageError("--tools is for the chat template of a conversation: use kvd chat, or give --system")
    texts = [prompt_or_stdin(prompt) for prompt in prompts or (None,)]
    asked = [text if system is None else as_messages(system, text) for text in texts]
    with target.client(needs_ready=True) as client:
        if len(asked) == 1:
            answer(client, asked[0], options, stream=stream, as_json=as_json)
        else:
            answer_each(client, asked, options, as_json=as_json)
