"""Prompt lookup: what followed the last tokens when they came before is proposed again.

As in vLLM's n-gram and transformers' prompt-lookup decoding (Saxena, "Prompt lookup decoding", 2023): of the places in prompt and output where the last tokens
occurred before, the one with the longest match is continued, the most recent among equals. The index grows with the tokens, in constant time each: the ends of all
runs of ``min_tokens`` tokens are chained by their content, and a match that goes on is followed without looking it up again.
"""

from __future__ import annotations

from array import array

from kvd.types import TOKEN_BYTES, unpack_tokens

_MOST_CANDIDATES = 16
"""Places looked at for the longest match, the most recent ones."""


class NgramIndex:
    """The places of one sequence's tokens. Matches are of ``min_tokens`` at least, and are told apart up to ``max_tokens``; a match that goes on grows beyond."""

    __slots__ = ("_ends", "_first", "_max_tokens", "_min_tokens", "_place", "_previous", "_tokens", "length")

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._tokens: array[int] = array("I")
        self._ends: dict[bytes, int] = {}
        """The place after the last occurrence of each run of ``min_tokens`` tokens."""
        self._previous: array[int] = array("I")
        """For each place, that after the occurrence before; 0: none."""
        self._first = 0
        self._place = 0
        """What is proposed begins here, if ``length`` is not 0."""
        self.length = 0
        """Of how many tokens the present match is; 0: none."""

    def __len__(self) -> int:
        """Tokens indexed, those that were skipped included."""
        return self._first + len(self._tokens)

    @property
    def next_token(self) -> int:
        """What the match proposes to come next; -1: nothing."""
        return self._tokens[self._place] if self.length else -1

    def skip(self, num_tokens: int) -> None:
        """Leave the first tokens out. Only before anything is added."""
        assert not self._tokens, "the index has begun"
        self._first = num_tokens

    def add(self, packed: bytes | bytearray | memoryview) -> None:
        """Further tokens, packed."""
        for token_id in unpack_tokens(packed):
            self.add_token(token_id)

    def add_token(self, token_id: int) -> None:
        """The next token: the match goes on, or another one is looked for."""
        tokens, size = self._tokens, self._min_tokens
        goes_on = self.length > 0 and tokens[self._place] == token_id
        tokens.append(token_id)
        end = len(tokens)
        if end < size:
            self._previous.append(0)
            return
        key = tokens[end - size :].tobytes()
        last = self._ends.get(key, 0)
        self._ends[key] = end
        self._previous.append(last)
        if goes_on:
            self._place += 1
            self.length += 1
        else:
            self._look_up(last)

    def propose(self, num_tokens: int) -> list[int]:
        """The ``num_tokens`` tokens that the match says come next; where it reaches the present, it repeats itself. Nothing without a match."""
        if not self.length:
            return []
        period = self._tokens[self._place : self._place + num_tokens].tolist()
        return [period[at % len(period)] for at in range(num_tokens)]

    def _look_up(self, place: int) -> None:
        """``place`` follows the last run like the present one."""
        self.length = 0
        for _ in range(_MOST_CANDIDATES):
            if not place:
                return
            length = self._common(place)
            if length > self.length:
                self.length, self._place = length, place
                if length >= self._max_tokens:
                    return
            place = self._previous[place - 1]

    def _common(self, place: int) -> int:
        """Of how many tokens, up to the most, before ``place`` and before the present are the same."""
        tokens, end = self._tokens, len(self._tokens)
        length, most = self._min_tokens, min(self._max_tokens, place)
        while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length


assert array("I").itemsize == TOKEN_BYTES, "an unsigned int holds a token id"
