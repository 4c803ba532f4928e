"""Requests at the edge: what reaches the engine and in which order, and what is refused before it does."""

from __future__ import annotations

import math

import msgspec
import pytest
from edge_fakes import EOS
from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.codec import pack_body
from kvd_client.protocol.messages import Generate, Sampling

from kvd.cache.tenants import tenant_salt
from kvd.commands import Submit
from kvd.types import pack_tokens, unpack_tokens


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
