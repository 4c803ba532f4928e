"""Ids to text, piece by piece: nothing lost, nothing broken, wherever the ids are cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvd.text.detokenizer import IncrementalDetokenizer, PieceRules, PieceTable, byte_level_alphabet

CHAR_OF_BYTE = {byte: char for char, byte in byte_level_alphabet().items()}
BYTES = PieceTable({byte: CHAR_OF_BYTE[byte] for byte in range(256)}, PieceRules(byte_level=True))
SENTENCEPIECE = PieceTable(
    {3 + byte: f"<0x{byte:02X}>" for byte in range(256)} | {300: "▁", 301: "▁Hello", 302: "▁world", 303: "é", 304: "▁▁"},
    PieceRules(byte_fallback=True, replacements=(("▁", " "),), num_leading_spaces=1),
)


def pushed(table: PieceTable, ids: list[int], points: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(table, prompt or [])
    bounds = [0, *sorted(point % (len(ids) + 1) for point in points), len(ids)]
    pieces = [detokenizer.push(ids[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


def test_the_alphabet_is_a_bijection_of_the_bytes() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == ord(" ")
    assert alphabet["Ċ"] == ord("\n")
    assert alphabet["a"] == ord("a")


@given(st.text(max_size=40), st.lists(st.integers(0, 1000), max_size=10))
def test_any_text_survives_any_cut(text: str, points: list[int]) -> None:
    pieces = pushed(BYTES, list(text.encode()), points)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=30), st.lists(st.integers(0, 1000), max_size=10))
def test_broken_bytes_come_out_as_in_one_piece(data: bytes, points: list[int]) -> None:
    assert "".join(pushed(BYTES, list(data), points)) == data.decode("utf-8", "replace")


def test_an_unfinished_character_waits_and_is_replaced_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert [detokenizer.push([byte]) for byte in "a😀".encode()] == ["a", "", "", "", "😀"]
    assert detokenizer.push(list("😀".encode()[:3])) == ""
    assert detokenizer.flush() == "\ufffd"


@given(st.lists(st.sampled_from([300, 301, 302, 303, 304, *range(3, 259)]), max_size=20), st.lists(st.integers(0, 100), max_size=6))
def test_byte_fallback_equals_the_bytes_of_the_whole(ids: list[int], points: list[int]) -> None:
    raw = b"".join(SENTENCEPIECE.bytes_of(token_id) for token_id in ids)
    assert "".join(pushed(SENTENCEPIECE, ids, points)) == raw.removeprefix(b" ").decode("utf-8", "replace")


def test_the_space_before_a_text_is_cut_but_not_the_one_before_a_continuation() -> None:
    assert "".join(pushed(SENTENCEPIECE, [301, 302], [])) == "Hello world"
    assert "".join(pushed(SENTENCEPIECE, [302], [], prompt=[301])) == " world"
    assert "".join(pushed(SENTENCEPIECE, [301], [], prompt=[1])) == "Hello"
    assert "".join(pushed(SENTENCEPIECE, [304, 301], [])) == "  Hello"


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    emoji = list("😀".encode())
    assert "".join(pushed(BYTES, [*emoji[2:], 97], [1], prompt=[98, *emoji[:2]])) == "😀a"


def test_special_and_unknown_ids_have_no_text() -> None:
    assert "".join(pushed(BYTES, [97, 256, 98, 10_000_000], [])) == "ab"


def test_added_tokens_stand_for_themselves() -> None:
    table = PieceTable({0: "a b", 1: "Ġ", 2: "tool call", 3: "é"}, PieceRules(byte_level=True), frozenset([3]))
    assert "".join(pushed(table, [0, 1, 2], [])) == "a b tool call"
    assert table.bytes_of(3) == "é".encode()


def test_a_token_is_decoded_once_however_long_the_text() -> None:
    calls = 0

    class Counting(PieceTable):
        def bytes_of(self, token_id: int) -> bytes:
            nonlocal calls
            calls += 1
            return super().bytes_of(token_id)

    detokenizer = IncrementalDetokenizer(Counting({97: "a"}, PieceRules(byte_level=True)))
    for _ in range(1000):
        detokenizer.push([97])
    assert calls == 1000


@given(st.lists(st.binary(min_size=1, max_size=4), max_size=12), st.integers(0, 12), st.lists(st.integers(0, 1000), max_size=6))
def test_an_echoed_prompt_and_its_output_are_the_text_of_all_tokens(tokens: list[bytes], num_prompt: int, points: list[int]) -> None:
    """Tokens of any bytes, cut between prompt and output anywhere: the prompt's text is not flushed."""
    table = PieceTable(
        {number: "".join(CHAR_OF_BYTE[byte] for byte in token) for number, token in enumerate(tokens)}, PieceRules(byte_level=True)
    )
    ids = list(range(len(tokens)))
    num_prompt = min(num_prompt, len(tokens))
    echoed = IncrementalDetokenizer(table).push(ids[:num_prompt])
    whole = b"".join(tokens).decode("utf-8", "replace")
    assert echoed + "".join(pushed(table, ids[num_prompt:], points, prompt=ids[:num_prompt])) == whole


@given(st.text(max_size=30), st.lists(st.integers(1, 5), max_size=40))
def test_no_piece_of_any_text_holds_a_broken_character(text: str, lengths: list[int]) -> None:
    data, tokens = text.encode(), list[bytes]()
    for length in lengths:
        tokens.append(data[:length])
        data = data[length:]
    tokens = [token for token in [*tokens, data] if token]
    table = PieceTable(
        {number: "".join(CHAR_OF_BYTE[byte] for byte in token) for number, token in enumerate(tokens)}, PieceRules(byte_level=True)
    )
    detokenizer = IncrementalDetokenizer(table)
    given_out = ""
    for number in range(len(tokens)):
        given_out += detokenizer.push([number])
        assert text.startswith(given_out)
    assert given_out + detokenizer.flush() == text
