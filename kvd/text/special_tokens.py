"""A vocabulary's special tokens: where they stand in rendered text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Segment = str | int
"""Ordinary text, or the id of a special token."""


class SpecialTokens:
    """Text and id of every special token.

    ``strips_left`` and ``strips_right`` are the ids that swallow white space before and after them.
    """

    def __init__(
        self, ids: Mapping[str, int], *, strips_left: frozenset[int] = frozenset(), strips_right: frozenset[int] = frozenset()
    ) -> None:
        self.ids = dict(ids)
        self._strips_left = strips_left
        self._strips_right = strips_right
        self._pattern = re.compile(any_of(self.ids)) if self.ids else None

    def split(self, text: str) -> Iterator[Segment]:
        """Cut text at its special tokens, leftmost first and the longest at each place. Empty text is left out."""
        if self._pattern is None:
            if text:
                yield text
            return
        position = 0
        strip_left = False
        for match in self._pattern.finditer(text):
            token_id = self.ids[match[0]]
            plain = text[position : match.start()]
            if strip_left:
                plain = plain.lstrip()
            if token_id in self._strips_left:
                plain = plain.rstrip()
            if plain:
                yield plain
            yield token_id
            strip_left = token_id in self._strips_right
            position = match.end()
        plain = text[position:].lstrip() if strip_left else text[position:]
        if plain:
            yield plain


def any_of(texts: Iterable[str]) -> str:
    """A regular expression for any of these texts, the longest first, in the form of a tree.

    A plain alternation tries every text at every possible start, and vocabularies have a thousand special tokens that begin alike.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _expression(tree)


def _expression(node: dict[str, Any]) -> str:
    branches = []
    for first, child in sorted(node.items()):
        if first:
            literal, rest = first, child
            while len(rest) == 1 and "" not in rest:
                char, rest = next(iter(rest.items()))
                literal += char
            branches.append(re.escape(literal) + _expression(rest))
    if not branches:
        return ""
    optional = "?" if "" in node else ""
    return f"(?:{'|'.join(branches)}){optional}"
