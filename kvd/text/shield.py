"""Keeps untrusted text from becoming special tokens in a chat template's output.

A chat template yields one string in which the model's special tokens are plain substrings, and nothing in it tells which of them came
out of a message. So before rendering, characters of untrusted strings that could make or complete a special token are replaced by
*stand-ins*: code points of a private-use area that occur nowhere in the request. Special tokens are looked for in the output while the
stand-ins are there; the ordinary text between them gets its characters back afterwards, so its tokens are those of the text as it was.

Replacing a character by a character keeps lengths, so that a template which measures, strips or compares a value still does
what it would. Two strengths:

* *light*: the first character of each special token within a value. Templates see all else as it was.
* *strict*: besides, every character that begins or ends some special token. Whatever a template cuts, deletes or joins, only its own text can
  then begin and end a special token. Templates that look for marks such as ``</think>`` no longer find them, so its output only judges the
  light one: if their special tokens differ, untrusted text has made or removed one.

Some templates build special tokens around a role (``<|user|>``): roles that templates know are trusted, of others every character is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvd.text.errors import ChatTemplateError
from kvd.text.special_tokens import any_of

_MAX_DEPTH = 32
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))
_PRIVATE_USE_CHARS = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd\ue000-\uf8ff]")

_KNOWN_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation", "context", "document", "documents")
)


class Shield:
    """For one model: knows its special tokens. ``template`` is the template's source, whose own characters are never stand-ins."""

    def __init__(self, tokens: Iterable[str], template: str) -> None:
        texts = sorted(set(tokens))
        self.alphabet = "".join(sorted(set("".join(texts))))
        self.ends = re.compile(f"[{re.escape(''.join({text[0] for text in texts} | {text[-1] for text in texts}))}]") if texts else None
        self.inside = re.compile(f"(?={any_of(texts)}).", re.DOTALL) if texts else None
        self._reserved = frozenset(_PRIVATE_USE_CHARS.findall(template)) | frozenset(self.alphabet)

    def guard(self, *untrusted: object) -> Guard:
        """Choose stand-ins that occur in none of these values.

        Raises:
            ChatTemplateError: there are none, or a value is of a kind that JSON has not.
        """
        used = set(self._reserved)
        _collect(untrusted, used, 0)
        size = len(self.alphabet)
        for area in _PRIVATE_USE:
            for start in range(area.start, area.stop - size, max(size, 1)):
                stand_ins = "".join(map(chr, range(start, start + size)))
                if used.isdisjoint(stand_ins):
                    return Guard(self, stand_ins)
        raise ChatTemplateError("the messages use every private-use character")


class Guard:
    """For one request: its stand-ins."""

    def __init__(self, shield: Shield, stand_ins: str) -> None:
        self.is_strict_needed = False
        """Whether a value given to ``light`` would differ under ``strict``."""
        self._shield = shield
        self._hide = dict(zip(shield.alphabet, stand_ins, strict=True))
        self._show = dict(zip(stand_ins, shield.alphabet, strict=True))
        self._hidden = re.compile(f"[{stand_ins}]") if stand_ins else None

    def light(self, value: object) -> Any:
        """A copy in which no string holds a special token."""
        return _rebuild(value, self._lighten, self._blot)

    def strict(self, value: object) -> Any:
        """A copy in which, besides, no string holds a character that begins or ends a special token."""
        return _rebuild(value, self._harden, self._blot)

    def reveal(self, text: str) -> str:
        """The text with its own characters again."""
        return self._hidden.sub(lambda match: self._show[match[0]], text) if self._hidden else text

    def _lighten(self, text: str) -> str:
        inside, ends = self._shield.inside, self._shield.ends
        if inside is None or ends is None:
            return text
        if not self.is_strict_needed and ends.search(text):
            self.is_strict_needed = True
        return inside.sub(lambda match: self._hide[match[0]], text)

    def _harden(self, text: str) -> str:
        ends = self._shield.ends
        return ends.sub(lambda match: self._hide[match[0]], self._lighten(text)) if ends else text

    def _blot(self, role: str) -> str:
        return "".join(self._hide.get(char, char) for char in role)


def _collect(value: object, used: set[str], depth: int) -> None:
    """Add the private-use characters of every string in a value."""
    if depth > _MAX_DEPTH:
        raise ChatTemplateError(f"the messages are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        used.update(_PRIVATE_USE_CHARS.findall(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(key, used, depth + 1)
            _collect(item, used, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, used, depth + 1)
    elif not isinstance(value, (int, float)) and value is not None:
        raise ChatTemplateError(f"a chat template takes strings, numbers, booleans, null, arrays and maps, not {type(value).__name__}")


def _rebuild(value: object, edit: Callable[[str], str], blot: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, Mapping):
        rebuilt = {}
        for name, item in value.items():
            if name == "role" and isinstance(item, str):
                rebuilt[name] = item if item in _KNOWN_ROLES else blot(item)
            else:
                rebuilt[edit(name) if isinstance(name, str) else name] = _rebuild(item, edit, blot)
        return rebuilt
    if isinstance(value, (list, tuple)):
        return [_rebuild(item, edit, blot) for item in value]
    return value
