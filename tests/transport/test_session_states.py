"""Hello and the daemon's states at the edge: what is told and refused before ready, while draining, and when the engine has ended."""

from __future__ import annotations

import pytest
from edge_fakes import INSTANCE
from edge_harness import Harness, only_failed, request_id, text_of
from kvd_client.protocol.codec import unpack_body
from kvd_client.protocol.messages import Failed, Hello, HelloReply, Ping, Pong, Prefixes, Result, Stats, Status, Tokenize, Unpin

from kvd.commands import Snapshot, Stopped


@pytest.mark.parametrize("state", ["starting", "rehydrating"])
def test_before_ready_requests_are_told_when_to_come_back_and_reports_answer(state):
    harness = Harness()
    harness.session.on_events([Snapshot(state, {"state": state}, {"uptime_s": 3}, 4.5)], harness.now)
    harness.generate()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.retryable, failed.retry_after_s) == ("starting", True, 4.5)
    harness.send(Ping(nonce=7))
    assert harness.take_messages() == [Pong(nonce=7, instance=INSTANCE, state=state)]
    harness.send(Status(op_id=request_id(1)))
    ((result, bodies),) = harness.take()
    assert isinstance(result, Result)
    assert unpack_body(bodies[0]) == {"state": state}
    harness.send(Stats(op_id=request_id(2)))
    ((_, bodies),) = harness.take()
    assert unpack_body(bodies[0])["transport"]["refused"] == 1
    harness.send(Unpin(op_id=request_id(3), name="x"))
    assert only_failed(harness.take_messages()).code == "starting"


def test_before_anything_is_known_hello_and_status_answer():
    harness = Harness(ready=False)
    harness.send(Hello(client="test"))
    (reply,) = harness.take_messages()
    assert isinstance(reply, HelloReply)
    assert (reply.instance, reply.state, reply.model, reply.version, reply.limits.max_model_len) == (INSTANCE, "starting", "", "1.2.3", 0)
    harness.send(Status(op_id=request_id(1)))
    ((_, bodies),) = harness.take()
    assert unpack_body(bodies[0])["state"] == "starting"
    harness.send(Tokenize(op_id=request_id(2), input="text"), b"x")
    assert only_failed(harness.take_messages()).code == "starting"


def test_hello_tells_the_models_facts_and_limits():
    harness = Harness(max_stop_strings=5)
    harness.send(Hello())
    (reply,) = harness.take_messages()
    assert (reply.model, reply.vocab_size, reply.fingerprint) == ("echo", 257, "00" * 32)
    assert (reply.limits.max_model_len, reply.limits.max_choices, reply.limits.max_stop_strings) == (512, 4, 5)


@pytest.mark.parametrize(("protocol", "code"), [((2, 9), "unsupported_version"), ((0, 0), "unsupported_version"), ((3, 1), "bad_request")])
def test_a_protocol_range_without_overlap_is_refused(protocol, code):
    harness = Harness()
    harness.send(Hello(protocol=protocol))
    assert only_failed(harness.take_messages()).code == code


def test_a_wider_protocol_range_is_welcome():
    harness = Harness()
    harness.send(Hello(protocol=(1, 7)))
    assert isinstance(harness.take_messages()[0], HelloReply)


def test_while_draining_requests_are_refused_and_running_ones_finish():
    harness = Harness()
    harness.generate(1)
    harness.engine_takes()
    harness.session.on_events([Snapshot("draining", {"state": "draining"}, {})], harness.now)
    harness.generate(2)
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.retryable) == ("draining", True)
    harness.run()
    assert text_of(harness.take()) == "abcab"


def test_when_the_engine_ends_everything_open_ends():
    harness = Harness()
    harness.generate(max_tokens=100)
    harness.engine_takes()
    harness.engine.silent = True
    harness.send(Status(op_id=request_id(7)))
    harness.send(Prefixes(op_id=request_id(8)))
    harness.session.on_events([Stopped()], harness.now)
    harness.settle()
    received = harness.take_messages()
    assert {type(message) for message in received} == {Failed, Result}
    assert {(message.request_id, message.op_id) for message in received if isinstance(message, Failed)} == {
        (request_id(1), b""),
        (b"", request_id(8)),
    }
    assert all(message.retryable for message in received if isinstance(message, Failed))
    assert harness.session.is_stopped
    assert harness.session.num_requests == 0
