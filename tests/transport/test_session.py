"""The daemon's side of the protocol without a socket."""

from __future__ import annotations

import math

import msgspec
import pytest
from edge_fakes import EOS, INSTANCE, ByteText
from edge_harness import Harness, only_failed, request_id, text_of
from kvd_client.protocol.codec import pack_body, unpack_body
from kvd_client.protocol.messages import (
    Abort,
    Checkpoint,
    Credit,
    Detokenize,
    Drain,
    Failed,
    Finished,
    Generate,
    Hello,
    HelloReply,
    Pin,
    Ping,
    Pong,
    Prefixes,
    Result,
    Sampling,
    Stats,
    Status,
    Tokenize,
    Tokens,
    Unpin,
)

from kvd.cache.tenants import tenant_salt
from kvd.commands import Abort as AbortCommand
from kvd.commands import (
    ChoiceDone,
    FinishChoice,
    Grant,
    OpDone,
    RequestDone,
    RequestFailed,
    RequestUsage,
    Snapshot,
    Stopped,
    Submit,
    TokensOut,
)
from kvd.commands import Drain as DrainCommand
from kvd.text.errors import TextError
from kvd.types import pack_tokens, unpack_tokens


def test_text_comes_back_with_one_terminal_message_and_counts():
    harness = Harness()
    harness.generate(body=b"abc", max_tokens=5)
    harness.now = 100.5
    harness.run()
    received = harness.take()
    assert text_of(received) == "abcab"
    tokens = [message for message, _ in received if isinstance(message, Tokens)]
    assert [message.first_index for message in tokens] == [0, 1, 2, 3, 4]
    ids = [token for message, bodies in received if isinstance(message, Tokens) for token in unpack_tokens(bodies[0])]
    assert ids == list(b"abcab")
    (finished,) = [message for message, _ in received if isinstance(message, Finished)]
    assert received[-1][0] is finished
    assert finished.choices[0].finish_reason == "length"
    assert finished.choices[0].num_tokens == 5
    assert finished.usage.prompt_tokens == 3
    assert finished.usage.cached_tokens == 3
    assert finished.usage.completion_tokens == 5
    assert finished.timings.total_ms == 500
    assert finished.timings.ttft_ms == 500
    assert finished.timings.queue_ms == 1
    assert harness.session.num_requests == 0


def test_defaults_are_resolved_for_the_engine():
    harness = Harness(default_credit=77)
    harness.generate(body=b"abc", max_tokens=None)
    (submit,) = harness.commands
    assert isinstance(submit, Submit)
    assert submit.max_tokens == 512 - 3
    assert submit.stop_token_ids == (EOS,)
    assert submit.credit_tokens == 77
    assert submit.num_choices == 1
    assert submit.sampling.num_logprobs is None
    harness.generate(2, max_tokens=None)
    other = harness.commands[1]
    assert isinstance(other, Submit)
    assert submit.sampling.seed != other.sampling.seed, "an unstated seed is drawn for each request"


def test_stated_parameters_reach_the_engine():
    harness = Harness()
    sampling = Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        seed=9,
        logprobs=2,
    )
    harness.generate(
        body=pack_tokens([1, 2]), input="ids", sampling=sampling, ignore_eos=True, stop_token_ids=(7, 5), n=2, min_tokens=3, credit=10,
        cache_salt=b"salt", cache_priority=80, cache_ttl_s=60.0,
    )  # fmt: skip
    (submit,) = harness.commands
    assert isinstance(submit, Submit)
    assert submit.token_ids == pack_tokens([1, 2])
    assert submit.stop_token_ids == (5, 7)
    assert (submit.num_choices, submit.min_tokens, submit.credit_tokens, submit.tenant_salt) == (2, 3, 10, tenant_salt("", b"salt"))
    assert (submit.cache_priority, submit.cache_ttl_s) == (80, 60.0)
    params = submit.sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.num_logprobs) == (0.5, 3, 0.9, 0.1, 9, 2)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.3, -0.4)


