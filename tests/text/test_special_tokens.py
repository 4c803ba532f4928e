from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvd.text.special_tokens import SpecialTokens, any_of


@given(st.sets(st.text("ab<|>", min_size=1, max_size=4), min_size=1, max_size=8), st.text("ab<|>", max_size=20))
def test_splitting_is_leftmost_longest_and_loses_nothing(tokens: set[str], text: str) -> None:
    ids = {token: number for number, token in enumerate(sorted(tokens))}
    texts = {number: token for token, number in ids.items()}
    segments = list(SpecialTokens(ids).split(text))
    assert "".join(texts[segment] if isinstance(segment, int) else segment for segment in segments) == text
    position = 0
    for segment in segments:
        if isinstance(segment, int):
            assert texts[segment] == max((token for token in tokens if text.startswith(token, position)), key=len)
            position += len(texts[segment])
        else:
            assert segment
            for offset in range(len(segment)):
                assert not any(text.startswith(token, position + offset) for token in tokens)
            position += len(segment)


@given(st.sets(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=10), st.text("abc", max_size=8))
def test_the_tree_matches_exactly_its_texts(texts: set[str], probe: str) -> None:
    assert bool(re.fullmatch(any_of(texts), probe)) == (probe in texts)


def test_a_token_may_swallow_the_space_around_it() -> None:
    tokens = SpecialTokens({"<m>": 1, "<n>": 2, "<o>": 3}, strips_left=frozenset([1]), strips_right=frozenset([2]))
    assert list(tokens.split("a <m> b <n> \n c <o> d <n>  <m>")) == ["a", 1, " b ", 2, "c ", 3, " d ", 2, 1]


def test_a_vocabulary_without_special_tokens() -> None:
    assert list(SpecialTokens({}).split("<s>")) == ["<s>"]
    assert list(SpecialTokens({}).split("")) == []


def test_many_tokens_that_begin_alike_cost_no_more_than_one() -> None:
    tokens = SpecialTokens({f"<|reserved_special_token_{number}|>": number for number in range(1000)})
    assert list(tokens.split("<" * 200_000)) == ["<" * 200_000]
    assert list(tokens.split("<|reserved_special_token_77|>")) == [77]
