"""The session with a fake clock and no socket: every frame is handed in and read back by hand."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvd_client import errors, operations
from kvd_client.calls import Answer, Call, CreditWindow, Reply
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    Abort,
    ChoiceEnd,
    Credit,
    Drain,
    Failed,
    Finished,
    Generate,
    Hello,
    HelloReply,
    Limits,
    Ping,
    Pong,
    Result,
    Status,
    Timings,
    Tokens,
    Unpin,
    Usage,
)
from kvd_client.requests import GenerateOptions, generate_message, prompt_body
from kvd_client.results import Chunk, Completion, pack_tokens
from kvd_client.session import HANDSHAKE_RETRY_S, MAX_LOST, MAX_RETRY_S, READY_POLL_S, SETTLE_S, Session
from kvd_client.session_config import SessionConfig

LIMITS = Limits(max_message_bytes=1000, max_model_len=100, max_choices=4, max_stop_strings=4, default_credit=8)
ONE, TWO = b"1" * 16, b"2" * 16


class Bench:
    """A session, its clock, and the daemon's side of its wire."""

    def __init__(self, **config: Any) -> None:
        ids = itertools.count(1)
        self.session = Session(SessionConfig(**config), new_id=lambda: next(ids).to_bytes(16, "big"))
        self.now = 100.0

    def connect(self, instance: bytes = ONE, state: str = "ready") -> list[Any]:
        """Connect and greet; what was sent after the hello."""
        self.session.connected(self.now)
        assert [type(message) for message in self.sent()] == [Hello]
        self.receive(hello_reply(instance, state))
        return self.sent()

    def lose(self) -> None:
        self.session.disconnected(self.now)
        self.pass_time(SETTLE_S)

    def sent(self) -> list[Any]:
        messages = [codec.decode_client(frames)[0] for frames in self.session.outgoing]
        self.session.outgoing.clear()
        return messages

    def receive(self, message: Any, *bodies: bytes) -> None:
        self.session.receive(codec.encode(message, *bodies), self.now)

    def pass_time(self, seconds: float) -> None:
        """Step from timer to timer, as a driver does."""
        end = self.now + seconds
        while (due := self.session.next_tick_at()) is not None and due <= end:
            self.now = max(due, self.now)
            self.session.tick(self.now)
        self.now = end

    def generate(self, *, stream: bool = False, timeout_s: float = math.inf, **options: Any) -> tuple[Call, list[Any]]:
        message = generate_message("text", stream=stream, options=GenerateOptions(**options))
        deliveries: list[Any] = []
        call = Call(message, b"hi", deliver=deliveries.append, timeout_s=timeout_s, answer=Answer(message.n, stream=stream))
        self.session.open(call, self.now)
        return call, deliveries

    def operate(self, operation: operations.Operation, timeout_s: float = math.inf) -> list[Any]:
        deliveries: list[Any] = []
        call = operation.call(deliveries.append)
        call.timeout_s = timeout_s
        self.session.open(call, self.now)
        return deliveries

    def tokens(self, request_id: bytes, token_ids: list[int], first_index: int, text: str = "", choice: int = 0) -> None:
        self.receive(Tokens(request_id=request_id, choice=choice, first_index=first_index), pack_tokens(token_ids), text.encode())


def hello_reply(instance: bytes = ONE, state: str = "ready", protocol: tuple[int, int] = (1, 1)) -> HelloReply:
    return HelloReply(instance=instance, version="0", protocol=protocol, state=state, limits=LIMITS)


def finished(request_id: bytes, *counts: int, tail: str = "", reason: str = "stop") -> Finished:
    ends = tuple(ChoiceEnd(choice=i, finish_reason=reason, num_tokens=count, text_tail=tail) for i, count in enumerate(counts))
    return Finished(request_id=request_id, choices=ends, usage=Usage(prompt_tokens=3), timings=Timings(ttft_ms=1.5), seed=7)


# ------------------------------------------------------------------------------------------------------------- answers


def test_nothing_is_sent_before_the_daemon_has_answered_hello() -> None:
    bench = Bench()
    call, deliveries = bench.generate()
    assert bench.sent() == []
    (message,) = bench.connect()
    assert isinstance(message, Generate)
    assert (message.request_id, message.credit) == (call.key, 0)
    bench.tokens(call.key, [5, 6], 0, "ab")
    bench.tokens(call.key, [7], 2, "c")
    assert deliveries == []
    bench.receive(finished(call.key, 3, tail="d"))
    (completion,) = deliveries
    assert isinstance(completion, Completion)
    assert (completion.text, completion.token_ids, completion.finish_reason, completion.seed) == ("abcd", (5, 6, 7), "stop", 7)
    assert completion.usage.prompt_tokens == 3
    assert completion.timings.ttft_ms == 1.5
    assert bench.sent() == []


