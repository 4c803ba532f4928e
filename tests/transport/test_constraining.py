"""Constraints at the edge: body frames to the engine's form, and what is refused there."""

from __future__ import annotations

import msgspec
import pytest
from kvd_client.protocol.messages import Beam, Generate

from kvd.transport.constraining import check_constraint, has_source, read_constraint
from kvd.transport.errors import RequestError
from kvd.transport.validation import num_bodies
from kvd.types import Constraint


def message(constraint="", **fields):
    return Generate(request_id=bytes(16), input="text", constraint=constraint, **fields)


@pytest.mark.parametrize(
    ("kind", "body", "source"),
    [
        ("json_schema", b'{"type": "object"}', ('{"type": "object"}',)),
        ("regex", "é+".encode(), ("é+",)),
        ("lark", b'start: "a"', ('start: "a"',)),
        ("choice", msgspec.msgpack.encode(["a", "b"]), ("a", "b")),
        ("choice", msgspec.msgpack.encode([]), ()),
    ],
)
def test_a_source_is_the_frame_behind_the_inputs(kind, body, source):
    assert num_bodies(message(kind)) == 2
    assert read_constraint(message(kind), [b"prompt", body]) == Constraint(kind, source)


def test_some_have_no_source():
    assert read_constraint(message("json"), [b"prompt"]) == Constraint("json")
    assert read_constraint(message(), [b"prompt"]) is None
    assert not has_source(message("json"))
    assert num_bodies(message("json")) == num_bodies(message()) == 1


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("regex", b"\xff", "UTF-8"),
        ("json_schema", b"\xed\xa0\x80", "UTF-8"),
        ("choice", b"yes", "msgpack array of strings"),
        ("choice", msgspec.msgpack.encode([1]), "msgpack array of strings"),
        ("choice", msgspec.msgpack.encode({"a": "b"}), "msgpack array of strings"),
        ("choice", b"\x92\xa1a", "msgpack array of strings"),
        ("choice", b"\x91\xa1\xff", "msgpack array of strings"),
        ("choice", b"", "msgpack array of strings"),
        ("choice", bytes(2 << 20), "1048576"),
        ("choice", b"\xdd\xff\xff\xff\xff" + b"\xa0" * 10, "msgpack array of strings"),
    ],
)
def test_a_frame_that_is_none_is_refused(kind, body, words):
    with pytest.raises(RequestError, match=words):
        read_constraint(message(kind), [b"prompt", body])


def test_kinds_and_combinations_are_named():
    for kind in ("", "json", "json_schema", "regex", "choice", "lark"):
        check_constraint(message(kind))
    with pytest.raises(RequestError, match="one of json_schema, regex, choice, lark, json"):
        check_constraint(message("yaml"))
    with pytest.raises(RequestError, match="beam don't go together"):
        check_constraint(message("json", beam=Beam(width=2)))
    check_constraint(message("", beam=Beam(width=2)))
