"""Calls that are given up on a session without a socket: cancelled, past their deadline, or without a daemon for too long."""

from __future__ import annotations

from kvd_client import errors
from kvd_client.protocol.messages import Abort
from session_world import ONE, TWO, Bench, finished


def test_cancel_aborts_once_and_silences() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    bench.sent()
    bench.session.cancel(call)
    bench.session.cancel(call)
    assert bench.sent() == [Abort(request_id=call.key)]
    bench.tokens(call.key, [1], 0)
    bench.receive(finished(call.key, 1, reason="aborted"))
    assert deliveries == []


def test_a_request_cancelled_before_it_was_sent_is_never_sent() -> None:
    bench = Bench()
    call, deliveries = bench.generate()
    bench.session.cancel(call)
    assert bench.connect() == []
    assert deliveries == []


def test_a_request_cancelled_while_away_is_aborted_when_the_same_daemon_is_back_and_only_then() -> None:
    for instance, aborted in ((ONE, True), (TWO, False)):
        bench = Bench()
        bench.connect()
        call, deliveries = bench.generate(stream=True)
        bench.tokens(call.key, [1], 0)
        bench.sent()
        bench.lose()
        assert isinstance(deliveries[-1], errors.Interrupted)
        assert bench.connect(instance) == ([Abort(request_id=call.key)] if aborted else [])


def test_a_deadline_aborts() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(timeout_s=2.0)
    bench.sent()
    bench.tokens(call.key, [1], 0)
    bench.pass_time(1.99)
    assert deliveries == []
    bench.pass_time(0.02)
    (error,) = deliveries
    assert isinstance(error, errors.Timeout)
    assert isinstance(error, TimeoutError)
    assert error.retryable
    assert bench.sent() == [Abort(request_id=call.key)]


def test_without_a_daemon_calls_fail_after_the_connect_timeout_and_later_after_the_reconnect_timeout() -> None:
    bench = Bench(connect_timeout_s=3.0, reconnect_timeout_s=9.0)
    _, first = bench.generate()
    bench.pass_time(2.99)
    assert first == []
    bench.pass_time(0.02)
    assert type(first[0]) is errors.ConnectionLost
    bench.connect()
    _, held = bench.generate()
    bench.sent()
    bench.lose()
    _, opened = bench.generate()
    bench.pass_time(8.9)
    assert held == opened == []
    bench.pass_time(0.2)
    assert type(held[0]) is type(opened[0]) is errors.ConnectionLost


def test_a_reconnect_in_time_ends_the_waiting() -> None:
    bench = Bench(connect_timeout_s=3.0)
    _, deliveries = bench.generate()
    bench.pass_time(2.0)
    bench.connect()
    bench.pass_time(4.0)
    assert deliveries == []


def test_a_daemon_that_accepts_and_never_answers_is_no_daemon() -> None:
    bench = Bench(connect_timeout_s=3.0, heartbeat_timeout_s=20.0)
    _, deliveries = bench.generate()
    bench.session.connected(bench.now)
    bench.pass_time(3.01)
    assert type(deliveries[0]) is errors.ConnectionLost


def test_timers_of_calls_that_are_over_do_not_pile_up() -> None:
    bench = Bench()
    bench.connect()
    for _ in range(1000):
        call, _ = bench.generate(timeout_s=600.0)
        bench.session.outgoing.clear()
        bench.receive(finished(call.key, 0))
    assert len(bench.session._timers) <= 66
