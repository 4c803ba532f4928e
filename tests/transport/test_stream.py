"""A choice's stream: stop strings, tails, counting; whatever the cuts."""

from __future__ import annotations

import pytest
from edge_fakes import EOS, ByteText
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.transport.stream import ChoiceStream, StreamGapError
from kvd.types import TokenLogprobs, pack_tokens, unpack_tokens


def make(stops=(), *, has_text=True, **more):
    return ChoiceStream(0, detokenizer=ByteText().detokenizer([]) if has_text else None, stops=stops, silent_ids=frozenset({EOS}), **more)


def feed(stream, pieces, reason="length"):
    text, ids, index, dropped = "", [], 0, 0
    for piece in pieces:
        delta = stream.push(index, pack_tokens(piece), None)
        index += len(piece)
        text += delta.text
        ids += unpack_tokens(delta.token_ids).tolist()
        dropped += delta.num_dropped
    return text + stream.finish(reason), ids, dropped


def cut(data, lengths):
    pieces, rest = [], list(data)
    for length in lengths:
        pieces.append(rest[:length])
        rest = rest[length:]
    return [piece for piece in [*pieces, rest] if piece]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé😀", max_size=20),
    stops=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=3), max_size=3),
    lengths=st.lists(st.integers(1, 5), max_size=10),
    ends=st.booleans(),
)
def test_any_cut_gives_the_text_before_the_first_stop_and_counts_to_its_last_token(text, stops, lengths, ends):
    data = list(text.encode()) + ([EOS] if ends else [])
    stream = make(stops)
    got, ids, dropped = feed(stream, cut(data, lengths), "stop" if ends else "length")
    first_end = min((position for stop in stops if stop in text for position in [text.index(stop) + len(stop)]), default=None)
    if first_end is None:
        assert (got, ids, dropped) == (text, data, 0)
        assert stream.finish_reason == ("stop" if ends else "length")
        assert stream.num_tokens == len(data)
    else:
        longest = max(len(stop) for stop in stops if text[:first_end].endswith(stop))
        assert got == text[: first_end - longest]
        num_tokens = len(text[:first_end].encode())
        assert ids == data[:num_tokens]
        assert stream.num_tokens == num_tokens
        assert dropped == len(data) - num_tokens
        assert stream.finish_reason == "stop"


def test_a_stop_string_survives_the_engines_other_reason():
    stream = make(["b"])
    feed(stream, [[97, 98, 99]], "length")
    assert stream.finish_reason == "stop"


def test_unfinished_bytes_at_the_end_become_a_replacement_character():
    assert feed(make(), [[97, 0xE2, 0x82]])[0] == "a\ufffd"
    assert feed(make(["zz"]), [[97, 0xE2, 0x82]])[0] == "a\ufffd"


def test_a_replacement_character_can_complete_a_stop_string():
    stream = make(["a\ufffd"])
    assert feed(stream, [[98, 97, 0xE2]])[0] == "b"
    assert stream.finish_reason == "stop"


def test_text_held_for_a_possible_stop_comes_at_the_end():
    stream = make(["abc"])
    assert stream.push(0, pack_tokens([120, 97, 98]), None).text == "x"
    assert stream.finish("length") == "ab"


def test_logprobs_are_cut_with_their_tokens():
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in (97, 98, 99))
    delta = make(["b"]).push(0, pack_tokens([97, 98, 99]), logprobs)
    assert delta.logprobs == logprobs[:2]


def test_without_a_detokenizer_ids_pass_untouched():
    packed = pack_tokens([97, 98, EOS])
    stream = make(has_text=False)
    delta = stream.push(0, packed, None)
    assert delta.token_ids is packed
    assert (delta.text, delta.num_tokens, stream.finish("stop")) == ("", 3, "")


def test_a_gap_is_an_error():
    stream = make()
    stream.push(0, pack_tokens([97]), None)
    with pytest.raises(StreamGapError):
        stream.push(2, pack_tokens([97]), None)
    with pytest.raises(StreamGapError):
        stream.push(0, pack_tokens([97]), None)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abé😀", max_size=20),
    stops=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=3), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 5), max_size=10),
    min_tokens=st.integers(0, 12),
    include=st.booleans(),
)
def test_a_stop_string_counts_that_a_token_behind_min_tokens_completes(text, stops, lengths, min_tokens, include):
    data = list(text.encode())
    stream = make(stops, min_tokens=min_tokens, include_stop=include)
    got, ids, _ = feed(stream, cut(data, lengths))
    ends = [
        end for end in range(1, len(text) + 1) if len(text[:end].encode()) > min_tokens and any(text[:end].endswith(stop) for stop in stops)
    ]
    if not ends:
        assert (got, ids, stream.finish_reason) == (text, data, "length")
        return
    longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
    assert got == text[: ends[0] if include else ends[0] - longest]
    assert ids == data[: len(text[: ends[0]].encode())]
    assert stream.finish_reason == "stop"
