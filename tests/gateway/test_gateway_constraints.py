"""What an answer must look like, under the names that OpenAI, vLLM and llama.cpp gave it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.gateway.errors import ApiError
from kvd.gateway.fields import ChatFields, CompletionFields, chat_options, completion_options, read_fields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = {"type": "object"}


def options(**fields: Any) -> dict[str, Any]:
    return dict(chat_options(read_fields(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), ChatFields)))


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": OBJECT}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
            {"json_schema": SCHEMA},
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, {"json_schema": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"lark": "start: /a/"}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": OBJECT}),
        ({"structured_outputs": {"json_object": False}}, {}),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False, "disable_fallback": False}}, {"regex": "a+"}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"lark": 'root ::= "a"'}),
        ({"grammar": 'root ::= "a"'}, {"lark": 'root ::= "a"'}),
        ({"response_format": {"type": "json_object", "schema": None}}, {"json_schema": OBJECT}),
        ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
    ],
)
def test_each_name_of_a_constraint_is_the_clients_option(fields: dict[str, Any], option: dict[str, Any]) -> None:
    assert options(**fields) == option


def test_completions_take_them_as_well() -> None:
    fields = read_fields(json.dumps({"prompt": "hi", "guided_regex": "a+"}).encode(), CompletionFields)
    assert completion_options(fields) == {"max_tokens": 16, "regex": "a+"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema"),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
        ({"response_format": {}}, "response_format", "json_object"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format", "an object as its schema"),
        ({"response_format": {"type": "json_object", "schema": False}}, "response_format", "an object as its schema"),
        ({"guided_json": False}, "guided_json", "false"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "false"),
        ({"grammar": ""}, "grammar", "empty"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace", "regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "regex"),
        ({"guided_choice": "yes"}, "guided_choice", "array"),
        ({"guided_regex": "a", "grammar": "start: /b/"}, "grammar", "one of them"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "one of them"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "x-guidance"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as raised:
        options(**fields)
    assert raised.value.status == 400
    assert raised.value.param == param
