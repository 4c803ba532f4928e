"""Asking for a generation and printing it: shared by ``kvd generate`` and ``kvd chat``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvd.cli import constraints, drafting, outputs
from kvd.cli.exits import CommandError, Exit
from kvd.cli.output import print_json

if TYPE_CHECKING:
    from kvd_client.client import Client
    from kvd_client.results import Choice, Completion

_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--max-tokens", {"type": click.IntRange(min=1), "metavar": "N", "help": "Most output tokens; otherwise what fits the model."}),
    ("--min-tokens", {"type": click.IntRange(min=0), "metavar": "N", "help": "No end of sequence and no stop token id before so many."}),
    ("--temperature", {"type": click.FloatRange(min=0), "metavar": "T", "help": "0 is greedy. [daemon's default: 1]"}),
    ("--top-p", {"type": click.FloatRange(min=0, max=1), "metavar": "P", "help": "Keep the most likely tokens that make up P."}),
    ("--top-k", {"type": click.IntRange(min=0), "metavar": "K", "help": "Keep the K most likely tokens; 0: all."}),
    (
        "--min-p",
        {"type": click.FloatRange(min=0, max=1), "metavar": "P", "help": "Keep tokens at least P times as likely as the likeliest."},
    ),
    ("--repetition-penalty", {"type": click.FloatRange(min=0, min_open=True), "metavar": "X", "help": "1 is none."}),
    ("--presence-penalty", {"type": float, "metavar": "X", "help": "Taken from the logits of tokens that the answer has; 0 is none."}),
    ("--frequency-penalty", {"type": float, "metavar": "X", "help": "The same for each time that the answer has them; 0 is none."}),
    ("--seed", {"type": int, "metavar": "S", "help": "The same seed draws the same noise."}),
    (
        "--logprobs",
        {"type": click.IntRange(0, 20), "metavar": "K", "help": "With --json: log probabilities of the tokens and of the K likeliest."},
    ),
    ("--stop", {"multiple": True, "metavar": "TEXT", "help": "End the answer before this text; may be repeated."}),
    (
        "--stop-token-id",
        {"multiple": True, "type": click.IntRange(min=0), "metavar": "ID", "help": "End the answer with this token; may be repeated."},
    ),
    ("--cache-salt", {"metavar": "TEXT", "help": "Share cached prefixes only with requests of this salt."}),
    ("--adapter", {"metavar": "NAME", "help": "Answer with this LoRA adapter of the daemon's; it is loaded if it is not."}),
    ("--ignore-eos", {"is_flag": True, "help": "Go on after the end-of-sequence token."}),
    (
        "--cache-priority",
        {
            "type": click.IntRange(0, 100),
            "metavar": "N",
            "help": "Blocks of the lowest priority leave memory first. [daemon's default: 50]",
        },
    ),
    (
        "--cache-ttl",
        {
            "type": click.FloatRange(min=0),
            "metavar": "S",
            "help": "Seconds after the answer's end for which that priority counts; 0: no end.",
        },
    ),
    (
        "--priority",
        {"type": click.IntRange(-10, 10), "metavar": "N", "help": "Class in which it waits; lower is sooner. [daemon's default: 0]"},
    ),
    (
        "--deadline",
        {
            "type": click.FloatRange(min=0),
            "metavar": "S",
            "help": "Seconds after which the daemon gives it up, waiting or running; 0: none.",
        },
    ),
    (
        "--queue-timeout",
        {
            "type": click.FloatRange(min=0),
            "metavar": "S",
            "help": "Seconds after which the daemon gives it up if it has not begun to run; 0: none.",
        },
    ),
    ("--n", {"type": click.IntRange(min=1), "metavar": "N", "help": "So many answers to the same prompt; above 1 not with --stream."}),
    ("--best-of", {"type": click.IntRange(min=1), "metavar": "N", "help": "Sample N answers and give the most likely ones of them."}),
    ("--beam-width", {"type": click.IntRange(min=1), "metavar": "W", "help": "Beam search over W beams; nothing is drawn."}),
    (
        "--length-penalty",
        {"type": float, "metavar": "X", "help": "A beam's score is its log probability over tokens ** X. [daemon's default: 1]"},
    ),
    (
        "--early-stopping",
        {
            "type": click.Choice(["true", "false", "never"]),
            "help": "End the search with W ended beams, when better ones are unlikely, or when there can be none. [daemon's default: false]",
        },
    ),
)


_NAMES = {
    "stop_token_id": "stop_token_ids",
    "cache_ttl": "cache_ttl_s",
    "deadline": "deadline_s",
    "queue_timeout": "queue_timeout_s",
    **outputs.NAMES,
    **constraints.NAMES,
}
_CUT_SHORT = "the daemon's drain ended the answer before it was complete; the same command may succeed on the next daemon"


class CutShortError(CommandError):
    """A drain ran out of time and aborted the answer; what there is of it has been printed."""

    def __init__(self) -> None:
        super().__init__(_CUT_SHORT, Exit.TEMPORARY)


def generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling flags; the command gets those that were given as ``options``, as the client library takes them."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        names = [
            flag.removeprefix("--").replace("-", "_") for flag, _ in (*_OPTIONS, *outputs.OPTIONS, *constraints.OPTIONS, *drafting.OPTIONS)
        ]
        values = {_NAMES.get(name, name): given.pop(name) for name in names}
        options = {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
        if options.get("early_stopping") in ("true", "false"):
            options["early_stopping"] = options["early_stopping"] == "true"
        constraints.check(options)
        for name in ("logprobs", "prompt_logprobs"):
            if name in options and not given["as_json"]:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --json")
        return command(options=options, **given)

    for flag, attributes in reversed((*_OPTIONS, *outputs.OPTIONS, *constraints.OPTIONS, *drafting.OPTIONS)):
        wrapped = click.option(flag, **attributes)(wrapped)
    return wrapped


def answer(client: Client, prompt: str | list[dict[str, str]], options: dict[str, Any], *, stream: bool, as_json: bool) -> Completion:
    """Generate from a text or from chat messages, and print the answer.

    With ``stream`` the text appears as it comes: on standard output, or with ``as_json`` on standard error, so that standard output holds
    one object in any case.

    Raises:
        CutShortError: after printing, if the daemon aborted the answer, which only its drain does unasked.
    """
    completion: Completion
    if not stream:
        completion = client.generate(prompt, **options) if isinstance(prompt, str) else client.chat(prompt, **options)
    else:
        begun = client.generate(prompt, stream=True, **options) if isinstance(prompt, str) else client.chat(prompt, stream=True, **options)
        try:
            with begun as chunks:
                for place, chunk in enumerate(chunks):
                    if place == 0 and chunks.prompt is not None:
                        click.echo(chunks.prompt.text, nl=False, err=as_json)
                    click.echo(chunk.text, nl=False, err=as_json)
        finally:
            click.echo(err=as_json)
        completion = chunks.completion
    if as_json or not stream:
        _print(completion, options, as_json=as_json)
    _check_whole([completion])
    return completion


def answer_each(client: Client, prompts: Sequence[str | list[dict[str, str]]], options: dict[str, Any], *, as_json: bool) -> None:
    """Answer several prompts at a time, and print the answers in the prompts' order: with ``as_json`` an object a line.

    Raises:
        CutShortError: after printing, if the daemon aborted one of them.
    """
    completions = client.generate_many(prompts, **options)
    for number, completion in enumerate(completions):
        _print(completion, options, as_json=as_json, number=number)
    _check_whole(completions)


def _print(completion: Completion, options: dict[str, Any], *, as_json: bool, number: int | None = None) -> None:
    """``number``: the prompt's, of several."""
    if as_json:
        print_json(completion_object(completion, has_logprobs="logprobs" in options))
        return
    echoed = completion.prompt.text if completion.prompt is not None else ""
    for choice in completion.choices:
        places = [*([str(number)] if number is not None else []), *([str(choice.index)] if len(completion.choices) > 1 else [])]
        click.echo((f"[{'.'.join(places)}] " if places else "") + echoed + choice.text)


