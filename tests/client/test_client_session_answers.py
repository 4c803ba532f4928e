"""What comes back to a request on a session without a socket: its tokens once and in order and one completion, or one named error."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvd_client import errors
from kvd_client.calls import Answer, Call
from kvd_client.protocol import codec
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Abort, Failed, Generate, Pong, Result, Tokens
from kvd_client.requests import generate_message, prompt_body
from kvd_client.results import Chunk, Completion, pack_tokens
from session_world import Bench, finished


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
