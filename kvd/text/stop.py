"""Stop strings in a stream of text pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed, wherever the text was cut into pieces.

    One Knuth-Morris-Pratt automaton per stop string: a character costs amortised constant time per stop string, and the longest
    automaton state says how much of the end may still become a stop string. That much is held back, no more. Where several stop strings
    end at the same character the longest counts, so that no part of it is given out. The outcome does not depend on the cuts.
    With ``include`` the text ends with the stop string, so that nothing is held back.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = ("_failures", "_firsts", "_held", "_include", "_matched", "_states", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise ValueError("a stop string is empty")
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._matched = False

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Take the next piece; the text that is now final, and whether a stop string was completed.

        The final text ends before the stop string. After a match nothing is final any more and the answer stays ``("", True)``. Without ``may_end``
        the stop strings that this piece completes are text like any other.
        """
        if self._matched:
            return "", True
        if not any(self._states) and self._firsts.isdisjoint(text):
            return text, False
        pending = self._held + text
        match = self._first_match(text, already=len(self._held), may_end=may_end)
        if match is not None:
            end, length = match
            self._matched = True
            self._held = ""
            return pending[: end if self._include else end - length], True
        num_final = len(pending) - (0 if self._include else max(self._states, default=0))
        self._held = pending[num_final:]
        return pending[:num_final], False

    def flush(self) -> str:
        """The text still held back, at the end of the stream."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _first_match(self, text: str, *, already: int, may_end: bool) -> tuple[int, int] | None:
        """(end, length) of the first completed stop string; ``end`` counts from the start of the held text."""
        states, stops, failures = self._states, self._stops, self._failures
        for position, char in enumerate(text, start=already + 1):
            longest = 0
            for index, stop in enumerate(stops):
                state = states[index]
                failure = failures[index]
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    longest = max(longest, state)
                    state = failure[state - 1]
                states[index] = state
            if longest and may_end:
                return position, longest
        return None


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        table[position] = length
    return table
