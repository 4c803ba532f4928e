"""Operations at the edge: token ids and bytes, reports of the engine or of its last snapshot, and draining."""

from __future__ import annotations

import math

import pytest
from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.codec import unpack_body
from kvd_client.protocol.messages import Checkpoint, Detokenize, Drain, Prefixes, Result, Stats, Status, Tokenize

from kvd.commands import Drain as DrainCommand
from kvd.types import pack_tokens, unpack_tokens


def test_tokenize_counts_and_returns_ids():
    harness = Harness()
    harness.send(Tokenize(op_id=request_id(1), input="text"), "é".encode())
    ((result, bodies),) = harness.take()
    assert isinstance(result, Result)
    assert unpack_body(bodies[0]) == {"count": 2}
    assert list(unpack_tokens(bodies[1])) == [0xC3, 0xA9]
    harness.send(Tokenize(op_id=request_id(2), input="ids"), b"")
    assert only_failed(harness.take_messages()).code == "bad_request"


def test_detokenize_returns_each_ids_bytes():
    harness = Harness()
    harness.send(Detokenize(op_id=request_id(1)), pack_tokens([0xC3, 0xA9, 256, 2**32 - 1]))
    ((result, bodies),) = harness.take()
    assert isinstance(result, Result)
    assert unpack_body(bodies[0]) == {"count": 4}
    assert unpack_body(bodies[1]) == [b"\xc3", b"\xa9", b"", b""]


@pytest.mark.parametrize("bodies", [[], [b"x"], [pack_tokens([1] * 4097)], [b"", b""]])
def test_detokenize_refuses_what_is_no_list_of_ids(bodies):
    harness = Harness()
    harness.send(Detokenize(op_id=request_id(1)), *bodies)
    assert only_failed(harness.take_messages()).code == "bad_request"


def test_a_busy_engine_does_not_hold_up_status_and_stats():
    harness = Harness()
    harness.engine.silent = True
    harness.send(Status(op_id=request_id(1)))
    harness.send(Stats(op_id=request_id(2)))
    assert len(harness.commands) == 2
    harness.engine_takes()
    assert harness.take_messages() == []
    harness.now += 2
    harness.session.tick(harness.now)
    harness.settle()
    (status, stats) = harness.take()
    assert unpack_body(status[1][0]) == {"state": "ready", "from": "snapshot"}
    assert unpack_body(stats[1][0])["a"] == 1


def test_reports_come_from_the_engine_while_it_answers_and_stats_carry_the_edges_counters():
    harness = Harness()
    harness.send(Status(op_id=request_id(1)))
    harness.send(Stats(op_id=request_id(2)))
    harness.engine_takes()
    (status, stats) = harness.take()
    assert unpack_body(status[1][0]) == {"state": "ready", "what": "status"}
    assert unpack_body(stats[1][0])["transport"]["messages_received"] == 2


def test_operations_of_two_clients_with_one_id_do_not_mix():
    harness = Harness()
    harness.send(Prefixes(op_id=request_id(1)), peer=b"one")
    harness.send(Checkpoint(op_id=request_id(1)), peer=b"two")
    harness.engine_takes()
    ((_, one),) = harness.take(b"one")
    ((_, two),) = harness.take(b"two")
    assert unpack_body(one[0])["what"] == "prefixes"
    assert unpack_body(two[0]) == {"ok": True}


def test_drain_carries_its_deadline():
    harness = Harness()
    harness.send(Drain(op_id=request_id(1)))
    harness.send(Drain(op_id=request_id(2), timeout_s=2.5))
    assert [command.timeout_s for command in harness.commands if isinstance(command, DrainCommand)] == [30.0, 2.5]
    harness.send(Drain(op_id=request_id(3), timeout_s=math.nan))
    assert only_failed(harness.take_messages()).code == "bad_request"
