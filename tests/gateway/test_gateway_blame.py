"""``error.param`` names the field of the API that the daemon's refusal is about."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvd_client.errors import BadRequest, Overloaded

from kvd.gateway.blame import blaming
from kvd.gateway.errors import ApiError
from kvd.gateway.fields import ChatFields, read_fields

TOOLS = [{"type": "function", "function": {"name": "x"}}]
BEAMS = {"use_beam_search": True, "best_of": 4}
COMPILED = "the constraint can't be compiled: "


def fields(**more: Any) -> ChatFields:
    return read_fields(json.dumps({"messages": [{"role": "user", "content": "hi"}], **more}).encode(), ChatFields)


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ({"temperature": -1}, "temperature is -1.0; it must be from 0 to 100", "temperature"),
        ({"max_completion_tokens": 0}, "max_tokens is 0; it must be at least 1", "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 99}, "logprobs is 99; it must be from 0 to 20", "top_logprobs"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "x"}}},
            COMPILED + "unknown type of temperature",
            "response_format",
        ),
        ({"guided_regex": "(", "temperature": 0}, COMPILED + "the temperature is unbalanced", "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, COMPILED + "no", "structured_outputs.regex"),
        ({"speculation": "draft"}, "speculation mode draft: this daemon has no draft model (speculative.draft_model)", "speculation"),
        ({"tools": TOOLS}, "the model's chat template has no place for tools; leave them away, or describe them in a message", "tools"),
        ({**BEAMS, "temperature": 0.7}, "beam search draws nothing: leave temperature, top_k, top_p and min_p out", "temperature"),
        ({**BEAMS, "top_p": 0.7}, "beam search draws nothing: leave temperature, top_k, top_p and min_p out", "top_p"),
        (
            {**BEAMS, "presence_penalty": 1},
            "beam search goes by the model's own log-probabilities: leave the penalties out",
            "presence_penalty",
        ),
        ({**BEAMS, "speculation": "ngram"}, "beam search does not speculate: …; leave speculation out", "speculation"),
        ({**BEAMS, "stop": "x"}, "stop and beam search don't go together: texts are not known", "stop"),
        (BEAMS, "the beam's width is 9999: 1 to 256 are possible", "best_of"),
        (BEAMS, "beam search is not supported", "use_beam_search"),
        (
            {"allowed_token_ids": [5]},
            "no token may be sampled: allowed_token_ids without banned_token_ids leaves none",
            "allowed_token_ids",
        ),
        ({"temperature": 1}, "the prompt is empty", None),
        ({}, "the model's fields are as they were", None),
    ],
)
def test_a_refusal_names_the_field_that_was_given(given: dict[str, Any], message: str, param: str | None) -> None:
    with pytest.raises(ApiError) as refused, blaming(fields(**given)):
        raise BadRequest(message, code="bad_request")
    assert (refused.value.status, refused.value.param) == (400, param)


def test_what_is_no_fault_of_the_request_names_no_field() -> None:
    with pytest.raises(ApiError) as refused, blaming(fields(temperature=1)):
        raise Overloaded("the queue is full whatever the temperature is", code="overloaded")
    assert (refused.value.status, refused.value.param) == (429, None)
