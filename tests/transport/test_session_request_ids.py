"""Ids of requests at the edge: one runs once however often it is sent, no other client can touch it, and an abort ends it once."""

from __future__ import annotations

import msgspec
from edge_harness import Harness, only_failed, request_id, text_of
from kvd_client.protocol.messages import Abort, Credit, Finished, Generate, Sampling, Tokens

from kvd.commands import RequestFailed


def test_a_redelivered_request_runs_once_and_a_finished_one_is_a_duplicate():
    harness = Harness()
    harness.generate()
    harness.generate()
    assert len(harness.commands) == 1
    harness.run()
    received = harness.take()
    assert text_of(received) == "abcab"
    assert sum(isinstance(message, Finished) for message, _ in received) == 1
    harness.generate()
    assert only_failed(harness.take_messages()).code == "duplicate"
    assert not harness.commands


def test_a_request_that_failed_retryably_may_be_sent_again():
    harness = Harness()
    harness.inbox_full = True
    harness.generate()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.retryable) == ("overloaded", True)
    assert failed.retry_after_s > 0
    harness.inbox_full = False
    harness.generate()
    harness.run()
    assert text_of(harness.take()) == "abcab"


def test_an_engine_refusal_passes_with_its_code():
    harness = Harness()
    harness.generate()
    harness.session.on_events([RequestFailed(request_id(1), "overloaded", "queue full", 2.5)], harness.now)
    harness.settle()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.message, failed.retryable, failed.retry_after_s) == ("overloaded", "queue full", True, 2.5)
    harness.commands.clear()
    harness.generate()
    assert len(harness.commands) == 1


def test_the_dedupe_memory_is_bounded():
    harness = Harness(dedupe_capacity=3)
    for number in range(1, 6):
        harness.generate(number)
        harness.run()
    harness.take()
    harness.generate(5)
    assert only_failed(harness.take_messages()).code == "duplicate"
    harness.generate(1)
    assert len(harness.commands) == 1, "the oldest id is forgotten"


def test_another_clients_request_can_neither_be_aborted_nor_taken():
    harness = Harness()
    harness.generate(peer=b"one")
    harness.send(Abort(request_id=request_id(1)), peer=b"two")
    assert only_failed(harness.take_messages(b"two")).code == "not_found"
    harness.generate(peer=b"two")
    assert only_failed(harness.take_messages(b"two")).code == "duplicate"
    harness.run()
    assert text_of(harness.take(b"one")) == "abcab"


def test_abort_of_a_running_request_ends_it_once():
    harness = Harness()
    harness.generate(max_tokens=100)
    harness.engine_takes()
    harness.session.on_events(harness.engine.step(), harness.now)
    harness.send(Abort(request_id=request_id(1)))
    harness.send(Abort(request_id=request_id(1)))
    harness.run()
    received = harness.take_messages()
    assert [type(message) for message in received] == [Tokens, Finished]
    assert received[1].choices[0].finish_reason == "aborted"
    assert received[1].choices[0].num_tokens == 1
    harness.send(Abort(request_id=request_id(1)))
    assert harness.take_messages() == []


def test_abort_while_tokenising_answers_at_once_and_the_late_prompt_is_dropped():
    harness = Harness()
    wanted = Generate(request_id=request_id(1), input="text", sampling=Sampling(seed=7))
    harness.session.receive(b"peer", [msgspec.msgpack.encode(wanted), b"abc"], harness.now)
    jobs = harness.session.take_text_jobs()
    assert len(jobs) == 1
    harness.session.receive(b"peer", [msgspec.msgpack.encode(Abort(request_id=request_id(1)))], harness.now)
    harness.session._edge.text_jobs = jobs
    harness.settle()
    (finished,) = harness.take_messages()
    assert isinstance(finished, Finished)
    assert finished.choices[0].finish_reason == "aborted"
    assert finished.seed == 7
    assert not harness.commands


def test_abort_and_credit_of_unknown_ids_are_answered():
    harness = Harness()
    harness.send(Abort(request_id=request_id(9)))
    assert only_failed(harness.take_messages()).code == "not_found"
    harness.send(Credit(request_id=request_id(9), num_tokens=1))
    assert only_failed(harness.take_messages()).code == "not_found"
