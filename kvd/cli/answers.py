"""Asking for a generation and printing it: shared by ``kvd generate`` and ``kvd chat``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvd.cli.output import print_json

if TYPE_CHECKING:
    from kvd_client.client import Client
    from kvd_client.results import Choice, Completion

_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--max-tokens", {"type": click.IntRange(min=1), "metavar": "N", "help": "Most output tokens; otherwise what fits the model."}),
    ("--temperature", {"type": click.FloatRange(min=0), "metavar": "T", "help": "0 is greedy. [daemon's default: 1]"}),
    ("--top-p", {"type": click.FloatRange(min=0, max=1), "metavar": "P", "help": "Keep the most likely tokens that make up P."}),
    ("--top-k", {"type": click.IntRange(min=0), "metavar": "K", "help": "Keep the K most likely tokens; 0: all."}),
    (
        "--min-p",
        {"type": click.FloatRange(min=0, max=1), "metavar": "P", "help": "Keep tokens at least P times as likely as the likeliest."},
    ),
    ("--repetition-penalty", {"type": click.FloatRange(min=0, min_open=True), "metavar": "X", "help": "1 is none."}),
    ("--seed", {"type": int, "metavar": "S", "help": "The same seed gives the same tokens."}),
    ("--stop", {"multiple": True, "metavar": "TEXT", "help": "End the answer before this text; may be repeated."}),
    ("--ignore-eos", {"is_flag": True, "help": "Go on after the end-of-sequence token."}),
    ("--n", {"type": click.IntRange(min=1), "metavar": "N", "help": "So many answers to the same prompt."}),
)


def generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling flags; the command gets those that were given as ``options``, as the client library takes them."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        names = [flag.removeprefix("--").replace("-", "_") for flag, _ in _OPTIONS]
        values = {name: given.pop(name) for name in names}
        options = {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
        return command(options=options, **given)

    for flag, attributes in reversed(_OPTIONS):
        wrapped = click.option(flag, **attributes)(wrapped)
    return wrapped


def answer(client: Client, prompt: str | list[dict[str, str]], options: dict[str, Any], *, stream: bool, as_json: bool) -> Completion:
    """Generate from a text or from chat messages, and print the answer.

    With ``stream`` the text appears as it comes: on standard output, or with ``as_json`` on standard error, so that standard output holds
    one object in any case.
    """
    completion: Completion
    if not stream:
        completion = client.generate(prompt, **options) if isinstance(prompt, str) else client.chat(prompt, **options)
    else:
        begun = client.generate(prompt, stream=True, **options) if isinstance(prompt, str) else client.chat(prompt, stream=True, **options)
        try:
            with begun as chunks:
                for chunk in chunks:
                    click.echo(chunk.text, nl=False, err=as_json)
        finally:
            click.echo(err=as_json)
        completion = chunks.completion
    if as_json:
        print_json(completion_object(completion))
    elif not stream:
        for choice in completion.choices:
            click.echo((f"[{choice.index}] " if len(completion.choices) > 1 else "") + choice.text)
    return completion


def completion_object(completion: Completion) -> dict[str, Any]:
    """The object of ``--json``; with several choices they are listed under ``choices``."""
    usage, timings = completion.usage, completion.timings
    choices = [_choice_object(choice) for choice in completion.choices]
    return {
        **(choices[0] if len(choices) == 1 else {"choices": choices}),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "restored_tokens": usage.restored_tokens,
            "recomputed_tokens": usage.recomputed_tokens,
            "completion_tokens": usage.completion_tokens,
        },
        "timings": {"queue_ms": timings.queue_ms, "ttft_ms": timings.ttft_ms, "total_ms": timings.total_ms},
    }


def _choice_object(choice: Choice) -> dict[str, Any]:
    return {"text": choice.text, "token_ids": list(choice.token_ids), "finish_reason": choice.finish_reason}
