"""Messages that can't be read: whoever waits for the answer learns it, by the id where there is one to be found."""

from __future__ import annotations

import msgspec
import pytest
from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.codec import encode, pack_body
from kvd_client.protocol.messages import MAX_HEADER_BYTES, Generate, Pin, Sampling

GENERATE = Generate(request_id=request_id(7), input="text", sampling=Sampling(banned_token_ids=(1,) * 4097))
PIN = Pin(op_id=request_id(8), name="p", input="text", template_args={"a": {1: 2}})


def test_a_header_beyond_the_limits_is_answered_under_its_id():
    harness = Harness()
    harness.send(encode(GENERATE, b"x"))
    harness.send(encode(PIN, b"x"))
    generate, pin = harness.take_messages()
    assert (generate.code, generate.request_id, generate.op_id) == ("bad_request", request_id(7), b"")
    assert generate.message == "banned_token_ids has an array of 4097 items; the limit is 4096"
    assert (pin.code, pin.request_id, pin.op_id) == ("bad_request", b"", request_id(8))
    assert harness.session.counters.malformed == 2


@pytest.mark.parametrize("bodies", [(b"x",) * 40, (bytes(70_000),)])
def test_too_many_frames_and_too_long_ones_are_answered_under_their_id(bodies):
    harness = Harness(max_message_bytes=65_536)
    harness.send(encode(Generate(request_id=request_id(7), input="text"), *bodies))
    (failed,) = harness.take_messages()
    assert (failed.code, failed.request_id) == ("too_large", request_id(7))


def test_a_header_that_is_too_long_is_not_searched_for_an_id():
    harness = Harness()
    harness.send([msgspec.msgpack.encode({"type": "ping", "op_id": bytes(16), "x": bytes(MAX_HEADER_BYTES)})])
    (failed,) = harness.take_messages()
    assert (failed.code, failed.op_id) == ("too_large", b"")


def test_tools_that_are_announced_must_be_there():
    harness = Harness()
    message = Generate(request_id=request_id(7), input="messages", tools=True)
    harness.send(message, pack_body([{"role": "user", "content": "x"}]), b"")
    assert only_failed(harness.take_messages()).code == "bad_request"