def test_chat_is_rendered():
    harness = Harness()
    harness.generate(body=pack_body([{"role": "user", "content": "hé"}]), input="messages")
    (submit,) = harness.commands
    assert isinstance(submit, Submit)
    assert bytes(unpack_tokens(submit.token_ids).tolist()).decode() == "<user>hé<assistant>"


def test_a_template_that_refuses_is_the_requests_failure():
    harness = Harness()
    harness.generate(body=pack_body([{"role": "user", "content": "x"}]), input="messages", template_args={"explode": 1})
    failed = only_failed(harness.take_messages())
    assert failed.code == "bad_request"
    assert "template exploded" in failed.message
    assert harness.session.counters.internal_errors == 0
    assert not harness.commands


class Panic(BaseException):
    """As a library's panic arrives in Python: no Exception."""


@pytest.mark.parametrize("fault", [ValueError("what"), RecursionError(), MemoryError(), Panic()])
def test_a_fault_in_rendering_is_that_messages_alone_and_counted(fault):
    class Faulty(ByteText):
        def encode(self, text):
            if text == "boom":
                raise fault
            return super().encode(text)

    harness = Harness(text=Faulty())
    harness.generate(1, b"boom")
    harness.generate(2, b"fine")
    assert only_failed(harness.take_messages()).code == "internal"
    assert harness.session.counters.internal_errors == 1
    harness.run()
    assert isinstance(harness.take_messages()[-1], Finished)


def test_a_result_that_cannot_be_encoded_fails_its_operation_alone():
    harness = Harness()
    harness.send(Checkpoint(op_id=request_id(1)))
    harness.send(Checkpoint(op_id=request_id(2)))
    first, second = harness.commands
    harness.session.on_events([OpDone(first.op_id, {"x": object()}), OpDone(second.op_id, {"x": 1})], harness.now)
    harness.settle()
    failed, result = harness.take_messages()
    assert (failed.code, failed.op_id) == ("internal", request_id(1))
    assert result.op_id == request_id(2)
    assert harness.session.counters.internal_errors == 1
    harness.send(Checkpoint(op_id=request_id(1)))
    assert len(harness.commands) == 3, "its id is free again"


def test_a_report_that_cannot_be_encoded_is_answered_from_the_clock_too():
    harness = Harness()
    harness.session.on_events([Snapshot("ready", {"bad": object()}, {})], harness.now)
    harness.send(Status(op_id=request_id(1)))
    harness.now += 5.0
    harness.session.tick(harness.now)
    harness.settle()
    assert only_failed(harness.take_messages()).code == "internal"


def test_a_failure_whose_text_is_no_utf8_is_told():
    harness = Harness()
    harness.generate()
    harness.session.on_events([RequestFailed(request_id(1), "internal", "a\udc80b")], harness.now)
    harness.settle()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.message) == ("internal", "a?b")
    assert harness.session.counters.internal_errors == 1, "faults beyond the edge count too"


