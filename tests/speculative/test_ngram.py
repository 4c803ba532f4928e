"""The n-gram index against a search through all that was said."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvd.speculative.ngram import _MOST_CANDIDATES, NgramIndex
from kvd.types import pack_tokens

tokens_strategy = st.lists(st.integers(0, 2), max_size=60)


def looked_up(tokens, shortest, longest):
    """(length, place): the longest match of the last tokens among the most recent places that hold the last ``shortest``."""
    key = tokens[len(tokens) - shortest :]
    places = [end for end in range(shortest, len(tokens)) if tokens[end - shortest : end] == key] if len(tokens) >= shortest else []
    best = (0, 0)
    for end in reversed(places[-_MOST_CANDIDATES:]):
        length = shortest
        while length < min(longest, end) and tokens[end - length - 1] == tokens[len(tokens) - length - 1]:
            length += 1
        if length > best[0]:
            best = (length, end)
    return best


@given(tokens=tokens_strategy, shortest=st.integers(1, 3), more=st.integers(0, 4))
def test_a_match_is_followed_and_otherwise_the_longest_recent_one(tokens, shortest, more):
    index = NgramIndex(shortest, shortest + more)
    length = place = 0
    for count, token in enumerate(tokens):
        proposed = index.next_token
        assert (proposed == -1) == (length == 0)
        if length and tokens[place] == token:
            length, place = length + 1, place + 1
        else:
            length, place = looked_up(tokens[: count + 1], shortest, shortest + more)
        index.add_token(token)
        assert index.length == length
        assert len(index) == count + 1
        if length:
            assert tokens[place - min(length, place) : place] == tokens[: count + 1][-min(length, place) :]
            ahead = tokens[place : count + 1]
            assert index.propose(7) == [ahead[at % len(ahead)] for at in range(7)]
        else:
            assert index.propose(7) == []


@given(tokens=tokens_strategy, cut=st.integers(0, 60))
def test_prompts_are_added_at_once_or_bit_by_bit(tokens, cut):
    whole, parts = NgramIndex(2, 8), NgramIndex(2, 8)
    whole.add(pack_tokens(tokens))
    parts.add(pack_tokens(tokens[:cut]))
    parts.add(bytearray(pack_tokens(tokens[cut:])))
    assert (whole.length, whole.next_token, whole.propose(5)) == (parts.length, parts.next_token, parts.propose(5))


def test_what_is_left_out_counts_and_is_not_found():
    index = NgramIndex(2, 8)
    index.skip(100)
    index.add(pack_tokens([1, 2, 3, 1, 2]))
    assert len(index) == 105
    assert index.propose(3) == [3, 1, 2]


def test_a_token_costs_the_same_however_much_was_said():
    """Places looked at for one token, however often its run came before."""
    index = NgramIndex(2, 16)
    draw = random.Random(0)
    looks = []
    common = NgramIndex._common

    class Counting(NgramIndex):
        def _common(self, place):
            looks[-1] += 1
            return common(self, place)

    index = Counting(2, 16)
    for _ in range(5000):
        looks.append(0)
        index.add_token(draw.randrange(2))
    assert max(looks) <= _MOST_CANDIDATES
