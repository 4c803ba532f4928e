"""LoRA adapters at the edge: names go to the engine as they are, and only what can be a name; loading is for those who may."""

from __future__ import annotations

import pytest
from edge_harness import Harness, only_failed, request_id
from kvd_client.protocol.codec import encode
from kvd_client.protocol.messages import ListAdapters, LoadAdapter, Pin, UnloadAdapter

from kvd import commands
from kvd.commands import PinPrefix, Submit
from kvd.transport.tenants import Caller


def test_requests_and_pins_carry_the_name():
    harness = Harness(deliver=False)
    harness.generate(adapter="poet")
    harness.send(Pin(op_id=request_id(2), name="a", input="text", adapter="poet"), b"x" * 20)
    submit, pin = harness.commands
    assert isinstance(submit, Submit)
    assert isinstance(pin, PinPrefix)
    assert (submit.adapter_name, submit.adapter) == ("poet", b"")
    assert (pin.recipe.adapter_name, pin.recipe.adapter) == ("poet", b"")


@pytest.mark.parametrize("name", ["../poet", "a/b", ".", "x" * 129, "two words", "\0"])
def test_what_is_no_name_does_not_reach_the_engine(name: str):
    harness = Harness()
    harness.generate(adapter=name)
    assert only_failed([message for message, _ in harness.take()]).code == "bad_request"
    harness.send(Pin(op_id=request_id(2), name="a", input="text", adapter=name), b"x" * 20)
    assert "adapter must have" in only_failed([message for message, _ in harness.take()]).message
    harness.send(LoadAdapter(op_id=request_id(3), name=name))
    assert only_failed([message for message, _ in harness.take()]).code == "bad_request"
    assert harness.commands == []


def test_operations_become_commands():
    harness = Harness()
    harness.send(LoadAdapter(op_id=request_id(1), name="poet"))
    harness.send(UnloadAdapter(op_id=request_id(2), name="poet"))
    harness.send(ListAdapters(op_id=request_id(3)))
    assert [type(command) for command in harness.commands] == [commands.LoadAdapter, commands.UnloadAdapter, commands.ListAdapters]
    assert [getattr(command, "name", "") for command in harness.commands] == ["poet", "poet", ""]


def test_a_tenant_lists_and_does_not_load():
    harness = Harness()
    for number, message in enumerate((LoadAdapter, UnloadAdapter)):
        frames = encode(message(op_id=request_id(number), name="poet"))
        harness.session.receive(b"peer", frames, harness.now, Caller("acme"))
    harness.session.receive(b"peer", encode(ListAdapters(op_id=request_id(9))), harness.now, Caller("acme"))
    harness.settle()
    refused = [message for message, _ in harness.take()]
    assert [message.code for message in refused] == ["bad_request", "bad_request"]
    assert all("concerns every tenant" in message.message for message in refused)
    assert [type(command) for command in harness.commands] == [commands.ListAdapters]
