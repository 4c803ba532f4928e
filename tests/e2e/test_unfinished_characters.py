"""Characters that a prompt or an answer leaves unfinished: told once, by whoever has the last word, as U+FFFD if nobody finishes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvd

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

A = list("あ".encode())  # three bytes


@pytest.fixture(scope="module")
def llm() -> Iterator[kvd.LLM]:
    with kvd.LLM(executor="fake", kv_memory="1MiB") as engine:  # a token is a byte
        yield engine


def told(llm: kvd.LLM, prompt: list[int], *, stream: bool, **options: Any) -> tuple[str, list[str]]:
    """The prompt's text, and that of each choice."""
    if not stream:
        completion = llm.client.generate(prompt, echo=True, temperature=0.0, **options)
        assert completion.prompt is not None
        return completion.prompt.text, [choice.text for choice in completion.choices]
    texts: dict[int, str] = {}
    with llm.client.generate(prompt, stream=True, echo=True, temperature=0.0, **options) as chunks:
        for chunk in chunks:
            texts[chunk.choice] = texts.get(chunk.choice, "") + chunk.text
        assert chunks.prompt is not None
        return chunks.prompt.text, [texts[choice] for choice in sorted(texts)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("prompt", "only", "options", "echoed", "text"),
    [
        (A[:2], A[2], {"max_tokens": 1}, "", "あ"),
        (A[:2], A[2], {"max_tokens": 1, "n": 2}, "", "あ"),
        (A[:2], A[2], {"max_tokens": 1, "stop": "zz"}, "", "あ"),
        (A[:2], A[2], {"max_tokens": 9, "stop": "あ"}, "", ""),
        (A[:2], A[2], {"max_tokens": 9, "stop": "あ", "include_stop": True}, "", "あ"),
        (A[:2], A[2], {"max_tokens": 9, "stop_token_ids": [A[2]]}, "", "\ufffd"),  # its token is silent
        (A[:2], ord("x"), {"max_tokens": 1}, "", "\ufffdx"),
        (A[:2], ord("x"), {"max_tokens": 9, "stop": "x"}, "", "\ufffd"),
        (A[:1], A[1], {"max_tokens": 1}, "", "\ufffd"),
        ([0x61], A[0], {"max_tokens": 1}, "a", "\ufffd"),
        ([0x61], A[0], {"max_tokens": 1, "n": 2}, "a", "\ufffd"),
        ([0x61], A[0], {"max_tokens": 2}, "a", "\ufffd\ufffd"),
        ([0x61], A[0], {"max_tokens": 1, "stop": "zz"}, "a", "\ufffd"),
        ([0x61], A[0], {"max_tokens": 1, "stop": "\ufffd"}, "a", ""),
        ([0x61, *A[:2]], A[2], {"max_tokens": 1, "text": False}, "a\ufffd", ""),  # there is no text to go on in
        ([0x61, *A[:2]], A[2], {"max_tokens": 9, "text": False, "stop": "あ"}, "a\ufffd", ""),
        ([0x61, *A], A[0], {"max_tokens": 1, "text": False}, "aあ", ""),
        ([0xFF, 0x61, 0xC3], ord("x"), {"max_tokens": 1, "text": False}, "\ufffda\ufffd", ""),
        ([0x61, 0x62, 0xC3], ord("x"), {"max_tokens": 1, "text": False, "truncate_prompt": 2}, "b\ufffd", ""),
    ],
)
def test_an_unfinished_character_is_told_by_whoever_has_the_last_word(llm, prompt, only, options, echoed, text, stream):
    assert told(llm, prompt, stream=stream, allowed_token_ids=[only], ignore_eos=True, **options) == (echoed, [text] * options.get("n", 1))


@pytest.mark.parametrize("options", [{"beam_width": 3, "n": 3}, {"best_of": 4, "n": 3, "seed": 5}], ids=["beams", "best_of"])
def test_what_is_told_at_the_end_is_the_text_of_all_tokens(llm, options):
    for last in (0xE3, 0xF0, 0x61):
        answer = llm.client.generate([0x61, last], echo=True, max_tokens=3, ignore_eos=True, **options)
        for choice in answer.choices:
            assert answer.prompt.text + choice.text == bytes([0x61, last, *choice.token_ids]).decode("utf-8", "replace")


def test_without_text_the_tokens_are_those_with_text(llm):
    options: dict[str, Any] = {"max_tokens": 9, "stop": "あ", "allowed_token_ids": [A[2]], "ignore_eos": True}
    (with_text, without) = (llm.client.generate(A[:2], text=text, **options) for text in (True, False))
    assert with_text.token_ids == without.token_ids == (A[2],)
    assert with_text.finish_reason == without.finish_reason == "stop"


@pytest.mark.grammar
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_must_match_finishes_no_character_of_the_prompt(llm, stream):
    assert told(llm, [0x61, *A[:2]], stream=stream, choice=["yes"], max_tokens=5) == ("a\ufffd", ["yes"])
