"""A compiled grammar, the places of sequences in it, and the masks of a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any


class CompiledGrammar:
    """A grammar that is known to match something. Its sequences share what the library learns about it, from whichever thread."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> GrammarState:
        """A sequence before its first token; microseconds."""
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """How far a sequence is. Every method takes microseconds, but a mask may take milliseconds with a grammar made for it."""

    __slots__ = ("matcher",)

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    @property
    def problem(self) -> str:
        """Why the sequence can't go on; empty while it can."""
        return reason(self.matcher) if self.matcher.is_error() else ""

    @property
    def has_strayed(self) -> bool:
        """Whether the problem is a token that a mask forbade, not that the library gave up."""
        return _STRAYED in self.problem

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self.matcher.is_stopped())

    @property
    def is_complete(self) -> bool:
        """Whether the end may follow."""
        return bool(self.matcher.is_accepting())

    def advance(self, token_id: int) -> None:
        """A token was sampled; one that a mask forbade is a ``problem``."""
        self.matcher.consume_token(token_id)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow; the place stays where it is."""
        return int(self.matcher.validate_tokens(list(token_ids)))

    def forced(self, max_tokens: int) -> list[int]:
        """Tokens that spell what must follow, as far as it is known; perhaps none. Another tokenisation of it may be allowed as well."""
        return list(self.matcher.compute_ff_tokens()[:max_tokens])


class MaskWriter:
    """Writes the masks of a batch into one buffer, outside of the interpreter lock and on several threads where there are several sequences."""

    def __init__(self, num_words: int, num_threads: int) -> None:
        from llguidance import LLExecutor

        self._mask_bytes = 4 * num_words
        self._executor = LLExecutor(num_threads)

    def write(self, states: Sequence[object], drafts: Sequence[Collection[int]]) -> bytearray:
        """For each state the mask of its next token, then one after each of its drafted tokens, which must be valid; all of them one after the other.

        Bit j of the little-endian u32 word w of a mask allows token 32 w + j. The states stay where they are; one that has a ``problem`` afterwards has
        a mask without meaning.
        """
        plain: list[Any] = []
        drafting: list[Any] = []
        num_masks = 0
        for state, draft in zip(states, drafts, strict=True):
            assert isinstance(state, GrammarState), "states are those that a compiled grammar started"
            if draft:
                drafting.append((state.matcher, num_masks, list(draft)))
            else:
                plain.append((state.matcher, num_masks))
            num_masks += 1 + len(draft)
        words = bytearray(num_masks * self._mask_bytes)
        if num_masks:
            address = ctypes.addressof((ctypes.c_char * len(words)).from_buffer(words))
            for batch in _batches(plain):
                self._executor.unsafe_compute_mask_ptr(batch, address, self._mask_bytes, num_masks)
            for batch in _batches(drafting):
                self._executor.unsafe_compute_mask_ptr_with_draft_token(batch, address, self._mask_bytes, num_masks)
        return words


def _batches(entries: list[Any]) -> list[list[Any]]:
    """What goes to the library's threads together. One entry alone is computed on the caller's: a few are done before another thread has woken up."""
    return [entries] if len(entries) >= _MIN_SPREAD else [[entry] for entry in entries]


def reason(matcher: Any) -> str:
    """What the library says is wrong, without its own state and without a trace."""
    text = str(matcher.get_error())
    for mark in ("\n<state>", "\n<grammar>", "\n<non-verbose/>", "\n<backtrace>"):
        text = text.partition(mark)[0]
    return " ".join(text.split())[:_MAX_REASON_CHARS]


_MAX_REASON_CHARS = 600
_STRAYED = "satisfy the grammar"
"""So the library says it; what it gives as the reason of the stop is the same for its limits."""
_MIN_SPREAD = 16
