"""The flags of speculative decoding."""

from __future__ import annotations

from typing import Any

import click

OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--speculation",
        {
            "type": click.Choice(["auto", "off", "ngram", "draft"]),
            "help": "Propose tokens ahead: where it pays, not at all, what followed the same words before, or by the draft model alone."
            " [default: the daemon's]",
        },
    ),
    (
        "--num-draft",
        {
            "type": click.IntRange(1, 32),
            "metavar": "N",
            "help": "Where tokens are proposed: so many in a step, at most. [default: the daemon's]",
        },
    ),
    (
        "--draft-acceptance",
        {
            "type": click.Choice(["coupled", "rejection"]),
            "help": "Where tokens are proposed: `coupled`: the answer is the one without proposals; `rejection`: one of the same distribution. [daemon's default: coupled]",
        },
    ),
)