def test_a_stream_delivers_chunks_tail_and_completion_in_order() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True, n=2, window_tokens=64)
    (message,) = bench.sent()
    assert message.credit == 64
    bench.tokens(call.key, [1], 0, "a", choice=0)
    bench.tokens(call.key, [2, 3], 0, "b", choice=1)
    bench.receive(finished(call.key, 1, 2, tail="!"))
    assert [type(delivery) for delivery in deliveries] == [Chunk, Chunk, Chunk, Chunk, Completion]
    assert [(c.choice, c.first_index, c.token_ids, c.text, c.finish_reason) for c in deliveries[:4]] == [
        (0, 0, (1,), "a", None),
        (1, 0, (2, 3), "b", None),
        (0, 1, (), "!", "stop"),
        (1, 2, (), "!", "stop"),
    ]
    assert [choice.text for choice in deliveries[4].choices] == ["a!", "b!"]


def test_tokens_delivered_twice_count_once_and_those_past_the_end_not_at_all() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    bench.tokens(call.key, [1, 2], 0, "ab")
    bench.tokens(call.key, [1, 2], 0, "ab")
    bench.tokens(call.key, [3, 4], 2, "c")
    bench.receive(finished(call.key, 3))
    assert deliveries[-1].token_ids == (1, 2, 3)
    assert deliveries[-1].text == "abc"
    assert len(deliveries) == 4


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), max_size=6), st.data())
def test_any_cut_and_any_redelivery_of_a_stream_gives_the_same_completion(parts: list[list[int]], data: st.DataObject) -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate(stream=True)
    first_index, text = 0, ""
    for part in parts:
        for _ in range(data.draw(st.integers(1, 3))):
            bench.tokens(call.key, part, first_index, f"<{first_index}>")
        text += f"<{first_index}>"
        first_index += len(part)
    bench.receive(finished(call.key, first_index, tail="€"))
    assert deliveries[-1].token_ids == tuple(token for part in parts for token in part)
    assert deliveries[-1].text == text + "€"
    assert "".join(chunk.text for chunk in deliveries[:-1]) == text + "€"


def test_a_number_of_choices_that_no_daemon_allows_costs_nothing() -> None:
    tracemalloc.start()
    try:
        Answer(1_000_000, stream=False).forget()
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


def test_an_answer_that_contradicts_the_request_is_an_internal_error_and_aborted() -> None:
    for message, bodies in (
        (Tokens(request_id=b"", choice=1, first_index=0), (pack_tokens([1]),)),
        (Tokens(request_id=b"", choice=0, first_index=0), (b"abc",)),
        (Tokens(request_id=b"", choice=0, first_index=0), ()),
        (finished(b"", 0, 0), ()),
    ):
        bench = Bench()
        bench.connect()
        call, deliveries = bench.generate()
        bench.sent()
        bench.receive(msgspec.structs.replace(message, request_id=call.key), *bodies)
        assert [type(delivery) for delivery in deliveries] == [errors.InternalError]
        assert bench.sent() == [Abort(request_id=call.key)]


def test_noise_is_counted_and_survived() -> None:
    bench = Bench()
    bench.connect()
    _, deliveries = bench.generate()
    bench.session.receive([b"\xc1 not msgpack"], bench.now)
    bench.session.receive([], bench.now)
    bench.session.receive([codec.pack_body({"type": "from_the_future"})], bench.now)
    bench.receive(Failed(code="bad_request", message="what was that?"))
    assert bench.session.num_ignored == 4
    bench.tokens(b"?" * 16, [1], 0)
    bench.receive(finished(b"?" * 16, 1))
    bench.receive(Result(op_id=b"?" * 16))
    bench.receive(Pong(nonce=99))
    assert deliveries == []


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_its_class(code: Code) -> None:
    error = errors.error_of(Failed(code=code, message="why", retryable=True, retry_after_s=2.5))
    assert type(error) is not errors.KvdError
    assert (error.code, error.retryable, error.retry_after_s, str(error)) == (code, True, 2.5, f"{code}: why")


