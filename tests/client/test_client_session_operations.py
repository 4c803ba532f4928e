"""Operations on a session without a socket: what each is told, which are asked again after a restart, and how long readiness is waited for."""

from __future__ import annotations

from kvd_client import errors, operations
from kvd_client.calls import Reply
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Drain, Failed, Hello, Ping, Pong, Result, Status, Unpin
from kvd_client.results import pack_tokens
from kvd_client.session import MAX_LOST, READY_POLL_S
from session_world import LIMITS, ONE, TWO, Bench, hello_reply


def test_an_operation_gets_its_map_and_bodies() -> None:
    bench = Bench()
    bench.connect()
    deliveries = bench.operate(operations.tokenize("abc", None, {}))
    (message,) = bench.sent()
    bench.now += 0.25
    bench.receive(Result(op_id=message.op_id), codec.pack_body({"count": 2}), pack_tokens([10, 11]))
    (reply,) = deliveries
    assert isinstance(reply, Reply)
    assert (reply.data, reply.round_trip_s) == ({"count": 2}, 0.25)
    assert operations.tokenize_result(reply) == (10, 11)


def test_a_result_that_is_no_map_is_an_internal_error() -> None:
    bench = Bench()
    bench.connect()
    for body in (codec.pack_body([1]), b"\xc1"):
        deliveries = bench.operate(operations.status())
        (message,) = bench.sent()
        bench.receive(Result(op_id=message.op_id), body)
        assert isinstance(deliveries[0], errors.InternalError)


def test_status_is_asked_again_after_a_restart_but_drain_never() -> None:
    bench = Bench()
    bench.connect()
    status, drain, checkpoint = (
        bench.operate(operations.status()),
        bench.operate(operations.drain(1.0)),
        bench.operate(operations.checkpoint()),
    )
    assert [type(message).__name__ for message in bench.sent()] == ["Status", "Drain", "Checkpoint"]
    bench.lose()
    assert isinstance(drain[0], errors.ConnectionLost)
    assert not isinstance(drain[0], errors.Interrupted)
    assert isinstance(checkpoint[0], errors.ConnectionLost)
    (again,) = bench.connect(TWO)
    assert isinstance(again, Status)
    bench.receive(Result(op_id=again.op_id), codec.pack_body({"state": "ready"}))
    assert status[0].data == {"state": "ready"}


def test_a_drain_that_was_never_sent_waits_for_a_daemon() -> None:
    bench = Bench()
    deliveries = bench.operate(operations.drain(None))
    (message,) = bench.connect()
    assert isinstance(message, Drain)
    assert deliveries == []


def test_unpin_is_done_if_the_daemon_before_had_heard_it() -> None:
    bench = Bench()
    bench.connect()
    deliveries = bench.operate(operations.unpin("a"))
    bench.lose()
    (again,) = bench.connect(TWO)
    assert isinstance(again, Unpin)
    bench.receive(Failed(op_id=again.op_id, code=Code.NOT_FOUND, message="no pin a"))
    assert isinstance(deliveries[0], Reply)
    never = bench.operate(operations.unpin("b"))
    (message,) = bench.sent()
    bench.receive(Failed(op_id=message.op_id, code=Code.NOT_FOUND, message="no pin b"))
    assert isinstance(never[0], errors.NotFound)


def test_ping_measures_and_hello_tells() -> None:
    bench = Bench()
    bench.connect()
    ping, hello = bench.operate(operations.ping()), bench.operate(operations.hello())
    sent_ping, sent_hello = bench.sent()
    assert isinstance(sent_ping, Ping)
    assert isinstance(sent_hello, Hello)
    bench.now += 0.5
    bench.receive(Pong(nonce=sent_ping.nonce, instance=ONE, state="ready"))
    bench.receive(hello_reply(ONE))
    result = operations.ping_result(ping[0])
    assert (result.state, result.round_trip_s, result.instance) == ("ready", 0.5, ONE.hex())
    assert operations.hello_result(hello[0]).limits == LIMITS


def test_wait_ready_outlasts_every_timeout_but_its_own_and_polls() -> None:
    bench = Bench(connect_timeout_s=1.0, reconnect_timeout_s=1.0)
    deliveries = bench.operate(operations.wait_ready(), timeout_s=500.0)
    bench.pass_time(100.0)
    for _ in range(MAX_LOST + 1):
        assert len(bench.connect(ONE, "starting")) == 1
        bench.lose()
        bench.pass_time(10.0)
    (ping,) = bench.connect(TWO, "starting")
    bench.receive(Pong(nonce=ping.nonce, instance=TWO, state="rehydrating"))
    bench.pass_time(READY_POLL_S + 0.01)
    (ping,) = bench.sent()
    assert deliveries == []
    bench.receive(Pong(nonce=ping.nonce, instance=TWO, state="ready"))
    assert operations.ping_result(deliveries[0]).state == "ready"
