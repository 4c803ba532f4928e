"""Keeps untrusted text from becoming special tokens in a chat template's output.

A chat template yields one string in which the model's special tokens are plain substrings, and nothing in it tells which of them came
out of a message. So before rendering, characters of untrusted strings that could make or complete a special token are replaced by
*stand-ins*: code points of a private-use area that occur nowhere in the request. Special tokens are looked for in the output while the
stand-ins are there; the ordinary text between them gets its characters back afterwards, so its tokens are those of the text as it was.

Replacing a character by a character keeps lengths, so that a template which measures, strips or compares a value still does
what it would. Two strengths:

* *light*: the first character of each special token within a value, and a value's first or last character where, beside other text, it could
  complete one. Templates see all else as it was.
* *strict*: besides, every character that begins or ends some special token. Whatever a template deletes or joins, only its own text can
  then begin and end a special token. Templates that look for marks such as ``</think>`` no longer find them, so its output only judges the
  light one: if their special tokens differ, untrusted text has made or removed one.
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

_WORDS_OF_TEMPLATES = {
    "role": frozenset(
        (
            "system",
            "developer",
            "user",
            "assistant",
            "model",
            "tool",
            "function",
            "ipython",
            "observation",
            "context",
            "document",
            "documents",
        )
    ),
    "type": frozenset(("text", "function", "string", "number", "integer", "boolean", "object", "array", "null")),
}
"""Values that templates compare with, and from which they may build special tokens (``<|user|>``); under these keys they are trusted."""


class Shield:
    """For one model: knows its special tokens. ``template`` is the template's source, whose own characters are never stand-ins."""

    def __init__(self, tokens: Iterable[str], template: str) -> None:
        texts = sorted(set(tokens))
        self.alphabet = "".join(sorted(set("".join(texts))))
        self.ends = re.compile(f"[{re.escape(''.join({text[0] for text in texts} | {text[-1] for text in texts}))}]") if texts else None
        self.inside = re.compile(f"(?={any_of(texts)}).", re.DOTALL) if texts else None
        self.beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self.endings = frozenset(text[length:] for text in texts for length in range(1, len(text)))
        self.longest = max(map(len, texts), default=0)
        self.joined = "\0".join(texts)
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
        """A copy in which no string holds a special token or can complete one."""
        return _rebuild(value, self._lighten, "")

    def strict(self, value: object) -> Any:
        """A copy in which, besides, no string holds a character that begins or ends a special token."""
        return _rebuild(value, self._harden, "")

    def reveal(self, text: str) -> str:
        """The text with its own characters again."""
        return self._hidden.sub(lambda match: self._show[match[0]], text) if self._hidden else text

    def _lighten(self, text: str, *, is_key: bool) -> str:
        shield = self._shield
        if shield.inside is None or shield.ends is None:
            return text
        if not self.is_strict_needed and shield.ends.search(text):
            self.is_strict_needed = True
        text = shield.inside.sub(lambda match: self._hide[match[0]], text)
        return text if is_key else self._blunt(text)

    def _harden(self, text: str, *, is_key: bool) -> str:
        text = self._lighten(text, is_key=is_key)
        return self._shield.ends.sub(lambda match: self._hide[match[0]], text) if self._shield.ends else text

    def _blunt(self, text: str) -> str:
        """Replace the outermost characters (white space aside) where, beside other text, they could complete a special token."""
        shield = self._shield
        core = text.strip()
        if not core:
            return text
        start = text.index(core[0])
        stop = start + len(core)
        longest = min(shield.longest, len(core))
        if (len(core) <= shield.longest and "\0" not in core and core in shield.joined) or any(
            core[:length] in shield.endings for length in range(1, longest + 1)
        ):
            text = text[:start] + self._hide[core[0]] + text[start + 1 :]
        if any(core[-length:] in shield.beginnings for length in range(1, longest + 1)) and text[stop - 1] in self._hide:
            text = text[: stop - 1] + self._hide[text[stop - 1]] + text[stop:]
        return text


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


def _rebuild(value: object, edit: Callable[..., str], key: str) -> Any:
    if isinstance(value, str):
        return value if value in _WORDS_OF_TEMPLATES.get(key, ()) else edit(value, is_key=False)
    if isinstance(value, Mapping):
        return {
            edit(name, is_key=True) if isinstance(name, str) else name: _rebuild(item, edit, name if isinstance(name, str) else "")
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_rebuild(item, edit, key) for item in value]
    return value
