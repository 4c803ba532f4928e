"""Faults of templates, text models, results and engine at the edge: each is its own request's or operation's alone, and counted."""

from __future__ import annotations

import pytest
from edge_fakes import ByteText
from edge_harness import Harness, only_failed, request_id, text_of
from kvd_client.protocol.codec import pack_body
from kvd_client.protocol.messages import Checkpoint, Finished, Pin, Status

from kvd.commands import ChoiceDone, OpDone, RequestDone, RequestFailed, RequestUsage, Snapshot, TokensOut
from kvd.text.errors import TextError
from kvd.types import pack_tokens


def test_a_template_that_refuses_is_the_requests_failure():
    harness = Harness()
    harness.generate(body=pack_body([{"role": "user", "content": "x"}]), input="messages", template_args={"explode": 1})
    failed = only_failed(harness.take_messages())
    assert failed.code == "bad_request"
    assert "template exploded" in failed.message
    assert harness.session.counters.internal_errors == 0
    assert not harness.commands


class Panic(BaseException):
    """As a library's panic arrives in Python: no Exception."""


@pytest.mark.parametrize("fault", [ValueError("what"), RecursionError(), MemoryError(), Panic()])
def test_a_fault_in_rendering_is_that_messages_alone_and_counted(fault):
    class Faulty(ByteText):
        def encode(self, text):
            if text == "boom":
                raise fault
            return super().encode(text)

    harness = Harness(text=Faulty())
    harness.generate(1, b"boom")
    harness.generate(2, b"fine")
    assert only_failed(harness.take_messages()).code == "internal"
    assert harness.session.counters.internal_errors == 1
    harness.run()
    assert isinstance(harness.take_messages()[-1], Finished)


def test_a_result_that_cannot_be_encoded_fails_its_operation_alone():
    harness = Harness()
    harness.send(Checkpoint(op_id=request_id(1)))
    harness.send(Checkpoint(op_id=request_id(2)))
    first, second = harness.commands
    harness.session.on_events([OpDone(first.op_id, {"x": object()}), OpDone(second.op_id, {"x": 1})], harness.now)
    harness.settle()
    failed, result = harness.take_messages()
    assert (failed.code, failed.op_id) == ("internal", request_id(1))
    assert result.op_id == request_id(2)
    assert harness.session.counters.internal_errors == 1
    harness.send(Checkpoint(op_id=request_id(1)))
    assert len(harness.commands) == 3, "its id is free again"


def test_a_report_that_cannot_be_encoded_is_answered_from_the_clock_too():
    harness = Harness()
    harness.session.on_events([Snapshot("ready", {"bad": object()}, {})], harness.now)
    harness.send(Status(op_id=request_id(1)))
    harness.now += 5.0
    harness.session.tick(harness.now)
    harness.settle()
    assert only_failed(harness.take_messages()).code == "internal"


def test_a_failure_whose_text_is_no_utf8_is_told():
    harness = Harness()
    harness.generate()
    harness.session.on_events([RequestFailed(request_id(1), "internal", "a\udc80b")], harness.now)
    harness.settle()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.message) == ("internal", "a?b")
    assert harness.session.counters.internal_errors == 1, "faults beyond the edge count too"


def test_a_gap_in_the_engines_tokens_fails_that_request_alone():
    harness = Harness()
    harness.generate(1)
    harness.generate(2)
    harness.engine_takes()
    harness.session.on_events([TokensOut(request_id(1), 0, 3, pack_tokens([97]))], harness.now)
    harness.settle()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.request_id) == ("internal", request_id(1))
    harness.run()
    assert text_of(harness.take(), 2) == "abcab"
    assert harness.session.num_requests == 0
    assert harness.session.counters.internal_errors == 1


def test_late_and_unknown_engine_events_are_ignored():
    harness = Harness()
    for event in (
        TokensOut(request_id(5), 0, 0, pack_tokens([1])),
        ChoiceDone(request_id(5), 0, "stop"),
        RequestDone(request_id(5), RequestUsage()),
        RequestFailed(request_id(5), "kv_capacity", "x"),
    ):
        harness.session.on_events([event], harness.now)
    assert harness.session.take_outgoing() == []
    assert harness.session.counters.internal_errors == 0


def test_a_failure_of_any_length_fits_its_message():
    class Talkative(ByteText):
        def encode(self, text):
            raise TextError("x" * 1_000_000)

    harness = Harness(text=Talkative())
    harness.generate()
    failed = only_failed(harness.take_messages())
    assert failed.code == "bad_request"
    assert 0 < len(failed.message) < 10_000


def test_a_fault_of_the_text_model_is_the_requests_alone():
    class Faulty(ByteText):
        def detokenizer(self, prompt_ids):
            raise ZeroDivisionError

        digest = property(lambda self: 1 / 0)

    harness = Harness(text=Faulty())
    harness.generate()
    assert only_failed(harness.take_messages()).code == "internal"
    harness.send(Pin(op_id=request_id(1), name="a", input="text"), b"x" * 20)
    assert only_failed(harness.take_messages()).code == "internal"
    assert harness.session.num_requests == 0
    harness.generate(2, text=False)
    harness.run()
    assert isinstance(harness.take_messages()[-1], Finished)
