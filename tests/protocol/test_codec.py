"""The codec's limits and its errors' codes."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from kvd_client.protocol.codec import ProtocolError, check, decode_client, decode_server, encode, ids_in, pack_body, unpack_body
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import MAX_HEADER_BYTES, MAX_NESTING, Generate, Ping, Sampling


def code_of(frames):
    with pytest.raises(ProtocolError) as caught:
        decode_client(frames)
    return caught.value.code


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([], Code.BAD_REQUEST),
        ([b""], Code.BAD_REQUEST),
        ([b"\xc1"], Code.BAD_REQUEST),
        ([msgpack.packb([1, 2])], Code.BAD_REQUEST),
        ([msgpack.packb({})], Code.UNKNOWN_TYPE),
        ([msgpack.packb({"type": "tokens"})], Code.UNKNOWN_TYPE),
        ([msgpack.packb({"type": ["hello"]})], Code.UNKNOWN_TYPE),
        ([msgpack.packb({"type": {"a": 1}})], Code.UNKNOWN_TYPE),
        ([msgpack.packb({"type": 5})], Code.UNKNOWN_TYPE),
        ([msgpack.packb({"type": "abort"})], Code.BAD_REQUEST),
        ([msgpack.packb({"type": "ping", "nonce": "x"})], Code.BAD_REQUEST),
        ([msgpack.packb({"type": "ping"}) + b"\0"], Code.BAD_REQUEST),
        ([msgpack.packb({"type": "ping", "x": msgpack.ExtType(5, b"x")})], Code.BAD_REQUEST),
        ([msgpack.packb({"type": "ping", 5: 1})], Code.BAD_REQUEST),
        ([b"\x91" * 2000], Code.BAD_REQUEST),
        ([msgpack.packb({"type": "ping", "x": [0] * 5000})], Code.BAD_REQUEST),
        ([msgpack.packb({"type": "ping", "x": bytes(MAX_HEADER_BYTES)})], Code.TOO_LARGE),
        ([bytes(MAX_HEADER_BYTES + 1)], Code.TOO_LARGE),
    ],
)
def test_what_is_wrong_has_a_code(frames, code):
    assert code_of(frames) is code


def test_the_ids_of_an_unreadable_message_are_kept_for_the_answer():
    with pytest.raises(ProtocolError) as caught:
        decode_client([msgpack.packb({"type": "generate", "request_id": bytes(16)})])
    assert caught.value.header["request_id"] == bytes(16)
    assert "input" in str(caught.value)


def test_a_header_too_long_to_send_is_refused_here():
    with pytest.raises(ProtocolError, match="body"):
        encode(Generate(request_id=bytes(16), input="text", stop=("x" * MAX_HEADER_BYTES,)))


def test_bodies_pass_as_they_are():
    body = bytes(100_000)
    message, bodies = decode_client(encode(Ping(), body, b""))
    assert message == Ping()
    assert bodies[0] is body
    assert bodies[1] == b""


def test_structured_bodies():
    data = {"a": [1, 2.5, None, "ü", b"x"], "b": {"c": True}}
    assert unpack_body(pack_body(data)) == data
    with pytest.raises(ProtocolError):
        unpack_body(pack_body([0] * 10), max_items=9)
    with pytest.raises(ProtocolError):
        unpack_body(b"\xc1")
    with pytest.raises(ProtocolError):
        unpack_body(b"\x91" * MAX_NESTING + b"\x90")


def nested_pin(levels):
    """A pin whose header nests so many arrays and maps: itself, its arguments, arrays."""
    fields = ["type", "pin", "op_id", bytes(16), "name", "evil", "input", "text", "template_args"]
    return [b"\x85" + b"".join(map(msgpack.packb, fields)) + b"\x81\xa1x" + b"\x91" * (levels - 2) + b"\x01"]


def test_nesting_is_bounded_and_the_ids_are_kept_for_the_answer():
    message, _ = decode_client(nested_pin(MAX_NESTING))
    assert message.name == "evil"
    for levels in (MAX_NESTING + 1, 400, 900, 980, 1000):
        with pytest.raises(ProtocolError, match="32 deep") as caught:
            decode_client(nested_pin(levels))
        assert caught.value.code is Code.BAD_REQUEST
        assert caught.value.header["op_id"] == bytes(16)
    assert code_of(nested_pin(5000)) is Code.BAD_REQUEST


BEYOND_THE_LIMITS = [
    ({"sampling": Sampling(banned_token_ids=(1,) * 4097)}, "banned_token_ids has an array of 4097 items; the limit is 4096"),
    ({"sampling": Sampling(logit_bias=tuple((i, 1.0) for i in range(4097)))}, "logit_bias has an array of 4097 items"),
    ({"stop": ("x",) * 4097}, "stop has an array of 4097 items"),
    ({"template_args": {"a": [1] * 5000}}, "template_args has an array of 5000 items"),
    ({"template_args": {"a": {str(i): 0 for i in range(4097)}}}, "template_args has a map of 4097 items"),
    ({"template_args": {"a": {1: 2}}}, "template_args has a map with a key that is no string"),
    ({"template_args": {"a": msgspec.msgpack.Ext(5, b"x")}}, "template_args has a value of an extension type"),
]


@pytest.mark.parametrize(("fields", "words"), BEYOND_THE_LIMITS)
def test_what_the_other_side_would_not_read_is_found_before_it_is_sent_and_has_an_id_if_it_is(fields, words):
    message = Generate(request_id=bytes(range(16)), input="text", **fields)
    with pytest.raises(ProtocolError, match=words):
        check(message)
    with pytest.raises(ProtocolError, match=words) as caught:
        decode_client(encode(message))
    assert caught.value.code is Code.BAD_REQUEST
    assert caught.value.header["request_id"] == bytes(range(16))


def test_what_fits_is_not_refused():
    check(Generate(request_id=bytes(16), input="text", sampling=Sampling(banned_token_ids=(1,) * 4096), template_args={"a": [b"x", None]}))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x91" * 60_000],
        [b"\x82\xa1x" + b"\x91" * 60_000 + b"\x01\xa5op_id\xc4\x01a"],
        [msgpack.packb({"op_id": "text"})],
        [msgpack.packb({5: 1})],
        [msgpack.packb({"x": bytes(MAX_HEADER_BYTES), "op_id": bytes(16)})],
    ],
)
def test_there_need_not_be_ids(frames):
    assert not any(ids_in(frames).values())


@pytest.mark.parametrize(
    "header",
    [
        {"type": "abort", "request_id": "AAAAAAAAAAAAAAAAAAAAAA=="},
        {"type": "status", "op_id": "AAAAAAAAAAAAAAAAAAAAAA=="},
        {"type": "generate", "request_id": bytes(16), "input": "text", "cache_salt": "AAAA"},
        {"type": "unpin", "op_id": bytes(16), "name": b"name"},
    ],
)
def test_bytes_and_text_do_not_stand_for_each_other(header):
    assert code_of([msgpack.packb(header)]) is Code.BAD_REQUEST


def test_a_daemons_ids_are_bytes_too():
    with pytest.raises(ProtocolError):
        decode_server([msgpack.packb({"type": "result", "op_id": "AAAAAAAAAAAAAAAAAAAAAA=="})])
