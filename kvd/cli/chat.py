"""``kvd chat``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from kvd.cli.answers import CutShortError, answer, generation_options
from kvd.cli.connect import Target, json_option, target_options
from kvd.cli.prompts import as_messages, prompt_or_stdin, system_options

if TYPE_CHECKING:
    from kvd_client.client import Client


@click.command()
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Ask this one question and end; - reads it from standard input.")
@system_options
@generation_options
@click.option("--stream/--no-stream", default=None, help="Print the answer as it comes. [default: on a terminal]")
@json_option
@target_options
def command(
    *, target: Target, prompts: tuple[str, ...], system: str | None, options: dict[str, Any], stream: bool | None, as_json: bool
) -> None:
    """Talk with the model through its chat template.

    On a terminal a conversation: Ctrl-C stops an answer, Ctrl-D or Ctrl-C at the prompt ends. With --prompt, or a question on standard
    input, one answer.
    """
    if len(prompts) > 1:
        raise click.UsageError("a chat has one --prompt; kvd generate takes several")
    prompt = prompts[0] if prompts else None
    is_conversation = prompt is None and sys.stdin.isatty()
    if is_conversation and as_json:
        raise click.UsageError("--json needs --prompt")
    if stream is None:
        stream = sys.stdout.isatty() and not as_json and options.get("n", 1) == 1
    if (stream or is_conversation) and options.get("n", 1) > 1:
        raise click.UsageError("a stream or a conversation shows one answer; leave --n away")
    text = "" if is_conversation else prompt_or_stdin(prompt)
    with target.client(needs_ready=True) as client:
        if is_conversation:
            _converse(client, system, options)
        else:
            answer(client, as_messages(system, text), options, stream=stream, as_json=as_json)


def _converse(client: Client, system: str | None, options: dict[str, Any]) -> None:
    import readline  # noqa: F401  line editing and history for input()

    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system is not None else []
    while True:
        try:
            question = input("> ")
        except EOFError:
            click.echo()
            return
        if not question.strip():
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            completion = answer(client, asked, options, stream=True, as_json=False)
        except KeyboardInterrupt:
            click.echo("(stopped)", err=True)
            continue
        except CutShortError:
            click.echo("(cut short by the daemon's drain; ask again)", err=True)
            continue
        messages = [*asked, {"role": "assistant", "content": completion.text}]
