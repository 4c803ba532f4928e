"""Credit at the edge: how far a request may run ahead of its client and of a socket that takes nothing."""

from __future__ import annotations

from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.messages import Credit, Finished, Tokens

from kvd.commands import Grant


def test_explicit_credit_bounds_what_is_sent():
    harness = Harness()
    harness.generate(max_tokens=20, credit=4)
    harness.run()
    assert sum(isinstance(message, Tokens) for message in harness.take_messages()) == 4
    harness.send(Credit(request_id=request_id(1), num_tokens=3))
    harness.run()
    assert sum(isinstance(message, Tokens) for message in harness.take_messages()) == 3
    harness.send(Credit(request_id=request_id(1), num_tokens=0))
    assert only_failed(harness.take_messages()).code == "bad_request"
    harness.send(Credit(request_id=request_id(1), num_tokens=100))
    harness.run()
    received = harness.take_messages()
    assert sum(isinstance(message, Tokens) for message in received) == 13
    assert isinstance(received[-1], Finished)


def test_a_socket_that_takes_nothing_stalls_the_request_at_the_window():
    harness = Harness(deliver=False, default_credit=8)
    harness.generate(max_tokens=100)
    harness.run()
    assert len(harness.undelivered) == 8
    assert not any(isinstance(command, Grant) for command in harness.engine.commands)
    for out in harness.undelivered[:4]:
        harness.session.on_sent(out)
    harness.run()
    assert len(harness.undelivered) == 12


def test_huge_explicit_credit_does_not_lift_the_window():
    harness = Harness(deliver=False, default_credit=8)
    harness.generate(max_tokens=100, credit=1 << 40)
    harness.run()
    assert len(harness.undelivered) == 8


def test_tokens_dropped_after_a_stop_cost_no_credit():
    harness = Harness()
    harness.generate(body=b"ab", n=2, stop=("b",), max_tokens=50, credit=8)
    harness.engine_takes()
    for _ in range(4):
        harness.session.on_events(harness.engine.step(), harness.now)
    harness.run()
    assert isinstance(harness.take_messages()[-1], Finished)