def test_a_stop_string_ends_the_choice_at_the_edge():
    harness = Harness()
    harness.generate(body=b"hello stop world ", stop=("stop",), max_tokens=100)
    harness.engine_takes()
    for _ in range(14):  # the engine runs ahead of the edge's FinishChoice
        harness.session.on_events(harness.engine.step(), harness.now)
    assert [command for command in harness.commands if isinstance(command, FinishChoice)] == [FinishChoice(request_id(1), 0)]
    harness.run()
    received = harness.take()
    assert text_of(received) == "hello "
    finished = received[-1][0]
    assert isinstance(finished, Finished)
    assert finished.choices[0].finish_reason == "stop"
    assert finished.choices[0].num_tokens == len("hello stop")
    assert finished.usage.completion_tokens == len("hello stop")
    assert sum(len(bodies[0]) // 4 for message, bodies in received if isinstance(message, Tokens)) == len("hello stop")


def test_the_text_of_the_stop_token_is_dropped_and_its_id_kept():
    harness = Harness()
    harness.generate(body=b"ab!", stop_token_ids=(ord("!"),), max_tokens=100)
    harness.run()
    received = harness.take()
    assert text_of(received) == "ab"
    assert b"".join(bodies[0] for message, bodies in received if isinstance(message, Tokens)) == pack_tokens(list(b"ab!"))
    assert received[-1][0].choices[0].finish_reason == "stop"


def test_an_unfinished_character_never_goes_out():
    harness = Harness()
    harness.generate(body="é€😀".encode(), max_tokens=9 + 2)
    harness.run()
    received = harness.take()
    for message, bodies in received:
        if isinstance(message, Tokens):
            bodies[1].decode()
    assert text_of(received) == "é€😀é"


def test_choices_have_streams_of_their_own():
    harness = Harness()
    harness.generate(body=b"xy", n=3, max_tokens=4)
    harness.run()
    received = harness.take()
    assert [text_of(received, choice=choice) for choice in range(3)] == ["xyxy"] * 3
    assert [end.choice for end in received[-1][0].choices] == [0, 1, 2]
    assert received[-1][0].usage.completion_tokens == 12


def test_without_text_only_ids_are_sent():
    harness = Harness()
    harness.generate(text=False)
    harness.run()
    assert all(len(bodies) == 1 for message, bodies in harness.take() if isinstance(message, Tokens))


def test_logprobs_pass():
    harness = Harness()
    harness.generate(sampling=Sampling(logprobs=2), max_tokens=1)
    harness.run()
    first = harness.take_messages()[0]
    assert isinstance(first, Tokens)
    assert (first.logprobs[0].token_id, first.logprobs[0].logprob, len(first.logprobs[0].top)) == (97, -0.5, 2)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"sampling": Sampling(temperature=-0.1)}, "temperature"),
        ({"sampling": Sampling(temperature=math.nan)}, "temperature"),
        ({"sampling": Sampling(temperature=math.inf)}, "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(top_p=1.1)}, "top_p"),
        ({"sampling": Sampling(top_p=math.nan)}, "top_p"),
        ({"sampling": Sampling(min_p=-1.0)}, "min_p"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": Sampling(presence_penalty=math.inf)}, "presence_penalty"),
        ({"sampling": Sampling(frequency_penalty=1e9)}, "frequency_penalty"),
        ({"sampling": Sampling(seed=-1)}, "seed"),
        ({"sampling": Sampling(logprobs=21)}, "logprobs"),
        ({"n": 0}, "n is 0"),
        ({"n": 5}, "from 1 to 4"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"max_tokens": None, "min_tokens": 511}, "min_tokens"),
        ({"credit": -1}, "credit"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "16"),
        ({"stop_token_ids": (257,)}, "stop_token_ids"),
        ({"cache_salt": bytes(65)}, "cache_salt"),
        ({"cache_priority": 101}, "cache_priority is 101; it must be from 0 to 100"),
        ({"cache_priority": -1}, "cache_priority"),
        ({"cache_ttl_s": -0.5}, "cache_ttl_s is -0.5; it must be from 0"),
        ({"cache_ttl_s": float("nan")}, "cache_ttl_s"),
        ({"cache_ttl_s": float("inf")}, "cache_ttl_s"),
        ({"input": "file"}, "input"),
        ({"input": "ids", "body": b"abc"}, "u32"),
        ({"input": "ids", "body": pack_tokens([257])}, "257"),
        ({"input": "text", "body": b"\xff"}, "UTF-8"),
        ({"input": "text", "body": b""}, "empty"),
        ({"input": "ids", "body": b""}, "empty"),
        ({"input": "messages", "body": b"{}"}, "array"),
        ({"input": "messages", "body": pack_body([])}, "messages"),
        ({"input": "messages", "body": pack_body([{"content": "x"}])}, "role"),
        ({"input": "messages", "body": pack_body([3])}, "map"),
    ],
)
def test_a_wrong_field_is_named(fields, word):
    harness = Harness()
    harness.generate(**fields)
    failed = only_failed(harness.take_messages())
    assert failed.code == "bad_request"
    assert failed.request_id == request_id(1)
    assert not failed.retryable
    assert word in failed.message
    assert not harness.commands
    assert harness.session.num_requests == 0


