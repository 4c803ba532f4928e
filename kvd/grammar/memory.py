"""What compiled grammars hold: each is charged with what the process grew by while it was compiled and while its masks were written.

The library remembers what it learns of a grammar for as long as anything uses it, and doesn't tell how much that is. What the process grew by is the
truth where nothing else takes memory at that moment, and what is given up is handed back to the system, so that whoever takes it next is charged.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from kvd.grammar.state import CompiledGrammar, Holding

MAX_KEPT_BYTES = 256 << 20
"""Of what is remembered for the next request; beyond, the longest unused is forgotten."""
MAX_HELD_BYTES = 512 << 20
"""Of all that lives, in use or remembered; beyond, the largest is given up, and with it the requests that use it."""

MAX_USED_BYTES = 32 << 20
"""What one may be charged with in use before the next request has it compiled afresh. Memory that a mask needs only while it is computed goes back to
the system too, and whoever uses it again is charged again: a constraint that is always in use would seem to grow for ever."""

_TRIM_BYTES = 4 << 20
"""Freed memory goes back to the system by so much, at some milliseconds each time. What is taken before it has gone back is charged to nobody."""


def trim() -> None:
    """Free memory goes back to the system, where the C library can do that."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class Holdings:
    """The grammars that live. ``charge`` may be called from any thread; the rest is for those who hold the compiler's lock."""

    def __init__(self, trim: Callable[[], None] = trim) -> None:
        """``trim`` is called on a thread of its own after much has been freed."""
        self._trim = trim
        self._lock = threading.Lock()
        self._living: dict[int, weakref.ref[CompiledGrammar]] = {}
        self._freed: SimpleQueue[tuple[int, Holding] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Of all that live."""
        return self._held_bytes

    def add(self, grammar: CompiledGrammar, num_bytes: int) -> None:
        """It has been compiled, and ``num_bytes`` were taken for that. From now on it can be charged."""
        key, holding, freed = id(grammar), grammar.holding, self._freed
        with self._lock:
            holding.num_bytes, holding.is_counted = num_bytes, True
            self._held_bytes += num_bytes
            # The callback may come at any moment, with any lock held: this queue's put is made for that.
            self._living[key] = weakref.ref(grammar, lambda _: freed.put((key, holding)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._settle, name="kvd-grammar-memory", daemon=True)
                self._thread.start()

    def charge(self, grammars: Iterable[CompiledGrammar], grown_bytes: int) -> None:
        """They took so much together."""
        charged = [grammar.holding for grammar in grammars if grammar.holding.is_counted]
        with self._lock:
            for holding in charged:
                holding.num_bytes += grown_bytes // len(charged)
                holding.used_bytes += grown_bytes // len(charged)
                self._held_bytes += grown_bytes // len(charged)

    def largest_first(self) -> list[weakref.ref[CompiledGrammar]]:
        """Those that live, by references that keep none of them alive."""
        with self._lock:
            living = list(self._living.values())
        sizes = [(grammar.holding.num_bytes, reference) for reference in living if (grammar := reference()) is not None]
        return [reference for _, reference in sorted(sizes, key=lambda each: -each[0])]

    def close(self) -> None:
        """The thread ends."""
        self._freed.put(None)

    def _settle(self) -> None:
        """What died is counted no more, and what it had is handed back."""
        untrimmed_bytes = 0
        while (freed := self._freed.get()) is not None:
            key, holding = freed
            with self._lock:
                self._held_bytes -= holding.num_bytes
                if (reference := self._living.get(key)) is not None and reference() is None:  # else the id is another's by now
                    del self._living[key]
            untrimmed_bytes += holding.num_bytes
            if untrimmed_bytes >= _TRIM_BYTES:
                self._trim()
                untrimmed_bytes = 0
