"""The connection of a session without a socket: its heartbeat, daemons that refuse or speak another protocol, and closing."""

from __future__ import annotations

from kvd_client import errors
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Abort, Failed, Ping, Pong
from kvd_client.session import HANDSHAKE_RETRY_S
from session_world import ONE, TWO, Bench, hello_reply


def test_heartbeats_go_on_beside_other_traffic_and_their_answer_is_enough() -> None:
    bench = Bench(heartbeat_interval_s=5.0, heartbeat_timeout_s=20.0)
    bench.connect()
    for _ in range(20):
        bench.pass_time(5.0)
        assert bench.sent() == [Ping()]
        bench.receive(Pong(instance=ONE, state="ready"))
    assert not bench.session.wants_fresh_socket


def test_a_silent_daemon_is_a_lost_one() -> None:
    bench = Bench(heartbeat_interval_s=5.0, heartbeat_timeout_s=20.0)
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    bench.tokens(call.key, [1], 0)
    waiting, others = bench.generate()
    bench.pass_time(24.9)
    assert not bench.session.wants_fresh_socket
    assert len(deliveries) == 1
    bench.pass_time(0.2)
    assert bench.session.wants_fresh_socket
    assert isinstance(deliveries[-1], errors.Interrupted)
    held_id = waiting.key
    abort, abort_held, again = bench.connect(ONE)
    assert abort == Abort(request_id=call.key)
    assert abort_held == Abort(request_id=held_id)
    assert again.request_id == waiting.key != held_id
    assert others == []


def test_a_client_that_slept_does_not_blame_the_daemon() -> None:
    bench = Bench(heartbeat_interval_s=5.0, heartbeat_timeout_s=20.0)
    bench.connect()
    bench.pass_time(5.0)
    bench.now += 1000.0
    bench.receive(Pong(instance=ONE, state="ready"))
    bench.session.tick(bench.now)
    assert not bench.session.wants_fresh_socket


def test_another_protocol_fails_every_call_until_another_daemon_comes() -> None:
    bench = Bench()
    _, waiting = bench.generate()
    bench.session.connected(bench.now)
    bench.receive(hello_reply(protocol=(7, 9)))
    assert isinstance(waiting[0], errors.UnsupportedVersion)
    _, later = bench.generate()
    assert isinstance(later[0], errors.UnsupportedVersion)
    assert later[0] is not waiting[0]
    bench.sent()
    bench.session.disconnected(bench.now)
    _, fine = bench.generate()
    bench.connect(TWO)
    assert isinstance(fine[0], errors.UnsupportedVersion)
    _, served = bench.generate()
    assert served == []


def test_a_refused_hello_fails_every_call_with_its_code() -> None:
    bench = Bench()
    _, waiting = bench.generate()
    bench.session.connected(bench.now)
    bench.receive(Failed(code=Code.UNSUPPORTED_VERSION, message="protocol 2 to 3"))
    assert (type(waiting[0]), waiting[0].code) == (errors.UnsupportedVersion, "unsupported_version")


def test_a_refused_key_fails_every_call() -> None:
    bench = Bench()
    _, waiting = bench.generate()
    bench.session.handshake_failed(bench.now, "wrong key", is_final=True)
    assert isinstance(waiting[0], errors.AuthenticationFailed)
    assert not waiting[0].retryable
    _, later = bench.generate()
    assert isinstance(later[0], errors.AuthenticationFailed)
    assert not bench.session.wants_fresh_socket
    bench.pass_time(HANDSHAKE_RETRY_S)
    assert bench.session.wants_fresh_socket
    _, waits = bench.generate()
    assert waits == []
    bench.connect()
    _, fine = bench.generate()
    assert fine == []


def test_a_handshake_that_fails_without_a_word_is_waited_for_and_told_of() -> None:
    bench = Bench(connect_timeout_s=3.0, endpoint="tcp://h:1")
    _, waiting = bench.generate()
    bench.session.handshake_failed(bench.now, "odd keys", is_final=False)
    bench.pass_time(3.01)
    assert type(waiting[0]) is errors.ConnectionLost
    assert str(waiting[0]) == "connection_lost: no daemon answers at tcp://h:1: odd keys"


def test_close_aborts_what_runs_and_fails_what_waits_and_what_comes() -> None:
    bench = Bench()
    bench.connect()
    call, running = bench.generate()
    bench.sent()
    bench.session.close()
    _, later = bench.generate()
    assert [type(delivery) for delivery in running + later] == [errors.ClientClosed] * 2
    assert bench.sent() == [Abort(request_id=call.key)]
    assert bench.session.next_tick_at() is None or bench.session.next_tick_at() > bench.now
