"""Hostile messages at codec and frame level: nothing raises, everything is answered or counted, and a valid request still works."""

from __future__ import annotations

from typing import Any

import msgpack
from edge_fakes import ByteText
from edge_harness import Harness, text_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvd_client.protocol.codec import ProtocolError, decode_client, decode_server
from kvd_client.protocol.messages import ClientMessage, Failed

from kvd.transport.bodies import TextJob, run_text_job

TYPES = [struct.__struct_config__.tag for struct in ClientMessage.__args__]
FIELDS = sorted({field for struct in ClientMessage.__args__ for field in struct.__struct_fields__} | {"temperature", "surprise"})

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=20)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=8
)
headers = st.fixed_dictionaries({"type": st.sampled_from(TYPES) | values}, optional=dict.fromkeys(FIELDS, values))
plausible = st.fixed_dictionaries(
    {
        "type": st.sampled_from(TYPES),
        "request_id": st.binary(min_size=16, max_size=16),
        "op_id": st.binary(min_size=16, max_size=16),
        "input": st.sampled_from(["text", "ids", "messages"]),
        "name": st.text(max_size=5),
    },
    optional={
        "num_tokens": st.integers(-(2**63), 2**64 - 1),
        "max_tokens": st.integers(-1, 600) | st.integers(-(2**63), 2**64 - 1),
        "min_tokens": st.integers(-(2**63), 2**64 - 1),
        "n": st.integers(-1, 6),
        "credit": st.integers(-(2**63), 2**64 - 1),
        "stop": st.lists(st.text(max_size=3), max_size=20),
        "stop_token_ids": st.lists(st.integers(-(2**63), 2**64 - 1), max_size=70),
        "sampling": st.dictionaries(
            st.sampled_from(["temperature", "top_p", "seed", "logprobs", "logit_bias", "allowed_token_ids", "banned_token_ids"]),
            st.floats() | st.integers(-1, 100) | st.lists(st.integers(-5, 300)) | st.lists(st.tuples(st.integers(0, 300), st.floats())),
        ),
        "bad_words": st.lists(st.text(max_size=3), max_size=4),
        "truncate_prompt": st.integers(-3, 10) | st.integers(-(2**63), 2**64 - 1),
        "prompt_logprobs": st.none() | st.integers(-2, 30),
        "echo": st.booleans(),
        "tools": st.booleans(),
        "include_stop": st.booleans(),
        "timeout_s": st.floats(),
        "protocol": st.tuples(st.integers(-5, 5), st.integers(-5, 5)),
        "template_args": st.dictionaries(st.text(max_size=4), values, max_size=3),
        "priority": st.integers(-(2**63), 2**64 - 1),
        "nonce": st.integers(-(2**63), 2**64 - 1),
    },
)


def pack(header: Any) -> bytes:
    return msgpack.packb(header, use_bin_type=True)


nested = st.integers(1, 3000).map(lambda depth: b"\x91" * depth + b"\x01") | st.integers(1, 3000).map(
    lambda depth: b"\x81\xa1x" * depth + b"\x01"
)
header_frames = (headers | plausible).map(pack)
truncated = st.tuples(header_frames, st.integers(0, 60)).map(lambda pair: pair[0][: max(0, len(pair[0]) - pair[1])])
frames = st.lists(
    header_frames | truncated | nested | st.binary(max_size=64) | st.just(b"\xc1") | st.just(b"\xdd\xff\xff\xff\xff"),
    min_size=0,
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=st.lists(frames, max_size=4))
def test_rubbish_never_raises_and_a_valid_request_works_afterwards(messages):
    harness = Harness()
    for message in messages:
        harness.send(list(message), peer=b"hostile")
    harness.run()
    assert harness.session.counters.internal_errors == 0
    for message in harness.take_messages(b"hostile"):
        if isinstance(message, Failed):
            assert message.message
            assert message.code
    harness.generate()
    harness.run()
    assert text_of(harness.take()) == "abcab"


def attempt(decode, frames):
    try:
        return decode(frames)
    except ProtocolError as error:
        return error


@settings(max_examples=80, deadline=None)
@given(frames=st.lists(header_frames | truncated | nested | st.binary(max_size=64), max_size=4))
def test_the_codec_decodes_or_says_why_not(frames):
    for decode in (decode_client, decode_server):
        outcome = attempt(decode, frames)
        if isinstance(outcome, ProtocolError):
            assert str(outcome)
            assert isinstance(outcome.header, dict)
        else:
            assert outcome[1] == frames[1:]


chat_values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=3), scalars, max_size=3)
chats = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), chat_values, max_size=4), max_size=5)


@settings(max_examples=80, deadline=None)
@given(body=chats.map(pack) | st.binary(max_size=80) | nested | st.just(b"\xdd\xff\xff\xff\xff") | st.just(b"\x91\xdf\xff\xff\xff\xff"))
def test_a_chat_body_gives_ids_or_a_clear_failure(body):
    for is_prefix in (False, True):
        result = run_text_job(TextJob(number=1, peer=b"p", input="messages", body=body, is_prefix=is_prefix), ByteText(), "2026-01-01")
        assert (result.error is None) == bool(result.token_ids)
        if result.error is not None:
            assert result.error.code == "bad_request"
