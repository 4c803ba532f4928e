"""Texts that are far too long are refused by their bytes: tokenising one takes seconds, in which nobody else's text would be."""

from __future__ import annotations

import pytest
from edge_fakes import ByteText
from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.codec import encode, pack_body
from kvd_client.protocol.messages import Generate, Pin

from kvd.text.token_length import TokenReach, reach


class LongTokens(ByteText):
    """As if a token could stand for so many bytes."""

    def __init__(self, max_token_bytes: int) -> None:
        self.max_token_bytes = max_token_bytes
        self.num_encoded = 0

    def fewest_tokens(self, text: bytes) -> int:
        return TokenReach(self.max_token_bytes).fewest_tokens(text)

    def encode(self, text: str) -> list[int]:
        self.num_encoded += 1
        return list(range(-(-len(text.encode()) // max(self.max_token_bytes, 1))))


CHAT = pack_body([{"role": "user", "content": "x" * (7 * 512 - len("<user><assistant>"))}])


@pytest.mark.parametrize(
    ("fields", "at_least"),
    [
        ({"body": b"x" * (7 * 511 + 1), "max_tokens": None}, 512),
        ({"body": b"x" * 7_600_000}, 1085715),
        ({"body": b"x" * (7 * 500 + 1), "max_tokens": 12}, 501),
        ({"body": "é".encode() * 7 * 256}, 512),
        ({"body": CHAT, "input": "messages"}, 512),
    ],
)
def test_a_text_whose_bytes_tell_that_it_can_never_fit_is_not_tokenised(fields, at_least):
    text = LongTokens(7)
    harness = Harness(text=text)
    harness.generate(**fields)
    failed = only_failed(harness.take_messages())
    assert failed.code == "prompt_too_long"
    assert f"the prompt has at least {at_least} tokens" in failed.message
    assert "512" in failed.message
    assert text.num_encoded == 0
    assert harness.session.num_requests == 0


def test_a_far_too_long_text_never_waits_for_a_text_thread():
    harness = Harness(text=LongTokens(7))
    harness.session.receive(b"peer", encode(Generate(request_id=request_id(1), input="text"), b"x" * 7_600_000), harness.now)
    harness.session.receive(b"peer", encode(Pin(op_id=request_id(2), name="a", input="text"), b"x" * 7_600_000), harness.now)
    assert not harness.session.take_text_jobs()
    harness.settle()
    assert [failed.code for failed in harness.take_messages()] == ["prompt_too_long"] * 2


@pytest.mark.parametrize(("max_token_bytes", "size"), [(7, 7 * 500), (0, 400)])
def test_a_text_that_might_fit_is_tokenised(max_token_bytes, size):
    harness = Harness(text=LongTokens(max_token_bytes))
    harness.generate(body=b"x" * size, max_tokens=12)
    harness.generate(2, body=pack_body([{"role": "user", "content": "x" * (size - 17)}]), input="messages", max_tokens=12)
    assert not harness.take_messages()
    assert len(harness.commands) == 2


def test_where_nothing_bounds_a_token_the_tokens_are_counted():
    text = LongTokens(0)
    harness = Harness(text=text)
    harness.generate(body=b"x" * 5000)
    assert "the prompt has 5000 tokens" in only_failed(harness.take_messages()).message
    assert text.num_encoded == 1


def test_bytes_that_the_vocabulary_lacks_count_for_nothing():
    """A vocabulary of bytes may lack some that its model never met: they vanish from texts."""
    partial = reach(["a", "b", "Ġ", "ab", "aab"], ["<x>", "<é>"], byte_level=True)
    assert partial.max_bytes == len("<é>".encode())
    assert (97 in partial.lost, 32 in partial.lost, 99 in partial.lost) == (False, False, True)
    assert partial.fewest_tokens(b"a" * 9) == 3
    assert partial.fewest_tokens(b"acc" * 9) == 3
    assert partial.fewest_tokens(b"c" * 9) == 0
