"""Requests of the API to requests of kvd, without a socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvd_client.errors import error_of
from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import Failed, Timings, TokenLogprob, Usage
from kvd_client.results import Choice, Chunk, Completion

from kvd.gateway.answers import ChatForm, CompletionForm, Head, Pieces
from kvd.gateway.errors import ApiError, api_error
from kvd.gateway.fields import (
    ChatFields,
    CompletionFields,
    Fields,
    chat_messages,
    chat_options,
    completion_options,
    completion_prompts,
    read_fields,
)
from kvd.gateway.token_texts import TokenTexts, completion_text

HI = [{"role": "user", "content": "hi"}]


def chat(**more: Any) -> ChatFields:
    return read_fields(json.dumps({"messages": HI, **more}).encode(), ChatFields)


def completion(**more: Any) -> CompletionFields:
    return read_fields(json.dumps({"prompt": "hi", **more}).encode(), CompletionFields)


def test_nothing_asked_for_is_nothing_sent():
    assert chat_options(chat(user="somebody", metadata={"x": 1}, store=False, temperature=None, tools=[], stop=None)) == {}
    assert completion_options(completion(suffix=None, echo=False, logit_bias={})) == {"max_tokens": 16}  # OpenAI's default


def test_every_field_has_its_place():
    asked = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "cache_salt": "tenant",
        "priority": -2,
        "deadline_s": 2.5,
        "queue_timeout_s": 1.5,
        "stop": ["a", "b"],
    }
    assert chat_options(chat(**asked, seed=7, max_tokens=9)) == {**asked, "seed": 7, "max_tokens": 9}
    assert completion_options(completion(**asked, logprobs=0)) == {**asked, "max_tokens": 16, "logprobs": 0}


def test_names_of_the_api_that_mean_something_of_kvds():
    assert chat_options(chat(max_tokens=5, max_completion_tokens=7))["max_tokens"] == 7
    assert chat_options(chat(logprobs=True))["logprobs"] == 0
    assert chat_options(chat(logprobs=True, top_logprobs=4))["logprobs"] == 4
    assert "logprobs" not in chat_options(chat(logprobs=False))
    assert chat_options(chat(seed=-1))["seed"] == 2**64 - 1
    assert chat_options(chat(top_k=-1))["top_k"] == 0
    assert chat_options(chat(chat_template_kwargs={"enable_thinking": False}))["template_args"] == {"enable_thinking": False}


def test_what_may_come_out_and_what_is_told_of_the_prompt():
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    asked = {"allowed_token_ids": [5], "banned_token_ids": [6], "bad_words": ["x"], "prompt_logprobs": 2}
    given = chat_options(
        chat(**asked, logit_bias={"5": -1.5}, truncate_prompt_tokens=-1, include_stop_str_in_output=True, stop="x", tools=[tool])
    )
    assert given == {**asked, "logit_bias": {5: -1.5}, "truncate_prompt": -1, "include_stop": True, "stop": "x", "tools": [tool]}
    assert chat_options(chat(include_stop_str_in_output=True)) == {}
    assert chat_options(chat(tools=[tool], tool_choice="auto")) == {"tools": [tool]}
    assert chat_options(chat(tools=[tool], tool_choice="none")) == {}
    assert completion_options(completion(echo=True, max_tokens=3)) == {"echo": True, "max_tokens": 3}
    scored = completion_options(completion(echo=True, max_tokens=0, logprobs=1))
    assert scored == {"echo": True, "max_tokens": 1, "text": False, "logprobs": 1, "prompt_logprobs": 1}


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "echo": True, "logprobs": 1}),
        ("max_tokens", {"max_tokens": 0, "echo": True, "stream": True}),
    ],
)
def test_what_contradicts_itself_about_the_prompt_is_refused(field, asked):
    with pytest.raises(ApiError) as refused:
        completion_options(completion(**asked))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tools", ["look_up"]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "look_up"}}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"99999999999999999999999": 1}),
        ("logit_bias", {"0" * 5000 + "7": 1}),
        ("logit_bias", {"7": 1, "07": 2}),
        ("allowed_token_ids", []),
        ("truncate_prompt_tokens", 0),
        ("functions", [{}]),
        ("logits_processors", ["x"]),
        ("skip_special_tokens", False),
        ("chat_template", "{{ messages }}"),
        ("documents", [{}]),
        ("length_penalty", 0.5),
        ("n_predict", 5),
        ("repeat_penalty", 1.1),
        ("typical_p", 0.9),
        ("top_n_sigma", 1),
        ("mirostat", 2),
        ("dynatemp_range", 0.5),
        ("xtc_probability", 0.5),
        ("dry_multiplier", 0.8),
        ("samplers", ["top_k"]),
        ("modalities", ["text", "audio"]),
        ("best_of", 0),
        ("early_stopping", True),
        ("stream_options", {"include_usage": True}),
        ("n", 0),
        ("temperature", "hot"),
        ("stop", 5),
        ("seed", 1.5),
        ("top_logprobs", 3),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(field, value):
    with pytest.raises(ApiError) as refused:
        chat_options(chat(**{field: value}))
    assert (refused.value.status, refused.value.param) == (400, field)
    assert field in refused.value.message


@pytest.mark.parametrize(("field", "value"), [("echo", "yes"), ("suffix", "end"), ("prompt", {}), ("prompt", None), ("logprobs", True)])
def test_what_a_completion_can_not_honour(field, value):
    with pytest.raises(ApiError) as refused:
        completion(**{field: value})
    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("lora", [{"id": 0, "scale": 0.5}], []),
        ("prompt_embeds", "AAAA", None),
        ("add_special_tokens", False, True),
        ("truncation_side", "right", "left"),
        ("vllm_xargs", {"x": 1}, {}),
        ("structural_tag", "{}", None),
        ("reasoning_effort", "high", None),
        ("thinking_token_budget", 5, None),
        ("include_reasoning", False, True),
        ("repetition_detection", {}, None),
        ("n_probs", 3, 0),
        ("n_cmpl", 2, 1),
        ("post_sampling_probs", True, False),
        ("repeat_last_n", 64, -1),
        ("typ_p", 0.5, 1.0),
        ("adaptive_target", 0.5, -1.0),
        ("t_max_predict_ms", 100, 0),
        ("grammar_lazy", True, False),
        ("max_completion_tokens", 5, None),
        ("tools", [{"type": "function", "function": {}}], []),
        ("chat_template_kwargs", {"enable_thinking": False}, {}),
    ],
)
def test_what_changes_an_answer_elsewhere_is_refused_and_what_asks_for_nothing_is_not(field, value, harmless):
    with pytest.raises(ApiError, match=field) as refused:
        completion(**{field: value})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", field)
    completion(**{field: harmless})


def test_what_a_chat_and_a_completion_add_of_their_own_is_told_apart():
    chat(add_special_tokens=False, echo=False)
    for field in ("add_special_tokens", "echo"):
        with pytest.raises(ApiError, match=field):
            chat(**{field: True})


BEYOND = (10**30, 10**20, 2**64, -(10**20), -(2**63) - 1)


@pytest.mark.parametrize("value", BEYOND)
@pytest.mark.parametrize("kind", [ChatFields, CompletionFields])
def test_an_integer_beyond_64_bits_is_refused_by_name(kind, value):
    integers = [name for name, hint in kind.__annotations__.items() | Fields.__annotations__.items() if hint == "int | None"]
    assert {"n", "min_tokens", "seed"} <= {*integers}
    for name, asked in [*((name, value) for name in integers), ("stop_token_ids", [5, value])]:
        body = {"messages": HI, "prompt": "hi", name: asked}
        with pytest.raises(ApiError, match=rf"^{name} is {value}; it must be an integer of at most 64 bits") as refused:
            read_fields(json.dumps(body).encode(), kind)
        assert (refused.value.status, refused.value.param, refused.value.kind) == (400, name, "invalid_request_error")


def test_seeds_have_all_64_bits_and_twice_n_still_fits():
    assert chat_options(chat(seed=2**64 - 1)) == {"seed": 2**64 - 1}
    assert chat_options(chat(seed=-(2**63))) == {"seed": 2**63}
    with pytest.raises(ApiError, match="n is 9223372036854775808"):  # a stream's credit is twice as much
        chat(n=2**63)


@pytest.mark.parametrize("value", [*BEYOND, -1, 2**32])
def test_an_id_that_is_none_is_refused_by_name(value):
    for prompt in ([value], [1, value, 2], [[1], [2, value]]):
        with pytest.raises(ApiError, match=rf"^prompt has the token id {value}; ids are from 0 to 4294967295") as refused:
            completion_prompts(completion(prompt=prompt))
        assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert completion_prompts(completion(prompt=[0, 2**32 - 1])) == ([0, 2**32 - 1],)


@pytest.mark.parametrize("value", BEYOND)
def test_an_integer_beyond_64_bits_is_refused_wherever_it_stands(value):
    with pytest.raises(ApiError, match="more than 64 bits") as refused:
        chat_options(chat(chat_template_kwargs={"a": {"b": [value]}}))
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
    for more in ({"calls": [{"n": value}]}, {"content": value}, {"content": {"n": value}}):
        with pytest.raises(ApiError, match="more than 64 bits") as refused:
            chat_messages(chat(messages=[{"role": "user", "content": "x", **more}]))
        assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize("digits", [400, 4000, 5000, 100_000])
def test_the_longest_numbers_are_refused_too(digits):
    for field in ("n", "temperature", "seed"):
        with pytest.raises(ApiError) as refused:
            read_fields(b'{"prompt": "x", "%s": 1%s}' % (field.encode(), b"0" * digits), CompletionFields)
        assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt":"x","prompt"'])
def test_a_body_that_is_no_object(body):
    with pytest.raises(ApiError) as refused:
        read_fields(body, CompletionFields)
    assert refused.value.status == 400


def test_a_chat_without_messages():
    with pytest.raises(ApiError, match="messages"):
        read_fields(b"{}", ChatFields)
    with pytest.raises(ApiError, match="messages is empty"):
        chat_messages(read_fields(b'{"messages": []}', ChatFields))


def test_messages_reach_the_template_as_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "x"},
        {"role": "assistant", "content": None},
    ]
    assert chat_messages(chat(messages=messages)) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "x"},
        {"role": "assistant", "content": ""},
    ]
    with pytest.raises(ApiError, match="not text"):
        chat_messages(chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]))


def test_prompts_of_every_kind():
    assert completion_prompts(completion(prompt="a")) == ("a",)
    assert completion_prompts(completion(prompt=[1, 2])) == ([1, 2],)
    assert completion_prompts(completion(prompt=["a", "b"])) == ["a", "b"]
    assert completion_prompts(completion(prompt=[[1], [2, 3]])) == [[1], [2, 3]]
    for wrong in ([], ["a"] * 65, ["a", 1], [1, [2]]):
        with pytest.raises(ApiError):
            completion_prompts(completion(prompt=wrong))


@pytest.mark.parametrize(
    ("code", "status", "retry", "as_code"),
    [
        ("bad_request", 400, False, "bad_request"),
        ("prompt_too_long", 400, False, "context_length_exceeded"),
        ("kv_capacity", 400, False, "context_length_exceeded"),
        ("too_large", 413, False, "too_large"),
        ("overloaded", 429, True, "overloaded"),
        ("queue_timeout", 503, True, "queue_timeout"),
        ("deadline_exceeded", 504, False, "deadline_exceeded"),
        ("starting", 503, True, "starting"),
        ("draining", 503, True, "draining"),
        ("engine_error", 503, True, "engine_error"),
        ("nonfinite_logits", 500, False, "nonfinite_logits"),
        ("client_too_slow", 500, False, "client_too_slow"),
        ("internal", 500, False, "internal"),
    ],
)
def test_the_daemons_failures(code, status, retry, as_code):
    error = api_error(error_of(Failed(code=Code(code), message="temperature is -1.0; it must be from 0 to 100", retry_after_s=1.2)))
    assert (error.status, error.code) == (status, as_code)
    assert error.headers().get("retry-after") == ("2" if retry else None)


TEXTS = TokenTexts(None)
TEXTS._bytes = {1: b"Gr", 2: b"\xc3", 3: b"\xbc", 4: b""}
HEAD = Head(id="x", model="m", fingerprint="fp_1", created=5)
LOGPROBS = (
    TokenLogprob(token_id=1, logprob=-0.5, top=((1, -0.5), (4, float("-inf")))),
    TokenLogprob(token_id=2, logprob=-1.0, top=((3, -0.25), (2, -1.0))),
)


def done(*choices: Choice) -> Completion:
    return Completion(
        b"",
        choices or (Choice(0, "Grü", (1, 2), "stop", LOGPROBS),),
        Usage(prompt_tokens=4, cached_tokens=3, completion_tokens=2),
        Timings(),
        9,
    )


def events(data: bytes) -> list[Any]:
    lines = data.decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_log_probabilities_of_a_chat():
    answer = json.loads(ChatForm(TEXTS, logprobs=True).whole(HEAD, [done()]))
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Gr", -0.5, [71, 114])
    assert first["top_logprobs"][1] == {"token": "", "logprob": -9999.0, "bytes": []}  # JSON has no infinity
    assert (second["token"], second["bytes"]) == ("\ufffd", [0xC3])
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 3}}


NEUTRAL = {
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "bad_words": [],
    "repeat_penalty": 1.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "mirostat": 0,
    "dynatemp_range": 0.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
}


def test_what_asks_for_nothing_is_taken():
    assert chat_options(chat(**NEUTRAL)) == {}


def test_the_best_of_several_and_beams_under_vllms_names():
    assert chat_options(chat(best_of=3)) == {"best_of": 3}
    assert chat_options(chat(best_of=2, n=2)) == {"n": 2}
    assert chat_options(chat(use_beam_search=True, best_of=4, n=2, length_penalty=0.5, early_stopping="never", temperature=0)) == {
        "n": 2,
        "temperature": 0,
        "beam_width": 4,
        "length_penalty": 0.5,
        "early_stopping": "never",
    }
    assert chat_options(chat(use_beam_search=True, n=3)) == {"n": 3, "beam_width": 3}
    with pytest.raises(ApiError, match="'never'"):
        chat_options(chat(use_beam_search=True, early_stopping="soon"))


def test_speculation_is_a_mode_or_the_protocols_map():
    assert chat_options(chat(speculation="off")) == {"speculation": "off"}
    assert chat_options(chat(speculation={"mode": "ngram", "num_draft": 3})) == {"speculation": "ngram", "num_draft": 3}
    assert chat_options(chat(speculation={"acceptance": "rejection"})) == {"draft_acceptance": "rejection"}, "how, not whether"
    assert chat_options(chat(speculation={})) == {}
    with pytest.raises(ApiError, match="num_drafts"):
        chat(speculation={"num_drafts": 3})


def test_log_probabilities_of_a_completion():
    answer = json.loads(CompletionForm(TEXTS, logprobs=True, num_choices=1).whole(HEAD, [done(), done()]))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Gr", "bytes:\\xc3"]
    assert logprobs["text_offset"] == [0, 2]
    assert logprobs["top_logprobs"] == [{"Gr": -0.5, "": -9999.0}, {"bytes:\\xbc": -0.25, "bytes:\\xc3": -1.0}]
    assert completion_text("ü".encode()) == "ü"
    assert answer["usage"]["total_tokens"] == 12


def test_pieces_of_one_batch_are_one_event_a_choice():
    pieces = Pieces(ChatForm(TEXTS, logprobs=False), HEAD, with_usage=True)
    chunks = [Chunk(0, 0, (1,), "a"), Chunk(1, 0, (1,), "x"), Chunk(0, 1, (1,), "b"), Chunk(0, 2, (), '"c\n', (), "stop")]
    sent = events(pieces.of(chunks) + pieces.end([done()]))
    deltas = [(each["choices"][0]["index"], each["choices"][0]["delta"], each["choices"][0]["finish_reason"]) for each in sent[:-2]]
    assert deltas == [
        (0, {"role": "assistant", "content": ""}, None),
        (0, {"content": 'ab"c\n'}, "stop"),
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "x"}, None),
    ]
    assert all(each["usage"] is None for each in sent[:-2])
    assert sent[-2]["choices"] == []
    assert sent[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert sent[-1] == "[DONE]"


def test_what_holds_no_text_is_not_sent():
    pieces = Pieces(CompletionForm(TEXTS, logprobs=False, num_choices=1), HEAD, with_usage=False)
    assert pieces.of([Chunk(0, 0, (2,), "")]) == b""
    (piece,) = events(pieces.of([Chunk(0, 1, (3,), "ü")], first_choice=3))
    assert piece["choices"] == [{"index": 3, "text": "ü", "logprobs": None, "finish_reason": None}]
    assert "usage" not in piece
    assert events(pieces.end([done()])) == ["[DONE]"]


def test_a_streams_log_probabilities_count_on():
    pieces = Pieces(CompletionForm(TEXTS, logprobs=True, num_choices=1), HEAD, with_usage=False)
    (first,) = events(pieces.of([Chunk(0, 0, (1,), "Gr", LOGPROBS[:1])]))
    (second,) = events(pieces.of([Chunk(0, 1, (2,), "", LOGPROBS[1:])]))
    assert first["choices"][0]["logprobs"]["text_offset"] == [0]
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_character_of_several_tokens_counts_once(cut: int):
    """Grü and Gr, in one piece or two."""
    logprobs = [TokenLogprob(token_id=token_id, logprob=-1.0) for token_id in (1, 2, 3, 1)]
    form = CompletionForm(TEXTS, logprobs=True, num_choices=1)
    parts = [form.piece(0, "", part, None) for part in (logprobs[:cut], logprobs[cut:]) if part]
    offsets = [offset for part in parts for offset in json.loads(b'{"index":0' + part[:-1])["logprobs"]["text_offset"]]
    assert offsets == [0, 2, 2, 3]
