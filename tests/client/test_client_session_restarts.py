"""Restarts, refusals for now, duplicates and holes on a session without a socket: what is sent again and under which id, and what is interrupted."""

from __future__ import annotations

import pytest
from kvd_client import errors
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Abort, Failed, Hello, Pong
from kvd_client.results import Chunk, Completion
from kvd_client.session import MAX_LOST, MAX_RETRY_S, SETTLE_S
from session_world import ONE, TWO, Bench, finished, hello_reply


def test_a_request_that_had_not_begun_goes_to_the_new_daemon_under_its_id() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    (first,) = bench.sent()
    bench.lose()
    assert deliveries == []
    (again,) = bench.connect(TWO)
    assert again == first
    bench.tokens(call.key, [4], 0, "x")
    bench.receive(finished(call.key, 1))
    assert deliveries[-1].token_ids == (4,)


def test_a_stream_that_had_begun_is_interrupted_and_what_came_just_before_the_end_is_kept() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    bench.tokens(call.key, [1], 0, "a")
    bench.session.disconnected(bench.now)
    bench.tokens(call.key, [2], 1, "b")
    bench.pass_time(SETTLE_S)
    assert [type(delivery) for delivery in deliveries] == [Chunk, Chunk, errors.Interrupted]
    assert deliveries[-1].retryable
    assert isinstance(deliveries[-1], ConnectionError)
    assert bench.connect(TWO) == []


def test_a_stream_that_ends_with_its_last_words_is_complete() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    bench.tokens(call.key, [1], 0, "a")
    bench.session.disconnected(bench.now)
    bench.receive(finished(call.key, 1))
    bench.pass_time(1.0)
    assert isinstance(deliveries[-1], Completion)


def test_a_whole_answer_of_which_nothing_was_shown_starts_over() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    bench.tokens(call.key, [1, 2], 0, "ab")
    bench.lose()
    (again,) = bench.connect(TWO)
    assert again.request_id == call.key
    bench.tokens(call.key, [8], 0, "z")
    bench.receive(finished(call.key, 1))
    assert (deliveries[0].text, deliveries[0].token_ids) == ("z", (8,))


def test_a_call_that_so_many_daemons_did_not_survive_is_not_sent_to_another() -> None:
    bench = Bench()
    _, deliveries = bench.generate()
    for i in range(MAX_LOST):
        assert len(bench.connect(bytes([i]) * 16)) == 1
        assert deliveries == []
        bench.lose()
    assert isinstance(deliveries[0], errors.Interrupted)
    assert bench.connect(b"z" * 16) == []


def test_a_restart_that_only_a_pong_tells_of_is_a_restart() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    started, chunks = bench.generate(stream=True)
    bench.tokens(started.key, [1], 0)
    bench.sent()
    bench.receive(Pong(instance=TWO, state="starting"))
    assert isinstance(chunks[-1], errors.Interrupted)
    assert [type(message) for message in bench.sent()] == [Hello]
    bench.receive(hello_reply(TWO))
    (again,) = bench.sent()
    assert again.request_id == call.key
    assert deliveries == []


@pytest.mark.parametrize("code", [Code.STARTING, Code.DRAINING])
def test_refused_for_now_is_sent_again_under_its_id_after_the_estimate(code: Code) -> None:
    bench = Bench()
    bench.connect(state="starting")
    call, deliveries = bench.generate(timeout_s=30.0)
    (first,) = bench.sent()
    bench.receive(Failed(request_id=call.key, code=code, message="later", retryable=True, retry_after_s=0.7))
    bench.pass_time(0.69)
    assert bench.sent() == []
    bench.pass_time(0.02)
    assert bench.sent() == [first]
    bench.receive(Failed(request_id=call.key, code=code, message="much later", retryable=True, retry_after_s=1000.0))
    bench.pass_time(MAX_RETRY_S + 0.01)
    assert bench.sent() == [first]
    bench.receive(finished(call.key, 0))
    assert isinstance(deliveries[0], Completion)


def test_a_client_waits_through_draining_restart_and_start() -> None:
    bench = Bench(reconnect_timeout_s=60.0)
    bench.connect()
    call, deliveries = bench.generate()
    bench.receive(Failed(request_id=call.key, code=Code.DRAINING, message="going", retryable=True, retry_after_s=1.0))
    bench.sent()
    bench.lose()
    bench.pass_time(20.0)
    (again,) = bench.connect(TWO, "starting")
    bench.receive(Failed(request_id=again.request_id, code=Code.STARTING, message="loading", retryable=True, retry_after_s=1.0))
    bench.pass_time(1.01)
    (third,) = bench.sent()
    bench.receive(finished(third.request_id, 0))
    assert isinstance(deliveries[0], Completion)
    assert deliveries[0].request_id == call.key


def test_waiting_for_readiness_ends_at_the_deadline_with_the_reason() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(timeout_s=5.0)
    bench.receive(Failed(request_id=call.key, code=Code.STARTING, message="loading weights", retryable=True, retry_after_s=10.0))
    bench.pass_time(2.01)
    bench.receive(Failed(request_id=call.key, code=Code.STARTING, message="loading weights", retryable=True, retry_after_s=10.0))
    bench.pass_time(2.01)
    bench.receive(Failed(request_id=call.key, code=Code.STARTING, message="loading weights", retryable=True, retry_after_s=10.0))
    bench.sent()
    bench.pass_time(0.98)
    assert isinstance(deliveries[0], errors.Timeout)
    assert "loading weights" in str(deliveries[0])
    assert Abort(request_id=call.key) not in bench.sent()