@pytest.mark.parametrize(
    "fields", [{"body": b"x" * 512}, {"body": b"x" * 500, "max_tokens": 13}, {"input": "ids", "body": pack_tokens([1] * 512)}]
)
def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(fields):
    harness = Harness()
    harness.generate(**fields)
    failed = only_failed(harness.take_messages())
    assert failed.code == "prompt_too_long"
    assert "512" in failed.message


def test_generate_without_a_body_is_refused():
    harness = Harness()
    harness.send(Generate(request_id=request_id(1), input="text"))
    assert "body" in only_failed(harness.take_messages()).message


def test_an_id_of_the_wrong_length_is_refused():
    harness = Harness()
    harness.send(Generate(request_id=b"short", input="text"), b"x")
    assert "16" in only_failed(harness.take_messages()).message


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


@pytest.mark.parametrize("state", ["starting", "rehydrating"])
def test_before_ready_requests_are_told_when_to_come_back_and_reports_answer(state):
    harness = Harness()
    harness.session.on_events([Snapshot(state, {"state": state}, {"uptime_s": 3}, 4.5)], harness.now)
    harness.generate()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.retryable, failed.retry_after_s) == ("starting", True, 4.5)
    harness.send(Ping(nonce=7))
    assert harness.take_messages() == [Pong(nonce=7, instance=INSTANCE, state=state)]
    harness.send(Status(op_id=request_id(1)))
    ((result, bodies),) = harness.take()
    assert isinstance(result, Result)
    assert unpack_body(bodies[0]) == {"state": state}
    harness.send(Stats(op_id=request_id(2)))
    ((_, bodies),) = harness.take()
    assert unpack_body(bodies[0])["transport"]["refused"] == 1
    harness.send(Unpin(op_id=request_id(3), name="x"))
    assert only_failed(harness.take_messages()).code == "starting"


def test_before_anything_is_known_hello_and_status_answer():
    harness = Harness(ready=False)
    harness.send(Hello(client="test"))
    (reply,) = harness.take_messages()
    assert isinstance(reply, HelloReply)
    assert (reply.instance, reply.state, reply.model, reply.version, reply.limits.max_model_len) == (INSTANCE, "starting", "", "1.2.3", 0)
    harness.send(Status(op_id=request_id(1)))
    ((_, bodies),) = harness.take()
    assert unpack_body(bodies[0])["state"] == "starting"
    harness.send(Tokenize(op_id=request_id(2), input="text"), b"x")
    assert only_failed(harness.take_messages()).code == "starting"


def test_hello_tells_the_models_facts_and_limits():
    harness = Harness(max_stop_strings=5)
    harness.send(Hello())
    (reply,) = harness.take_messages()
    assert (reply.model, reply.vocab_size, reply.fingerprint) == ("echo", 257, "00" * 32)
    assert (reply.limits.max_model_len, reply.limits.max_choices, reply.limits.max_stop_strings) == (512, 4, 5)


@pytest.mark.parametrize(("protocol", "code"), [((2, 9), "unsupported_version"), ((0, 0), "unsupported_version"), ((3, 1), "bad_request")])
def test_a_protocol_range_without_overlap_is_refused(protocol, code):
    harness = Harness()
    harness.send(Hello(protocol=protocol))
    assert only_failed(harness.take_messages()).code == code


def test_a_wider_protocol_range_is_welcome():
    harness = Harness()
    harness.send(Hello(protocol=(1, 7)))
    assert isinstance(harness.take_messages()[0], HelloReply)


def test_while_draining_requests_are_refused_and_running_ones_finish():
    harness = Harness()
    harness.generate(1)
    harness.engine_takes()
    harness.session.on_events([Snapshot("draining", {"state": "draining"}, {})], harness.now)
    harness.generate(2)
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.retryable) == ("draining", True)
    harness.run()
    assert text_of(harness.take()) == "abcab"


