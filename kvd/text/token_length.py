"""How much text one token can stand for: so a text that is far too long is known by its bytes, before anybody tokenises it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvd.text.detokenizer import byte_level_alphabet


@dataclass(frozen=True, slots=True)
class TokenReach:
    """``max_bytes`` of text at most become one token; 0: nothing bounds that. ``lost`` bytes are in no token: text without them is the same."""

    max_bytes: int
    lost: bytes = b""

    def fewest_tokens(self, text: bytes) -> int:
        """The tokens that a text becomes are at least so many, special ones around it aside."""
        if not self.max_bytes:
            return 0
        num_bytes = len(text.translate(None, self.lost)) if self.lost else len(text)
        return -(-num_bytes // self.max_bytes)


UNBOUNDED = TokenReach(0)
"""A token may stand for any length of text, or text may vanish."""

_KEEPING = frozenset(("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"))
"""Pre-tokenizers that drop nothing and make nothing shorter, unless told to remove what they cut at."""


def reach(vocab: Collection[str], verbatim: Iterable[str], *, byte_level: bool) -> TokenReach:
    """Of a vocabulary from which nothing but its tokens comes.

    Args:
        vocab: the pieces that ordinary text may become; of a byte-level vocabulary each character is a byte.
        verbatim: added tokens, found in the text as they are.
        byte_level: else a vocabulary that falls back to bytes.
    """
    lengths = [len(text.encode()) for text in verbatim]
    if byte_level:
        lost = bytes(byte for char, byte in byte_level_alphabet().items() if char not in vocab)  # without a token of their own
        return TokenReach(max([*lengths, *map(len, vocab)], default=0), lost)
    if not all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return UNBOUNDED  # characters outside the vocabulary become one unknown token, or none
    return TokenReach(max([*lengths, *(len(piece.encode()) for piece in vocab)]))


def reach_of_document(document: Mapping[str, Any]) -> TokenReach:
    """The same for a tokenizer.json; unbounded wherever a part of it is not known to keep all text."""
    model, added = document["model"], document.get("added_tokens") or []
    normalizer, steps = document.get("normalizer"), _steps(document.get("pre_tokenizer"), "pretokenizers")
    if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps):
        return UNBOUNDED
    if not all(map(_keeps_length, _steps(normalizer, "normalizers"))):
        return UNBOUNDED
    for token in added:
        if token.get("lstrip") or token.get("rstrip") or (normalizer and token.get("normalized")):
            return UNBOUNDED  # swallows white space, or is found in other text than the client's
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or not (byte_level or model.get("byte_fallback")):
        return UNBOUNDED
    return reach(model["vocab"], [token["content"] for token in added], byte_level=byte_level)


def _steps(part: Any, name: str) -> list[Mapping[str, Any]]:
    if not part:
        return []
    return [step for each in part[name] for step in _steps(each, name)] if part["type"] == "Sequence" else [part]


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        old: str | None = normalizer["pattern"].get("String")
        new: str = normalizer["content"]
        return old is not None and len(new.encode()) >= len(old.encode())
    return bool(normalizer["type"] == "Prepend")
