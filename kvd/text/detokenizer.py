"""From token ids back to text, piece by piece.

A token stands for bytes, not characters: a byte-level vocabulary splits a character over tokens, and a SentencePiece vocabulary falls
back to single bytes. So pieces are joined as bytes and decoded by an incremental UTF-8 decoder, which keeps an unfinished character back.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAX_UNFINISHED_BYTES = 3
"""The longest unfinished UTF-8 sequence."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins of bytes in byte-level vocabularies, as GPT-2's encoder defines them (Radford et al. 2019).

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in sorted(printable)} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = byte_level_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRules:
    """How a vocabulary's pieces stand for bytes.

    ``byte_level``: each character of a piece is a byte's stand-in. ``byte_fallback``: ``<0xNN>`` is a byte. ``replacements`` are made in every
    other piece. ``num_leading_spaces`` are cut from the start of a whole text, where tokenising put them.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_leading_spaces: int = 0


class PieceTable:
    """Each token id's bytes, worked out once when first asked for. Special tokens and ids beyond the vocabulary have none.

    ``pieces`` leaves out the special tokens. ``verbatim`` ids are text as it is (added tokens).
    """

    def __init__(self, pieces: Mapping[int, str], rules: PieceRules, verbatim: frozenset[int] = frozenset()) -> None:
        self.rules = rules
        self._pieces = pieces
        self._verbatim = verbatim
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._work_out(token_id)
            if token_id in self._pieces:
                self._bytes[token_id] = known
        return known

    def _work_out(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            return b""
        rules = self.rules
        if token_id in self._verbatim:
            return piece.encode()
        if rules.byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in piece])
            except KeyError:
                return piece.encode()
        if rules.byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in rules.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


class IncrementalDetokenizer:
    """The text of one growing sequence of tokens that continues ``prompt_ids``.

    The pieces given out, joined, are the same however the ids are cut; a token's cost does not grow with the text before it. Bytes that
    cannot be UTF-8 come out as U+FFFD. A prompt that ends within a character is continued: the whole character comes out.
    """

    __slots__ = ("_decoder", "_num_to_strip", "_table")

    def __init__(self, table: PieceTable, prompt_ids: Sequence[int] = ()) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_to_strip = table.rules.num_leading_spaces
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = table.bytes_of(token_id) + tail
            if len(tail) >= _MAX_UNFINISHED_BYTES:
                break
        if tail:
            self._num_to_strip = 0
            self._decoder.decode(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these tokens."""
        bytes_of = self._table.bytes_of
        data = b"".join([bytes_of(token_id) for token_id in token_ids])
        while self._num_to_strip and data:
            if not data.startswith(b" "):
                self._num_to_strip = 0
                break
            data = data[1:]
            self._num_to_strip -= 1
        return self._decoder.decode(data)

    def flush(self) -> str:
        """At the end: U+FFFD for a character that was never finished."""
        return self._decoder.decode(b"", final=True)
