"""Bodies: what is accepted, and what hostile ones cost."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from edge_fakes import ByteText
from kvd_client.protocol.codec import pack_body
from kvd_client.protocol.messages import MAX_NESTING

from kvd.transport.bodies import MAX_CHAT_MESSAGES, MAX_STRUCTURED_BYTES, TextJob, run_text_job, unpack_messages, unpack_tools
from kvd.transport.errors import RequestError


def test_a_chat_with_every_kind_of_value_survives():
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
            "weight": 1.5,
            "n": -3,
        },
    ]
    assert unpack_messages(pack_body(chat)) == chat


def test_a_long_plain_content_is_no_structured_value():
    chat = [{"role": "user", "content": "x" * (4 * MAX_STRUCTURED_BYTES)}]
    assert unpack_messages(pack_body(chat)) == chat


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\x00\x80\x00\x00" + b"\x80" * (8 << 20),  # eight million empty maps
        b"\x91\x82\xa4role\xa4user\xa7content\xdd\x00\x80\x00\x00" + b"\x80" * (8 << 20),  # the same inside a value
        b"\x91\xdf\x00\x10\x00\x00" + b"\xa1x\xc0" * (1 << 20),  # a million keys
        b"\x91" * 8_000_000,
        b"\x92\x81\xa4role\xa4user" + b"\x91" * 200_000 + b"\x01",
    ],
)
def test_amplification_is_refused_before_anything_is_built(body):
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            unpack_messages(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body) + (1 << 20)


def test_structured_values_have_one_budget():
    part = [{"text": "x" * 1000}]
    fits = MAX_STRUCTURED_BYTES // 1100
    assert len(unpack_messages(pack_body([{"role": "user", "content": part}] * fits))) == fits
    with pytest.raises(RequestError, match="structured"):
        unpack_messages(pack_body([{"role": "user", "content": part}] * (fits * 2)))


@pytest.mark.parametrize("levels", [MAX_NESTING, MAX_NESTING + 1, 400, 900, 990, 5000])
def test_nesting_of_any_key_of_a_message_is_bounded(levels):
    body = b"\x91\x82\xa4role\xa4user\xa5extra" + b"\x91" * (levels - 2) + b"\x01"
    if levels <= MAX_NESTING:
        assert unpack_messages(body)[0]["role"] == "user"
    else:
        with pytest.raises(RequestError):
            unpack_messages(body)


def test_too_many_messages():
    with pytest.raises(RequestError, match="4096"):
        unpack_messages(pack_body([{"role": "user"}] * (MAX_CHAT_MESSAGES + 1)))


@pytest.mark.parametrize(
    "body", [pack_body([{"role": "u"}]) + b"\0", pack_body([{"role": "u"}])[:-1], b"", pack_body([{1: 2}]), pack_body([{b"role": 1}])]
)
def test_what_is_not_exactly_a_chat_is_refused(body):
    with pytest.raises(RequestError):
        unpack_messages(body)


TOOL = {"type": "function", "function": {"name": "f", "strict": True, "weights": [1, 2.5, None]}}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (b"", "1 to 256 maps"),
        (pack_body([]), "1 to 256 maps"),
        (pack_body([{"name": b"bytes"}]), "JSON"),
        (pack_body([{"name": msgspec.msgpack.Ext(5, b"x")}]), "JSON"),
        (pack_body([{"name": {"deep": [b"x"]}}]), "JSON"),
        (pack_body([{"name": {b"x": 1}}]), "JSON"),
        (pack_body([{"name": {1: 1}}]), "JSON"),
    ],
)
def test_tools_that_are_none_are_refused(tools, words):
    result = run_text_job(TextJob(number=1, peer=b"", input="messages", body=pack_body([{"role": "user"}]), tools=tools), ByteText(), "")
    assert result.error is not None
    assert result.error.code == "bad_request"
    assert words in result.error.message


def test_tools_with_every_kind_of_value_survive():
    assert unpack_tools(pack_body([TOOL])) == [TOOL]


def test_a_job_never_raises():
    class Broken(ByteText):
        def encode(self, text):
            raise MemoryError

    result = run_text_job(TextJob(number=4, peer=b"", input="text", body=b"x"), Broken(), "")
    assert result.number == 4
    assert isinstance(result.fault, MemoryError)