def _check_whole(completions: Sequence[Completion]) -> None:
    if any(choice.finish_reason == "aborted" for completion in completions for choice in completion.choices):
        raise CutShortError


def completion_object(completion: Completion, *, has_logprobs: bool) -> dict[str, Any]:
    """The object of ``--json``; with several choices they are listed under ``choices``."""
    usage, timings = completion.usage, completion.timings
    choices = [_choice_object(choice, has_logprobs=has_logprobs) for choice in completion.choices]
    return {
        **(choices[0] if len(choices) == 1 else {"choices": choices}),
        **outputs.prompt_object(completion.prompt),
        "seed": completion.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "restored_tokens": usage.restored_tokens,
            "recomputed_tokens": usage.recomputed_tokens,
            "completion_tokens": usage.completion_tokens,
            **({"drafted_tokens": usage.drafted_tokens, "accepted_tokens": usage.accepted_tokens} if usage.drafted_tokens else {}),
        },
        "timings": {"queue_ms": timings.queue_ms, "ttft_ms": timings.ttft_ms, "total_ms": timings.total_ms},
    }


def _choice_object(choice: Choice, *, has_logprobs: bool) -> dict[str, Any]:
    answered: dict[str, Any] = {"text": choice.text, "token_ids": list(choice.token_ids), "finish_reason": choice.finish_reason}
    scores = {"cumulative_logprob": choice.cumulative_logprob, "score": choice.score}
    answered |= {name: value for name, value in scores.items() if value is not None}
    if not has_logprobs:
        return answered
    return {**answered, "logprobs": outputs.logprob_objects(choice.logprobs)}
