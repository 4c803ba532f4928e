"""Priority and the times that a request names, at the edge: what reaches the engine, and what is over before it could."""

from __future__ import annotations

import pytest
from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.codec import encode
from kvd_client.protocol.messages import Generate

from kvd.commands import RequestFailed, Submit
from kvd.types import ErrorCode


def begin(harness: Harness, **fields: object) -> None:
    """A generate whose prompt is not tokenised yet."""
    message = Generate(request_id=request_id(1), input="text", max_tokens=5, **fields)  # type: ignore[arg-type]
    harness.session.receive(b"peer", encode(message, b"abc"), harness.now)


def test_priority_and_times_reach_the_engine():
    harness = Harness()
    harness.generate(priority=-3, deadline_s=2.5, queue_timeout_s=1.5)
    (submit,) = harness.commands
    assert isinstance(submit, Submit)
    assert (submit.priority, submit.deadline_s, submit.queue_timeout_s) == (-3, 2.5, 1.5)


def test_times_run_from_the_arrival_not_from_the_end_of_the_tokenising():
    harness = Harness()
    begin(harness, deadline_s=10.0, queue_timeout_s=4.0)
    harness.now += 3.0
    harness.settle()
    (submit,) = harness.commands
    assert isinstance(submit, Submit)
    assert (submit.deadline_s, submit.queue_timeout_s) == (7.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "code", "retryable"),
    [
        ({"deadline_s": 2.0}, "deadline_exceeded", False),
        ({"queue_timeout_s": 2.0}, "queue_timeout", True),
        ({"deadline_s": 2.0, "queue_timeout_s": 1.0}, "deadline_exceeded", False),
    ],
)
def test_a_time_that_is_over_by_the_end_of_the_tokenising_ends_the_request_there(fields, code, retryable):
    harness = Harness()
    begin(harness, **fields)
    harness.now += 2.0
    harness.settle()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.retryable, failed.retry_after_s > 0) == (code, retryable, retryable)
    assert not harness.commands
    assert harness.session.num_requests == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 11}, "priority is 11; it must be from -10 to 10"),
        ({"priority": -11}, "priority is -11; it must be from -10 to 10"),
        ({"deadline_s": -1.0}, "deadline_s is -1.0; it must be from 0"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"queue_timeout_s": float("inf")}, "queue_timeout_s"),
    ],
)
def test_a_wrong_one_is_named(fields, message):
    harness = Harness()
    harness.generate(**fields)
    failed = only_failed(harness.take_messages())
    assert failed.code == "bad_request"
    assert message in failed.message


@pytest.mark.parametrize(("code", "runs_again"), [(ErrorCode.QUEUE_TIMEOUT, True), (ErrorCode.DEADLINE_EXCEEDED, False)])
def test_after_a_queue_timeout_the_same_id_may_be_sent_again(code, runs_again):
    harness = Harness()
    harness.generate()
    harness.session.on_events([RequestFailed(request_id(1), code, "late", 0.5)], harness.now)
    harness.settle()
    assert only_failed(harness.take_messages()).retry_after_s == 0.5
    harness.commands.clear()
    harness.generate()
    assert bool(harness.commands) == runs_again
