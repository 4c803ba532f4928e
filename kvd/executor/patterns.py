"""Regular expressions that a stranger wrote, matched against modules' names in bounded time.

``re`` keeps the interpreter's lock until it has found a match or tried every way to one, of which an expression may have exponentially many: no other thread would run
meanwhile. So the ways are counted before anything is tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import comb
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_MAX_LENGTH = 1000
_MAX_PATTERNS = 4096
_MAX_WAYS = 300_000
"""Some milliseconds."""
_NAME_LENGTH = 40
"""Characters of a name: ``model.layers.100.self_attn.q_proj`` has 33."""


class PatternError(ValueError):
    """An expression that is none, or that could take long; the message says which."""


class Patterns:
    """Expressions, compiled once each."""

    def __init__(self) -> None:
        self._compiled: dict[str, re.Pattern[str]] = {}

    def match(self, pattern: str, name: str) -> re.Match[str] | None:
        """``re.match``.

        Raises:
            PatternError: it is not tried.
        """
        compiled = self._compiled.get(pattern)
        if compiled is None:
            if len(self._compiled) >= _MAX_PATTERNS:
                raise PatternError(f"more than {_MAX_PATTERNS} expressions are too many")
            compiled = self._compiled[pattern] = _compile(pattern)
        return compiled.match(name)


def _compile(pattern: str) -> re.Pattern[str]:
    if len(pattern) > _MAX_LENGTH:
        raise PatternError(f"an expression of more than {_MAX_LENGTH} characters is too long")
    try:
        num_repeats, num_choices = _ways(_parser.parse(pattern))
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"it is no regular expression: {error}") from error
    if comb(_NAME_LENGTH + num_repeats, num_repeats) * num_choices > _MAX_WAYS:
        raise PatternError("it could match in too many ways, which may take long; write it with fewer repeats and options")
    return compiled


def _ways(items: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """Of a parsed sequence: its repeats of open number, r, and the product c of its other choices. There are at most comb(n + r, r) * c ways through n characters."""
    num_repeats, num_choices = 0, 1
    for operation, argument in items:
        repeats, choices = _ways_of(str(operation), argument)
        num_repeats += repeats
        num_choices *= choices
    return num_repeats, num_choices


def _ways_of(operation: str, argument: Any) -> tuple[int, int]:
    match operation:
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, body = argument
            repeats, choices = _ways(body)
            if most <= 1:
                return repeats, choices + (least == 0)
            if (repeats, choices) != (0, 1) or body.getwidth()[0] == 0:
                raise PatternError("it repeats what has repeats or options of its own, which may take long")
            return int(least != most), 1
        case "SUBPATTERN":
            return _ways(argument[3])
        case "ATOMIC_GROUP":
            return _ways(argument)
        case "ASSERT" | "ASSERT_NOT":
            return _ways(argument[1])
        case "BRANCH":
            branches = [_ways(branch) for branch in argument[1]]
        case "GROUPREF_EXISTS":
            branches = [_ways(branch or ()) for branch in argument[1:]]
        case _:
            return 0, 1
    return max(repeats for repeats, _ in branches), sum(choices for _, choices in branches)