def test_a_code_of_a_later_daemon_is_a_plain_error_with_that_code() -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    bench.sent()
    bench.receive(Failed(request_id=call.key, code="out_of_cheese", message="redo from start", retryable=True, retry_after_s=1.0))
    (error,) = deliveries
    assert type(error) is errors.KvdError
    assert (error.code, error.retryable) == ("out_of_cheese", True)
    assert bench.sent() == []


@pytest.mark.parametrize("code", sorted(set(Code) - {Code.STARTING, Code.DRAINING, Code.DUPLICATE}))
def test_a_failed_request_raises_once_and_is_over(code: Code) -> None:
    bench = Bench()
    bench.connect()
    call, deliveries = bench.generate()
    bench.sent()
    bench.receive(Failed(request_id=call.key, code=code, message="no"))
    bench.receive(finished(call.key, 0))
    assert [delivery.code for delivery in deliveries] == [code]
    assert bench.sent() == []


def test_a_body_longer_than_the_daemon_takes_is_not_sent() -> None:
    bench = Bench()
    bench.connect()
    kind, body = prompt_body("x" * 1001)
    deliveries: list[Any] = []
    bench.session.open(
        Call(generate_message(kind, stream=False, options={}), body, deliver=deliveries.append, answer=Answer(1, stream=False)), bench.now
    )
    assert isinstance(deliveries[0], errors.TooLarge)
    assert bench.sent() == []


# ------------------------------------------------------------------------------------------------------------- restart


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


# ---------------------------------------------------------------------------------------------------------- operations


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


# --------------------------------------------------------------------------------------- credit, cancelling, deadlines


def test_credit_is_granted_for_live_streams_only() -> None:
    bench = Bench()
    bench.connect()
    call, _ = bench.generate(stream=True, window_tokens=8)
    bench.sent()
    bench.session.grant(call, 5)
    assert bench.sent() == [Credit(request_id=call.key, num_tokens=5)]
    bench.receive(finished(call.key, 0))
    bench.session.grant(call, 5)
    assert bench.sent() == []


@given(st.integers(1, 64), st.lists(st.integers(0, 9), max_size=60))
def test_a_window_returns_every_token_and_never_starves_a_reader_that_keeps_up(window: int, reads: list[int]) -> None:
    credit = CreditWindow(window)
    outstanding = 0
    for num_tokens in reads:
        outstanding += num_tokens
        outstanding -= credit.read(num_tokens)
        assert 0 <= outstanding < max(1, window // 2)


def test_a_window_holds_two_steps_of_all_choices() -> None:
    assert generate_message("text", stream=True, options={"n": 4, "window_tokens": 1}).credit == 8


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


# ----------------------------------------------------------------------------------------------------------- heartbeat


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


# ----------------------------------------------------------------------------------------------------- refused, closed


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


# ------------------------------------------------------------------------------------------------------------ requests


def test_options_become_the_message() -> None:
    message = generate_message(
        "ids",
        stream=False,
        options={"temperature": 0, "seed": 3, "stop": "END", "stop_token_ids": [1, 2], "max_tokens": 5, "n": 2, "cache_salt": b"t"},
    )
    assert (message.sampling.temperature, message.sampling.seed, message.stop, message.stop_token_ids) == (0, 3, ("END",), (1, 2))
    assert (message.max_tokens, message.n, message.cache_salt, message.input) == (5, 2, b"t", "ids")


@pytest.mark.parametrize(
    ("prompt", "messages", "kind", "body"),
    [
        ("é", None, "text", "é".encode()),
        ([1, 256], None, "ids", b"\x01\0\0\0\0\x01\0\0"),
        (None, [{"role": "user", "content": "x"}], "messages", codec.pack_body([{"role": "user", "content": "x"}])),
    ],
)
def test_prompts_become_bodies(prompt: Any, messages: Any, kind: str, body: bytes) -> None:
    assert prompt_body(prompt, messages) == (kind, body)


@pytest.mark.parametrize("prompt", [[-1], [2**32], ["a"], "\ud800"])
def test_prompts_that_cannot_be_sent_are_bad_requests(prompt: Any) -> None:
    with pytest.raises(errors.BadRequest):
        prompt_body(prompt)


def test_wrong_options_are_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        generate_message("text", stream=False, options={"temprature": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(errors.BadRequest):
        generate_message("text", stream=False, options={"n": 0})
    with pytest.raises(errors.TooLarge):
        generate_message("text", stream=False, options={"stop": ["x" * 70_000]})
    with pytest.raises(errors.BadRequest):
        generate_message("text", stream=False, options={"template_args": {"f": object()}})
    with pytest.raises(TypeError):
        prompt_body("a", [{"role": "user", "content": "x"}])
