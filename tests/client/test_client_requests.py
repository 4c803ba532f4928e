"""Prompts and options become a message and its body, and what can't be sent is named before it is."""

from __future__ import annotations

from typing import Any

import pytest
from kvd_client import errors
from kvd_client.protocol import codec
from kvd_client.requests import generate_message, prompt_body


def test_options_become_the_message() -> None:
    message = generate_message(
        "ids",
        stream=False,
        options={"temperature": 0, "seed": 3, "stop": "END", "stop_token_ids": [1, 2], "max_tokens": 5, "n": 2, "cache_salt": b"t"},
    )
    assert (message.sampling.temperature, message.sampling.seed, message.stop, message.stop_token_ids) == (0, 3, ("END",), (1, 2))
    assert (message.max_tokens, message.n, message.cache_salt, message.input) == (5, 2, b"t", "ids")


@pytest.mark.parametrize(
    ("prompt", "messages", "kind", "body"),
    [
        ("é", None, "text", "é".encode()),
        ([1, 256], None, "ids", b"\x01\0\0\0\0\x01\0\0"),
        (None, [{"role": "user", "content": "x"}], "messages", codec.pack_body([{"role": "user", "content": "x"}])),
    ],
)
def test_prompts_become_bodies(prompt: Any, messages: Any, kind: str, body: bytes) -> None:
    assert prompt_body(prompt, messages) == (kind, body)


@pytest.mark.parametrize("prompt", [[-1], [2**32], ["a"], "\ud800"])
def test_prompts_that_cannot_be_sent_are_bad_requests(prompt: Any) -> None:
    with pytest.raises(errors.BadRequest):
        prompt_body(prompt)


def test_wrong_options_are_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        generate_message("text", stream=False, options={"temprature": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(errors.BadRequest):
        generate_message("text", stream=False, options={"n": 0})
    with pytest.raises(errors.TooLarge):
        generate_message("text", stream=False, options={"stop": ["x" * 70_000]})
    with pytest.raises(errors.BadRequest):
        generate_message("text", stream=False, options={"template_args": {"f": object()}})
    with pytest.raises(TypeError):
        prompt_body("a", [{"role": "user", "content": "x"}])
