"""Stop strings against a naive reference: look at every end, shortest text first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.text.stop import StopMatcher


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def cut(text: str, points: list[int]) -> list[str]:
    bounds = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(bounds)]


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    final = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        final += text
        if matched:
            assert matcher.push("more") == ("", True)
            assert matcher.flush() == ""
            return final, True
    return final + matcher.flush(), False


@given(
    st.text("ab\u00e9😀", max_size=30),
    st.lists(st.text("ab\u00e9😀", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 100), max_size=8),
)
def test_it_equals_the_reference_however_the_text_is_cut(text: str, stops: list[str], points: list[int]) -> None:
    assert run(cut(text, points), stops) == reference(text, stops)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.lists(st.integers(0, 100)))
def test_it_holds_back_only_what_may_become_a_stop_string(text: str, stops: list[str], points: list[int]) -> None:
    matcher = StopMatcher(stops)
    seen = final = ""
    for piece in cut(text, points):
        seen += piece
        out, matched = matcher.push(piece)
        final += out
        if matched:
            return
        held = seen[len(final) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer = [seen[-length:] for length in range(len(held) + 1, len(seen) + 1)]
        assert not any(stop.startswith(tail) for stop in stops for tail in longer)


def test_a_stop_string_over_several_pieces_is_cut_out() -> None:
    assert run(["Hello", "<", "|e", "nd|", "> tail"], ["<|end|>"]) == ("Hello", True)


def test_text_that_only_looked_like_one_comes_out() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("a\n\nUs") == ("a", False)
    assert matcher.push("e it") == ("\n\nUse it", False)
    assert matcher.flush() == ""


def test_the_first_to_be_completed_wins_and_the_longest_at_one_end() -> None:
    assert run(["xabc"], ["abc", "b"]) == ("xa", True)
    assert run(["xabc"], ["bc", "abc", "c"]) == ("x", True)


def test_a_long_hostile_stop_string_costs_linear_time() -> None:
    length = 50_000
    matcher = StopMatcher(["a" * length + "b"])
    pieces = [matcher.push("a" * 100)[0] for _ in range(2 * length // 100)]
    assert sum(map(len, pieces)) == length
    assert matcher.push("b") == ("", True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def late_reference(text: str, stops: list[str], first: int, *, include: bool) -> tuple[str, bool]:
    """The first stop string that is completed by character ``first`` or a later one."""
    for end in range(first + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end if include else end - max(map(len, matches))], True
    return text, False


@given(
    st.text("ab\u00e9\u0301", max_size=25),
    st.lists(st.text("ab\u00e9\u0301", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 10),
    st.booleans(),
)
def test_what_is_completed_too_early_is_text_and_what_is_included_stays(text: str, stops: list[str], first: int, include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    final, is_over = "", False
    for place, char in enumerate(text):
        out, is_over = matcher.push(char, may_end=place >= first)
        final += out
        if is_over:
            break
        if include:
            assert final == text[: place + 1], "nothing is held back"
    assert (final + matcher.flush(), is_over) == late_reference(text, stops, first, include=include)


def test_a_stop_string_may_end_inside_what_people_see_as_one_character() -> None:
    assert run(["caf", "e", "\u0301", " noir"], ["e"]) == ("caf", True)
    assert run(["cafe\u0301 noir"], ["\u0301 "]) == ("cafe", True)
