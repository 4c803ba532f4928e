"""A compiled grammar, the places of sequences in it, and the masks of a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.grammar.growth import PAGE_BYTES, Meter, num_faults


@dataclass(slots=True)
class Holding:
    """The memory that a grammar is charged with, once it ``is_counted``."""

    num_bytes: int = 0
    is_counted: bool = False
    pending_bytes: int = 0
    """Taken between its masks, and to be charged with the next one."""
    used_bytes: int = 0
    """What it was charged with since it was compiled."""

    def note(self, faults: int) -> None:
        """The grammar had work done by this thread, which had touched ``faults`` pages before."""
        self.pending_bytes += (num_faults() - faults) * PAGE_BYTES

    def take_pending(self) -> int:
        """What is to be charged now."""
        num_bytes, self.pending_bytes = self.pending_bytes, 0
        return num_bytes


class CompiledGrammar:
    """A grammar that is known to match something. Its sequences share what the library learns about it, from whichever thread."""

    __slots__ = ("__weakref__", "_matcher", "holding", "problem")

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.holding = Holding()
        self.problem = ""
        """Why none of its sequences may go on; empty while they may."""

    def start(self) -> GrammarState:
        """A sequence before its first token; microseconds."""
        return GrammarState(self, self._matcher.deep_copy())


class GrammarState:
    """How far a sequence is. Every method takes microseconds, but a mask may take milliseconds with a grammar made for it."""

    __slots__ = ("grammar", "matcher")

    def __init__(self, grammar: CompiledGrammar, matcher: Any) -> None:
        self.grammar = grammar
        self.matcher = matcher

    @property
    def problem(self) -> str:
        """Why the sequence can't go on; empty while it can."""
        return reason(self.matcher) if self.matcher.is_error() else self.grammar.problem

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
        self.matcher.consume_token(token_id)  # through what its mask has made: nothing grows

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow; the place stays where it is."""
        faults = num_faults()
        num_valid = int(self.matcher.validate_tokens(list(token_ids)))
        self.grammar.holding.note(faults)
        return num_valid

    def forced(self, max_tokens: int) -> list[int]:
        """Tokens that spell what must follow, as far as it is known; perhaps none. Another tokenisation of it may be allowed as well."""
        faults = num_faults()
        token_ids = self.matcher.compute_ff_tokens()
        self.grammar.holding.note(faults)
        return list(token_ids[:max_tokens])


class MaskWriter:
    """Writes the masks of a batch into one buffer, outside of the interpreter lock and on several threads where there are several sequences."""

    def __init__(
        self,
        num_words: int,
        num_threads: int,
        *,
        meter: Meter,
        charge: Callable[[Collection[CompiledGrammar], int], None],
    ) -> None:
        """``charge`` is told of grammars whose masks made the process grow, by ``meter``, and by how much."""
        from llguidance import LLExecutor

        self._mask_bytes = 4 * num_words
        self._executor = LLExecutor(num_threads)
        self._meter = meter
        self._charge = charge
        self._num_apart = 0

    def write(self, states: Sequence[object], drafts: Sequence[Collection[int]]) -> bytearray:
        """For each state the mask of its next token, then one after each of its drafted tokens, which must be valid; all of them one after the other.

        Bit j of the little-endian u32 word w of a mask allows token 32 w + j. The states stay where they are; one that has a ``problem`` afterwards has
        a mask without meaning.
        """
        by_grammar: dict[CompiledGrammar, _Batch] = {}
        num_masks = 0
        for state, draft in zip(states, drafts, strict=True):
            assert isinstance(state, GrammarState), "states are those that a compiled grammar started"
            batch = by_grammar.setdefault(state.grammar, ([], []))
            if draft:
                batch[1].append((state.matcher, num_masks, list(draft)))
            else:
                batch[0].append((state.matcher, num_masks))
            num_masks += 1 + len(draft)
        words = bytearray(num_masks * self._mask_bytes)
        if not num_masks:
            return words
        address = ctypes.addressof((ctypes.c_char * len(words)).from_buffer(words))
        if len(by_grammar) > 1 and len(states) >= _MIN_SPREAD and not self._num_apart:
            together: _Batch = ([], [])
            for plain, drafting in by_grammar.values():
                together[0].extend(plain)
                together[1].extend(drafting)
            if self._write(by_grammar, together, address, num_masks) >= _SUSPICIOUS_BYTES:
                self._num_apart = _NUM_APART
        else:
            self._num_apart -= self._num_apart > 0
            for grammar, batch in by_grammar.items():
                self._write((grammar,), batch, address, num_masks)
        return words

    def _write(self, grammars: Collection[CompiledGrammar], batch: _Batch, address: int, num_masks: int) -> int:
        """The masks of these grammars' states, and by how much the process grew meanwhile."""
        mark, is_spread = self._meter.begin(), False
        writing: list[tuple[list[Any], Callable[..., None]]] = [
            (batch[0], self._executor.unsafe_compute_mask_ptr),
            (batch[1], self._executor.unsafe_compute_mask_ptr_with_draft_token),
        ]
        for entries, compute in writing:
            is_spread |= len(entries) >= _MIN_SPREAD
            # One entry alone is computed on the caller's thread: a few are done before another thread has woken up.
            for part in [entries] if len(entries) >= _MIN_SPREAD else [[entry] for entry in entries]:
                compute(part, address, self._mask_bytes, num_masks)
        grown_bytes = self._meter.grown_bytes(mark, is_spread=is_spread)
        for grammar in grammars:
            if pending_bytes := grammar.holding.take_pending():
                self._charge((grammar,), pending_bytes)
        if grown_bytes:
            self._charge(grammars, grown_bytes)
        return grown_bytes


_Batch = tuple[list[Any], list[Any]]
"""The library's arguments for states without drafts, and for those with."""


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
"""States whose masks are worth other threads."""
_SUSPICIOUS_BYTES = 1 << 20
_NUM_APART = 16
"""When several grammars together made the process grow by that much, so many times each is computed by itself, to find out which of them it is."""
