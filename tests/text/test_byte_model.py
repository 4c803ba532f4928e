"""The byte-level model of the fake executor, which needs no library."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.text.model import ChatTemplateError, TokenizerError, load_text_model

MODEL = load_text_model("bytes")


@given(st.text())
def test_text_is_its_bytes(text: str) -> None:
    ids = MODEL.encode(text)
    assert bytes(ids) == text.encode()
    assert len(ids) == MODEL.fewest_tokens(text.encode())
    assert MODEL.decode([*ids, 256]) == text


def test_the_vocabulary() -> None:
    assert MODEL.vocab_size == 257
    assert MODEL.eos_token_ids == (256,)
    assert MODEL.has_chat_template
    assert len(MODEL.digest) == 32


def test_a_chat() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert bytes(MODEL.encode_chat(messages, date="", args={})) == b"system: Be kind.\nuser: Hi\nassistant: "
    assert bytes(MODEL.encode_chat(messages, date="", args={}, add_generation_prompt=False)) == b"system: Be kind.\nuser: Hi\n"


def test_tools_without_a_form_in_json_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="JSON"):
        MODEL.encode_chat([{"role": "user", "content": "Hi"}], date="", args={"tools": [b"x"]})


def test_the_prefix_of_a_system_prompt_ends_where_users_differ() -> None:
    prefix = MODEL.system_prefix([{"role": "system", "content": "Be kind."}], date="", args={})
    assert bytes(prefix) == b"system: Be kind.\nuser: "


@pytest.mark.parametrize("messages", [[{"content": "x"}], [{"role": 1, "content": "x"}], ["x"], [{"role": "user", "content": None}]])
def test_what_is_no_message_is_refused(messages: list[object]) -> None:
    with pytest.raises(ChatTemplateError):
        MODEL.encode_chat(messages, date="", args={})  # type: ignore[arg-type]


def test_a_wrong_date_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="YYYY-MM-DD"):
        MODEL.encode_chat([{"role": "user", "content": "x"}], date="tomorrow", args={})


def test_a_missing_model_is_named() -> None:
    with pytest.raises(TokenizerError, match="/nowhere/model"):
        load_text_model("/nowhere/model")


def test_it_loads_without_any_library() -> None:
    code = "import sys; from kvd.text.model import load_text_model; load_text_model('bytes'); print(sorted({'jinja2','tokenizers','numpy','torch','gguf'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
