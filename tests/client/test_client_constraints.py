"""What an answer must match: from a caller's options to a field and a frame, alike in both clients."""

from __future__ import annotations

import json

import msgspec
import pytest
from kvd_client.constraining import take_constraint
from kvd_client.errors import BadRequest
from kvd_client.requests import generate_message

SCHEMA = {"type": "object", "title": "é"}


@pytest.mark.parametrize(
    ("options", "kind", "frames"),
    [
        ({}, "", ()),
        ({"regex": None, "json": False, "choice": None}, "", ()),
        ({"json": True}, "json", ()),
        ({"regex": "é+"}, "regex", ("é+".encode(),)),
        ({"lark": 'start: "a"'}, "lark", (b'start: "a"',)),
        ({"json_schema": '{"type":  "array"}'}, "json_schema", (b'{"type":  "array"}',)),
        ({"json_schema": SCHEMA}, "json_schema", (json.dumps(SCHEMA, ensure_ascii=False).encode(),)),
        ({"json_schema": True}, "json_schema", (b"true",)),
        ({"choice": ("a", "b")}, "choice", (msgspec.msgpack.encode(["a", "b"]),)),
        ({"choice": []}, "choice", (msgspec.msgpack.encode([]),)),
    ],
)
def test_each_option_is_a_field_and_a_frame(options, kind, frames):
    fields = {"n": 2, **options}
    assert take_constraint(fields) == (kind, frames)
    assert fields == {"n": 2}
    assert generate_message("text", stream=False, options=options).constraint == kind


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"regex": b"a"}, "a string"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"choice": "yes"}, "sequence of strings"),
        ({"choice": ["a", 1]}, "sequence of strings"),
        ({"json": "object"}, "True or False"),
        ({"json_schema": 3}, "mapping or a string"),
        ({"json_schema": False}, "mapping or a string"),
        ({"regex": False}, "a string"),
        ({"json_schema": {"maximum": float("nan")}}, "json_schema can't be sent"),
        ({"json_schema": {"x": object()}}, "json_schema can't be sent"),
    ],
)
def test_what_cannot_be_sent_is_named(options, words):
    with pytest.raises(BadRequest, match=words):
        take_constraint(dict(options))
