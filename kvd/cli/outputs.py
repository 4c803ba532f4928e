"""The flags that say which tokens may come out, and what is told of the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvd_client.protocol.messages import TokenLogprob
    from kvd_client.results import PromptEcho


def _biases(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, float], ...]:
    """``ID=BIAS`` each."""
    biases = []
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases.append((int(token_id), float(bias)))
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not ID=BIAS, like 198=-100") from error
    return tuple(biases)


def _tools(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> list[Any] | None:
    """A JSON array from a file."""
    if value is None:
        return None
    try:
        tools = json.loads(value.expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{value}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise click.BadParameter(f"{value}: not a JSON array of objects")
    return tools


_ID = {"multiple": True, "type": click.IntRange(min=0), "metavar": "ID"}
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--logit-bias",
        {
            "multiple": True,
            "callback": _biases,
            "metavar": "ID=B",
            "help": "Add B, -100 to 100, to the logit of this token; may be repeated.",
        },
    ),
    ("--allow-token-id", {**_ID, "help": "Sample this token, or others that are given so, and nothing else; may be repeated."}),
    ("--ban-token-id", {**_ID, "help": "Never sample this token; may be repeated."}),
    ("--bad-word", {"multiple": True, "metavar": "TEXT", "help": "Keep this text out of the answer; may be repeated."}),
    ("--include-stop", {"is_flag": True, "help": "End the text with the --stop text that ended it, not before it."}),
    (
        "--truncate-prompt",
        {
            "type": click.IntRange(min=-1),
            "metavar": "N",
            "help": "Keep the prompt's last N tokens; -1: as many as fit. [daemon's default: all]",
        },
    ),
    (
        "--echo",
        {
            "is_flag": True,
            "help": "Print the prompt before the answer; with --json it stands under `prompt`, with its tokens, and `text` is the answer alone.",
        },
    ),
    (
        "--prompt-logprobs",
        {
            "type": click.IntRange(0, 20),
            "metavar": "K",
            "help": "With --json: log probabilities of the prompt's tokens and of the K likeliest.",
        },
    ),
    (
        "--tools",
        {
            "type": click.Path(path_type=Path),
            "callback": _tools,
            "metavar": "FILE",
            "help": "JSON array of tools for the chat template; of `kvd generate` with --system.",
        },
    ),
)
NAMES = {"allow_token_id": "allowed_token_ids", "ban_token_id": "banned_token_ids", "bad_word": "bad_words"}
"""Flags whose option of the client has another name."""


def prompt_object(prompt: PromptEcho | None) -> dict[str, Any]:
    """What ``--json`` has under ``prompt``; nothing where nothing was asked of it."""
    if prompt is None:
        return {}
    told: dict[str, Any] = {}
    if prompt.token_ids:
        told |= {"text": prompt.text, "token_ids": list(prompt.token_ids)}
    if prompt.logprobs:
        told["logprobs"] = logprob_objects(prompt.logprobs)
    return {"prompt": told}


def logprob_objects(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities as ``--json`` has them."""
    return [
        {
            "token_id": each.token_id,
            "logprob": each.logprob,
            "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in each.top],
        }
        for each in logprobs
    ]