def test_when_the_engine_ends_everything_open_ends():
    harness = Harness()
    harness.generate(max_tokens=100)
    harness.engine_takes()
    harness.engine.silent = True
    harness.send(Status(op_id=request_id(7)))
    harness.send(Prefixes(op_id=request_id(8)))
    harness.session.on_events([Stopped()], harness.now)
    harness.settle()
    received = harness.take_messages()
    assert {type(message) for message in received} == {Failed, Result}
    assert {(message.request_id, message.op_id) for message in received if isinstance(message, Failed)} == {
        (request_id(1), b""),
        (b"", request_id(8)),
    }
    assert all(message.retryable for message in received if isinstance(message, Failed))
    assert harness.session.is_stopped
    assert harness.session.num_requests == 0


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


def test_waiting_prompts_are_bounded():
    harness = Harness(max_text_jobs=2)
    for number in (1, 2, 3):
        frames = [msgspec.msgpack.encode(Generate(request_id=request_id(number), input="text")), b"abc"]
        harness.session.receive(b"peer", frames, harness.now)
    harness.settle()
    assert only_failed(harness.take_messages()).code == "overloaded"
    harness.generate(4)
    assert harness.take_messages() == []


def test_waiting_prompt_bytes_are_bounded():
    harness = Harness(max_text_bytes=10)
    for number in (1, 2):
        frames = [msgspec.msgpack.encode(Generate(request_id=request_id(number), input="text")), b"abcdef"]
        harness.session.receive(b"peer", frames, harness.now)
    harness.settle()
    assert only_failed(harness.take_messages()).code == "overloaded"
    harness.generate(4, body=b"x" * 100)
    assert harness.take_messages() == [], "one alone always passes"


def test_ids_follow_the_clients_earlier_text():
    harness = Harness()
    text = Generate(request_id=request_id(1), input="text")
    ids = Generate(request_id=request_id(2), input="ids")
    harness.session.receive(b"peer", [msgspec.msgpack.encode(text), b"abc"], harness.now)
    harness.session.receive(b"peer", [msgspec.msgpack.encode(ids), pack_tokens([1])], harness.now)
    assert not harness.commands
    harness.settle()
    assert [command.request_id for command in harness.commands] == [request_id(1), request_id(2)]


def test_a_gap_in_the_engines_tokens_fails_that_request_alone():
    harness = Harness()
    harness.generate(1)
    harness.generate(2)
    harness.engine_takes()
    harness.session.on_events([TokensOut(request_id(1), 0, 3, pack_tokens([97]))], harness.now)
    harness.settle()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.request_id) == ("internal", request_id(1))
    harness.run()
    assert text_of(harness.take(), 2) == "abcab"
    assert harness.session.num_requests == 0
    assert harness.session.counters.internal_errors == 1


def test_late_and_unknown_engine_events_are_ignored():
    harness = Harness()
    for event in (
        TokensOut(request_id(5), 0, 0, pack_tokens([1])),
        ChoiceDone(request_id(5), 0, "stop"),
        RequestDone(request_id(5), RequestUsage()),
        RequestFailed(request_id(5), "kv_capacity", "x"),
    ):
        harness.session.on_events([event], harness.now)
    assert harness.session.take_outgoing() == []
    assert harness.session.counters.internal_errors == 0


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


def test_a_failure_of_any_length_fits_its_message():
    class Talkative(ByteText):
        def encode(self, text):
            raise TextError("x" * 1_000_000)

    harness = Harness(text=Talkative())
    harness.generate()
    failed = only_failed(harness.take_messages())
    assert failed.code == "bad_request"
    assert 0 < len(failed.message) < 10_000


def test_a_fault_of_the_text_model_is_the_requests_alone():
    class Faulty(ByteText):
        def detokenizer(self, prompt_ids):
            raise ZeroDivisionError

        digest = property(lambda self: 1 / 0)

    harness = Harness(text=Faulty())
    harness.generate()
    assert only_failed(harness.take_messages()).code == "internal"
    harness.send(Pin(op_id=request_id(1), name="a", input="text"), b"x" * 20)
    assert only_failed(harness.take_messages()).code == "internal"
    assert harness.session.num_requests == 0
    harness.generate(2, text=False)
    harness.run()
    assert isinstance(harness.take_messages()[-1], Finished)
