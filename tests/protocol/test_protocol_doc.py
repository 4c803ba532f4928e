"""docs/protocol.md names every message, field and code of the wire, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import (
    ChoiceEnd,
    ClientMessage,
    Generate,
    Limits,
    Sampling,
    ServerMessage,
    Timings,
    Usage,
)

from kvd.types import RETRYABLE_CODES

DOC = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
STRUCTS = [*ClientMessage.__args__, *ServerMessage.__args__, Sampling, Limits, ChoiceEnd, Usage, Timings]


def section(title):
    found = re.search(rf"^###? {title}\n(.*?)(?=^##|\Z)", DOC, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found.group(1)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_message_and_field_is_documented(struct):
    tag = struct.__struct_config__.tag
    parts = {Sampling: "generate", Limits: "hello_reply", ChoiceEnd: "finished", Usage: "finished", Timings: "finished"}
    title = "status and stats" if tag in ("status", "stats") else tag or parts[struct]
    text = section(title)
    missing = [field for field in struct.__struct_fields__ if f"`{field}`" not in text]
    assert not missing


def test_the_codes_and_whether_they_are_retryable():
    rows = dict(re.findall(r"^\| `(\w+)` \| (yes|no) \|", section("Failure codes"), re.MULTILINE))
    assert rows == {code.value: "yes" if code.value in RETRYABLE_CODES else "no" for code in Code}


@pytest.mark.parametrize("struct", [*ClientMessage.__args__, *ServerMessage.__args__], ids=lambda struct: struct.__name__)
def test_no_field_is_documented_that_is_not_there(struct):
    tag = struct.__struct_config__.tag
    known = {*struct.__struct_fields__, *(Sampling.__struct_fields__ if struct is Generate else ())}
    text = section("status and stats" if tag in ("status", "stats") else tag)
    tables = re.findall(r"^\| Field \|.*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    cells = [row.split("|")[1] for table in tables for row in table.splitlines()[2:]]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} <= known