def test_who_does_not_want_to_wait_is_told_at_once() -> None:
    bench = Bench(wait_until_ready=False)
    bench.connect()
    call, deliveries = bench.generate()
    bench.receive(Failed(request_id=call.key, code=Code.STARTING, message="loading", retryable=True, retry_after_s=3.0))
    assert isinstance(deliveries[0], errors.NotReady)
    assert (deliveries[0].code, deliveries[0].retryable, deliveries[0].retry_after_s) == ("starting", True, 3.0)


def test_an_engine_error_is_not_retried_behind_the_callers_back() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    bench.sent()
    bench.receive(Failed(request_id=call.key, code=Code.ENGINE_ERROR, message="step 7", retryable=True))
    bench.lose()
    assert bench.connect(TWO) == []
    assert isinstance(deliveries[0], errors.EngineError)


def test_duplicate_of_a_request_sent_once_is_a_redelivery_and_means_nothing() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    bench.sent()
    bench.receive(Failed(request_id=call.key, code=Code.DUPLICATE, message="again"))
    bench.tokens(call.key, [1], 0)
    bench.receive(finished(call.key, 1))
    assert bench.sent() == []
    assert isinstance(deliveries[0], Completion)


def test_duplicate_from_a_new_daemon_is_a_redelivery_too() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    bench.lose()
    bench.connect(TWO)
    bench.receive(Failed(request_id=call.key, code=Code.DUPLICATE, message="the socket had kept it"))
    assert bench.sent() == []
    bench.receive(finished(call.key, 0))
    assert isinstance(deliveries[0], Completion)


def test_the_same_daemon_again_gets_an_abort_and_the_request_under_a_new_id() -> None:
    """It may have finished it into the void, or go on with it in the middle."""
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    refused, _ = bench.generate()
    old_id, refused_id = call.key, refused.key
    bench.tokens(old_id, [1, 2], 0)
    bench.receive(Failed(request_id=refused_id, code=Code.STARTING, message="later", retry_after_s=1.0))
    bench.lose()
    abort, anew, again = bench.connect(ONE)
    assert abort == Abort(request_id=old_id)
    assert again.request_id == refused_id
    assert anew.request_id == call.key
    assert anew.request_id not in {old_id, refused_id}
    bench.tokens(old_id, [3], 2)
    bench.receive(finished(old_id, 3, reason="aborted"))
    bench.tokens(call.key, [1], 0)
    bench.receive(finished(call.key, 1))
    assert [(delivery.token_ids, delivery.finish_reason) for delivery in deliveries] == [((1,), "stop")]


def test_a_request_in_doubt_that_is_cancelled_is_aborted_when_the_same_daemon_is_back() -> None:
    bench = Bench()
    bench.connect()
    call, _ = bench.generate()
    bench.sent()
    bench.lose()
    bench.session.cancel(call)
    assert bench.connect(ONE) == [Abort(request_id=call.key)]


def test_duplicate_of_a_request_sent_again_after_a_refusal_is_asked_anew() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    old_id = call.key
    bench.receive(Failed(request_id=old_id, code=Code.STARTING, message="later", retry_after_s=0.1))
    bench.pass_time(0.2)
    bench.sent()
    bench.receive(Failed(request_id=old_id, code=Code.DUPLICATE, message="done long ago"))
    _, anew = bench.sent()
    assert anew.request_id == call.key != old_id
    bench.receive(finished(anew.request_id, 0))
    assert isinstance(deliveries[0], Completion)


def test_tokens_of_a_hole_that_nobody_saw_are_asked_for_anew() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    old_id = call.key
    bench.sent()
    bench.tokens(old_id, [3], 2)
    abort, anew = bench.sent()
    assert abort == Abort(request_id=old_id)
    bench.tokens(anew.request_id, [1, 2, 3], 0)
    bench.receive(finished(anew.request_id, 3))
    assert deliveries[0].token_ids == (1, 2, 3)


def test_a_hole_in_a_stream_that_was_shown_interrupts_it_and_aborts() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    bench.sent()
    bench.tokens(call.key, [1], 0)
    bench.tokens(call.key, [3], 2)
    assert isinstance(deliveries[-1], errors.Interrupted)
    assert bench.sent() == [Abort(request_id=call.key)]


def test_a_daemon_that_always_leaves_holes_is_given_up() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    for _ in range(MAX_LOST):
        assert deliveries == []
        bench.tokens(call.key, [1], 1)
    assert isinstance(deliveries[0], errors.Interrupted)


def test_tokens_missing_at_the_end_are_noticed() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    bench.tokens(call.key, [1], 0)
    bench.receive(finished(call.key, 2))
    assert [type(delivery) for delivery in deliveries] == [Chunk, errors.Interrupted]


def test_answers_before_hello_reply_are_not_for_us() -> None:
    """The socket delivers queued messages to a new daemon on its own; their answers come before that to hello."""
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    bench.lose()
    bench.session.connected(bench.now)
    bench.sent()
    bench.receive(Failed(request_id=call.key, code=Code.BAD_REQUEST, message="hello first"))
    assert deliveries == []
    bench.receive(hello_reply(TWO))
    assert [message.request_id for message in bench.sent()] == [call.key]
