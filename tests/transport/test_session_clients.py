"""Clients at the edge: silent, gone, too slow or too many, and what becomes of their requests."""

from __future__ import annotations

from edge_harness import Harness, only_failed, request_id, text_of
from kvd_client.protocol.messages import Ping

from kvd.commands import Abort as AbortCommand
from kvd.commands import TokensOut
from kvd.types import pack_tokens


def test_a_silent_clients_requests_are_aborted_and_a_ping_keeps_them():
    harness = Harness(client_timeout_s=30.0)
    harness.generate(1, peer=b"quiet", max_tokens=100)
    harness.generate(2, peer=b"alive", max_tokens=100)
    harness.engine_takes()
    harness.now += 20
    harness.send(Ping(), peer=b"alive")
    harness.now += 15
    harness.session.tick(harness.now)
    assert [command for command in harness.commands if isinstance(command, AbortCommand)] == [AbortCommand(request_id(1))]
    harness.engine_takes()
    (finished,) = harness.take_messages(b"quiet")
    assert finished.choices[0].finish_reason == "aborted"
    assert harness.session.num_clients == 1


def test_a_gone_clients_requests_are_aborted_silently_and_may_come_again():
    harness = Harness()
    harness.generate(max_tokens=100)
    harness.engine_takes()
    harness.session.on_gone(b"peer")
    assert harness.commands == [AbortCommand(request_id(1))]
    assert harness.session.counters.requests_aborted == 1
    harness.generate()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.retryable) == ("overloaded", True), "the first run is still in the engine"
    harness.engine_takes()
    assert harness.take_messages() == []
    harness.generate()
    harness.run()
    assert text_of(harness.take()) == "abcab"


def test_an_overflown_client_is_told_once_and_its_requests_stop():
    harness = Harness()
    harness.generate(1, max_tokens=100)
    harness.generate(2, max_tokens=100)
    harness.engine_takes()
    harness.session.on_overflow(b"peer")
    harness.settle()
    received = harness.take_messages()
    assert [(message.code, message.retryable) for message in received] == [("client_too_slow", False)] * 2
    harness.session.on_events([TokensOut(request_id(1), 0, 0, pack_tokens([97]))], harness.now)
    harness.run()
    assert harness.take_messages() == []
    assert harness.engine.num_requests == 0
    harness.generate(1)
    assert only_failed(harness.take_messages()).code == "duplicate"


def test_a_client_has_a_bounded_number_of_requests():
    harness = Harness(max_requests_per_client=2)
    for number in range(1, 4):
        harness.generate(number, max_tokens=50)
    assert only_failed(harness.take_messages()).code == "overloaded"
    harness.generate(9, peer=b"other")
    assert len(harness.commands) == 3


def test_the_longest_silent_client_makes_room():
    harness = Harness(max_clients=2)
    harness.generate(1, peer=b"one", max_tokens=50)
    harness.send(Ping(), peer=b"two")
    harness.send(Ping(), peer=b"three")
    failed = only_failed(harness.take_messages(b"one"))
    assert (failed.code, failed.retryable) == ("overloaded", True)
    assert harness.session.num_clients == 2
    harness.run()
    assert harness.engine.num_requests == 0
