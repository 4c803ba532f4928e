"""A Hugging Face directory of SmolLM2's vocabulary, loaded by kvd and by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvd.text.gguf_metadata import read_metadata
from kvd.text.model import TextModel, load_text_model

pytestmark = [pytest.mark.oracle, pytest.mark.model, pytest.mark.torch]

DATA = Path(__file__).parent.parent / "data"
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
]
TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = 'Today is ' + strftime_now('%d') | length | string %}{%- set rest = messages %}{%- endif %}
<|im_start|>system
{{ system | trim }}
{%- if tools %}

Tools:
  {% for tool in tools %}
{{ tool | tojson }}
  {% endfor %}
{%- endif %}<|im_end|>
{% for message in rest %}
    {%- if loop.index0 > 8 %}{% break %}{% endif %}
    {%- if message['role'] not in ['user', 'assistant', 'tool'] %}{{ raise_exception('role ' + message['role']) }}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' else message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def directory(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = read_metadata(smollm2)
    texts = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts[:17]])
    path = tmp_path_factory.mktemp("hf")
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> TextModel:
    return load_text_model(str(directory))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_both_forms_of_the_model_give_the_same_ids(model: TextModel) -> None:
    cases = [json.loads(line) for line in (DATA / "smollm2_tokens.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [case["text"] for case in cases if model.encode(case["text"]) != case["ids"]] == []


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi there 123"}],
    [
        {"role": "system", "content": "  Be brief. \n"},
        {"role": "user", "content": "a < b > c | d"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok"},
    ],
    [{"role": "user", "content": "日本語 😀 'quoted' \"x\" \\n"}, {"role": "tool", "content": '{"t": 1.5}'}] * 6,
    [{"role": "user", "content": ""}],
]


@pytest.mark.parametrize("number", range(len(CHATS)))
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_equal_apply_chat_template(model: TextModel, reference: Any, number: int, tools: Any, prompt: bool) -> None:
    expected = reference.apply_chat_template(CHATS[number], tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    args = {} if tools is None else {"tools": tools}
    assert model.encode_chat(CHATS[number], date="", args=args, add_generation_prompt=prompt) == expected


def test_decoding_equals_transformers(model: TextModel, reference: Any) -> None:
    ids = [1, *model.encode("Hello  wörld 😀\n  12"), 2, 0]
    assert model.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
