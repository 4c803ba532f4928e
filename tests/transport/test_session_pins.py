"""Pins at the edge: rendering, recipes, names and bounds."""

from __future__ import annotations

import pytest
from edge_fakes import ByteText
from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.codec import pack_body, unpack_body
from kvd_client.protocol.messages import Pin, Unpin

from kvd.cache.tenants import tenant_salt
from kvd.commands import OpFailed, PinPrefix
from kvd.types import pack_tokens

MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}]


def test_a_pin_of_messages_is_the_systems_prefix_with_its_source():
    harness = Harness()
    harness.send(
        Pin(op_id=request_id(1), name="support", input="messages", priority=70, cache_salt=b"s", template_args={"a": 1}),
        pack_body(MESSAGES),
    )
    (command,) = harness.commands
    assert isinstance(command, PinPrefix)
    recipe = command.recipe
    assert recipe.token_ids == pack_tokens(list(b"<system>You are a helpful assistant."))
    assert (recipe.name, recipe.priority, recipe.tenant_salt, recipe.template_args) == ("support", 70, tenant_salt("", b"s"), {"a": 1})
    assert recipe.messages == MESSAGES
    assert recipe.text is None
    assert recipe.tokenizer_digest == ByteText.digest
    assert recipe.created_unix_s > 0
    harness.engine_takes()
    ((result, bodies),) = harness.take()
    assert result.op_id == request_id(1)
    assert unpack_body(bodies[0])["name"] == "support"


def test_a_pin_may_end_by_itself():
    harness = Harness()
    harness.send(Pin(op_id=request_id(1), name="a", input="text", ttl_s=60.0), b"x" * 20)
    harness.send(Pin(op_id=request_id(2), name="b", input="text"), b"x" * 20)
    ending, lasting = (command.recipe for command in harness.commands)
    assert ending.expires_unix_s == ending.created_unix_s + 60.0
    assert not ending.has_expired(ending.created_unix_s + 59.0)
    assert ending.has_expired(ending.created_unix_s + 60.0)
    assert lasting.expires_unix_s == 0.0
    assert not lasting.has_expired(1e18)


def test_pins_of_text_and_ids():
    harness = Harness()
    harness.send(Pin(op_id=request_id(1), name="a", input="text"), b"x" * 20)
    harness.send(Pin(op_id=request_id(2), name="b", input="ids"), pack_tokens([5] * 16))
    first, second = harness.commands
    assert isinstance(first, PinPrefix)
    assert isinstance(second, PinPrefix)
    assert first.recipe.text == "x" * 20
    assert second.recipe.token_ids == pack_tokens([5] * 16)
    assert second.recipe.messages is None
    assert second.recipe.text is None


def test_a_prefix_below_a_block_is_too_short():
    harness = Harness()
    harness.send(Pin(op_id=request_id(1), name="a", input="text"), b"x" * 15)
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.op_id) == ("pin_too_short", request_id(1))
    assert "15" in failed.message
    assert "16" in failed.message


def test_a_prefix_that_leaves_no_room_is_too_long():
    harness = Harness()
    harness.send(Pin(op_id=request_id(1), name="a", input="text"), b"x" * 512)
    assert only_failed(harness.take_messages()).code == "prompt_too_long"


@pytest.mark.parametrize("name", ["", " ", "a b", "../x", "a/b", "-a", "ä", "a\n", "x" * 129])
def test_a_wrong_name_is_refused(name):
    harness = Harness()
    harness.send(Pin(op_id=request_id(1), name=name, input="text"), b"x" * 20)
    assert "name" in only_failed(harness.take_messages()).message
    harness.send(Unpin(op_id=request_id(2), name=name))
    assert "name" in only_failed(harness.take_messages()).message


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 101},
        {"priority": -1},
        {"cache_salt": bytes(65)},
        {"input": "path"},
        {"ttl_s": -1.0},
        {"ttl_s": 1e9},
        {"ttl_s": float("nan")},
    ],
)
def test_a_wrong_field_is_refused(fields):
    harness = Harness()
    harness.send(Pin(**{"op_id": request_id(1), "name": "a", "input": "text", **fields}), b"x" * 20)
    assert only_failed(harness.take_messages()).code == "bad_request"


def test_the_engines_refusal_reaches_the_client_under_its_own_id():
    harness = Harness()
    harness.send(Pin(op_id=request_id(1), name="a", input="text"), b"x" * 20)
    (command,) = harness.commands
    assert isinstance(command, PinPrefix)
    assert command.op_id != request_id(1)
    harness.session.on_events([OpFailed(command.op_id, "pin_capacity", "900 of 1000 blocks")], harness.now)
    harness.settle()
    failed = only_failed(harness.take_messages())
    assert (failed.code, failed.op_id, failed.message) == ("pin_capacity", request_id(1), "900 of 1000 blocks")


def test_a_redelivered_operation_runs_once():
    harness = Harness()
    for _ in range(2):
        harness.send(Pin(op_id=request_id(1), name="a", input="text"), b"x" * 20)
    assert len(harness.commands) == 1
