"""Hugging Face directories against the ``tokenizers`` library itself, on small vocabularies trained here."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvd.text.model import ChatTemplateError, TextModel, TokenizerError, load_text_model
from kvd.text.token_length import reach_of_document

pytestmark = pytest.mark.oracle

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789 'tis don't we're\n",
    "def f(x):\n    return {'a': [1, 2.5]}  # naïve café\n",
    "<s> </s> <|im_end|> <think> im_end start end |> <| think\n",
    "日本語 テキスト 中文 Привет 😀👍🏽\n",
] * 8
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
TEXTS = [
    "Hello, world! 123",
    " leading and trailing ",
    "<|im_end|> as text, </s> too, <s>",
    "a<think>b</think>",
    "naïve 日本語 😀 \u200d \ufffd \x00\n\n\ttabs  ",
    "don't WE'RE",
    "▁ and ▁▁",
    "<0x0A> <unk>",
]


def byte_level(*, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|[^\s\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS[:3]])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """As Llama 2 has it: the specials are in the vocabulary, and merges would lead to them."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    special = ["<unk>", *SPECIALS]
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    document = json.loads(tokenizer.to_str())
    model = document["model"]
    known = set(model["vocab"])
    for char in "</s>":
        if char not in known:
            model["vocab"][char] = len(model["vocab"])
    for part in ("</", "s>"):
        model["vocab"].setdefault(part, len(model["vocab"]))
    model["merges"] = [["<", "/"], ["s", ">"], ["</", "s>"], *[pair for pair in model["merges"] if "".join(pair) not in ("</", "s>")]]
    document["added_tokens"] = [token for token in document["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([] if scheme == "never" else [decoders.Strip(" ", 1, 0)])])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, ignoring merges": lambda: byte_level(ignore_merges=True),
    "metaspace before the first word": lambda: metaspace("first"),
    "metaspace before every segment": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "prepended space": lambda: metaspace("legacy"),
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
CONFIG: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}


def save(path: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in ({"tokenizer_config": CONFIG} | files).items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, TextModel]:
    tokenizer = KINDS[request.param]()
    return tokenizer, load_text_model(str(save(tmp_path_factory.mktemp("model") / "hf", tokenizer)))


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {tokenizer.token_to_id(text) for text in SPECIALS}


def test_ordinary_text_gives_the_librarys_ids(pair: tuple[Tokenizer, TextModel]) -> None:
    tokenizer, model = pair
    ordinary = [text for text in TEXTS if not any(special in text for special in [*SPECIALS, "<unk>"])]
    assert len(ordinary) > 4
    for text in ordinary:
        assert model.encode(text) == tokenizer.encode(text).ids


def test_text_never_gives_a_special_token_and_comes_back_whole(pair: tuple[Tokenizer, TextModel]) -> None:
    tokenizer, model = pair
    bos = tokenizer.token_to_id("<s>")
    for text in [*TEXTS, *SPECIALS, "".join(SPECIALS), "x</s>y", "</s</s>>"]:
        ids = model.encode(text)
        ids = ids[1:] if ids[0] == bos else ids
        assert not special_ids(tokenizer) & set(ids), text
        if "<0x" not in text and "▁" not in text and not text.startswith(" "):  # Metaspace itself cannot tell these apart
            assert model.decode(ids) == text


def test_look_alikes_give_the_ids_of_the_library_told_to_pass_them_by(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|zebra|>", special=True)])
    model = load_text_model(str(save(tmp_path, tokenizer)))
    tokenizer.encode_special_tokens = True
    for text in ("<|zebra|>", "a <|zebra|><|zebra|> 12", "<|zebra <think>|>"):
        assert model.encode(text) == tokenizer.encode(text).ids


LONG = [
    "Hello, world! " * 20,
    " " * 200,
    "日本語 テキスト" * 30,
    "e\u0301" * 90,
    "<think>" * 40,
    "\U0010ffff" * 60,
    "a\n\t\u2003b" * 40,
    "\x00\ufffd" * 90,
]


def test_no_token_stands_for_more_bytes_than_the_longest(pair: tuple[Tokenizer, TextModel]) -> None:
    tokenizer, model = pair
    fewest, encode = model.fewest_tokens, model.encode
    if "byte_fallback=False" in str(tokenizer):
        assert fewest(b"a" * 2000) == 0  # NFC composes characters: shorter than what the client sent
        document = json.loads(tokenizer.to_str()) | {"normalizer": None}
        plain = Tokenizer.from_str(json.dumps(document))
        fewest, encode = reach_of_document(document).fewest_tokens, lambda text: plain.encode(text, add_special_tokens=False).ids
    assert fewest(b"a" * 2000) > 20
    draw = random.Random(3)
    for text in [*TEXTS, *CORPUS[:4], *LONG, *("".join(draw.choices("".join(LONG), k=300)) for _ in range(100))]:
        assert len(encode(text)) >= fewest(text.encode()), text


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "\u2581"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": None},
        {"model": {"end_of_word_suffix": "</w>"}},
        {"added_tokens": [{"content": "<x>", "lstrip": True, "rstrip": False, "normalized": False}]},
        {"added_tokens": [{"content": "<x>", "lstrip": False, "rstrip": True, "normalized": False}]},
    ],
)
def test_where_text_may_vanish_nothing_bounds_a_token(change: dict[str, Any]) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = None
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = []
    assert reach_of_document(document).max_bytes > 0
    model = document["model"] | change.get("model", {})
    assert reach_of_document(document | change | {"model": model}).max_bytes == 0


def test_chats_give_the_librarys_ids(pair: tuple[Tokenizer, TextModel]) -> None:
    tokenizer, model = pair
    messages = [{"role": "user", "content": " two  spaces <think>"}, {"role": "assistant", "content": "ok 12\n"}]
    rendered = "<s>" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in messages) + "<|im_start|>"
    assert model.encode_chat(messages, date="", args={}) == tokenizer.encode(rendered, add_special_tokens=False).ids


def test_decoding_equals_the_librarys(pair: tuple[Tokenizer, TextModel]) -> None:
    tokenizer, model = pair
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert model.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@given(data=st.data())
def test_pieces_equal_the_whole(pair: tuple[Tokenizer, TextModel], data: st.DataObject) -> None:
    _, model = pair
    text = data.draw(st.text(max_size=40))
    ids = model.encode(text)
    points = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    detokenizer = model.detokenizer()
    bounds = [0, *points, len(ids)]
    pieces = [detokenizer.push(ids[start:stop]) for start, stop in itertools.pairwise(bounds)]
    assert "".join(pieces) + detokenizer.flush() == model.decode(ids)


def test_a_continuation_is_the_rest_of_the_whole(pair: tuple[Tokenizer, TextModel]) -> None:
    _, model = pair
    ids = model.encode("The quick brown fox 日本語 jumps")
    whole = model.decode(ids)
    for cut in range(1, len(ids)):
        detokenizer = model.detokenizer(ids[:cut])
        before = model.detokenizer()
        assert before.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.flush() == whole


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return byte_level()


def test_begin_and_end_of_sequence(tmp_path: Path, small: Tokenizer) -> None:
    bos, eos = small.token_to_id("<s>"), small.token_to_id("</s>")
    plain = small.encode("Hi", add_special_tokens=False).ids
    assert load_text_model(str(save(tmp_path, small))).encode("Hi") == [bos, *plain]
    config = CONFIG | {"add_bos_token": False, "add_eos_token": True}
    assert load_text_model(str(save(tmp_path, small, tokenizer_config=config))).encode("Hi") == [*plain, eos]
    assert load_text_model(str(save(tmp_path, small, tokenizer_config={}))).encode("") == [bos]


def test_every_end_of_generation_counts(tmp_path: Path, small: Tokenizer) -> None:
    end, start = small.token_to_id("<|im_end|>"), small.token_to_id("<|im_start|>")
    path = save(tmp_path, small, generation_config={"eos_token_id": [end, start]}, config={"eos_token_id": end})
    assert load_text_model(str(path)).eos_token_ids == tuple(sorted((end, start, small.token_to_id("</s>"))))


def test_an_end_of_generation_is_special_whatever_the_file_says(tmp_path: Path, small: Tokenizer) -> None:
    think = small.token_to_id("<think>")
    model = load_text_model(str(save(tmp_path, small, generation_config={"eos_token_id": think})))
    assert think not in model.encode("a <think> b")
    assert model.decode(model.encode("a <think> b")) == "a <think> b"


def test_a_token_is_special_if_any_file_says_so(tmp_path: Path, small: Tokenizer) -> None:
    think, close = small.token_to_id("<think>"), small.token_to_id("</think>")
    late = {"content": "<|late|>", "special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    config = CONFIG | {"additional_special_tokens": ["<think>"], "added_tokens_decoder": {"1000": late}}
    model = load_text_model(
        str(save(tmp_path, small, tokenizer_config=config | {"chat_template": "<think></think><|late|>{{ messages[0].content }}"}))
    )
    assert model.vocab_size == 1001
    assert not {think, 1000} & set(model.encode("<think><|late|></think>"))
    assert close in model.encode("<think><|late|></think>")
    ids = model.encode_chat([{"role": "user", "content": "<|late|>"}], date="", args={})
    assert ids[:3] == [think, close, 1000]
    assert 1000 not in ids[3:]


def test_the_template_file_comes_before_the_configuration(tmp_path: Path, small: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x"}]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named {{ eos_token }}"}]
    model = load_text_model(str(save(tmp_path, small, tokenizer_config=CONFIG | {"chat_template": named})))
    assert model.decode(model.encode_chat(messages, date="", args={})) == "named "
    assert model.encode_chat(messages, date="", args={})[-1] == small.token_to_id("</s>")
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    model = load_text_model(str(tmp_path))
    assert model.decode(model.encode_chat(messages, date="", args={})) == "from the file"


def test_no_template(tmp_path: Path, small: Tokenizer) -> None:
    model = load_text_model(str(save(tmp_path, small, tokenizer_config={})))
    assert not model.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        model.encode_chat([{"role": "user", "content": "x"}], date="", args={})


def test_the_digest_sees_whatever_changes_ids(tmp_path: Path, small: Tokenizer) -> None:
    document = json.loads(small.to_str())
    model = document["model"]
    variants: dict[str, dict[str, Any]] = {
        "merges": {**document, "model": {**model, "merges": model["merges"][:-1]}},
        "pre-tokenizer": {**document, "pre_tokenizer": json.loads(pre_tokenizers.ByteLevel().__getstate__())},
        "special": {**document, "added_tokens": [{**token, "special": True} for token in document["added_tokens"]]},
    }
    digests = {load_text_model(str(save(tmp_path, small))).digest}
    assert digests == {load_text_model(str(save(tmp_path, small))).digest}
    digests.add(load_text_model(str(save(tmp_path, small, tokenizer_config=CONFIG | {"chat_template": "x"}))).digest)
    digests.add(load_text_model(str(save(tmp_path, small, generation_config={"eos_token_id": 3}))).digest)
    for variant in variants.values():
        (tmp_path / "tokenizer.json").write_text(json.dumps(variant), encoding="utf-8")
        digests.add(load_text_model(str(tmp_path)).digest)
    assert len(digests) == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer.json"),
        ("{", "tokenizer.json"),
        ("[]", "not a JSON object"),
        ('{"model": 3}', "damaged"),
        ('{"model": {"type": "Unigram", "vocab": []}}', "Unigram is not supported; supported: BPE"),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "WordPiece"}}',
            "decoder WordPiece is not supported",
        ),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}, "decoder": {"type": "Fuse"}}', "tokenizer.json"),
    ],
)
def test_damage_and_other_kinds_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=message):
        load_text_model(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *(
            (file, {"eos_token_id": value}, "eos_token_id must be the id of a token or a list of ids, is ")
            for file in ("config.json", "generation_config.json")
            for value in ("a", [2, "a"], 1.5, True, {"id": 2}, [[2]], 2**31, -2)
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": 3}, "damaged or not understood"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "y"}}}, "damaged or not understood"),
        ("tokenizer_config.json", {"additional_special_tokens": 3}, "damaged or not understood"),
        ("special_tokens_map.json", {"additional_special_tokens": [{}]}, "damaged or not understood"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_own_file(
    file: str, content: dict[str, Any], message: str, tmp_path: Path, small: Tokenizer
) -> None:
    save(tmp_path, small)
    (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError, match=f"/{file}: {message}"):
        load_text_model(str(tmp_path))


@pytest.mark.parametrize("value", [None, -1, [], [-1]])
def test_files_may_name_no_end_of_sequence(value: Any, tmp_path: Path, small: Tokenizer) -> None:
    model = load_text_model(str(save(tmp_path, small, generation_config={"eos_token_id": value})))
    assert model.eos_token_ids == (small.token_to_id("</s>"),)


def test_several_threads_may_encode(tmp_path: Path, small: Tokenizer) -> None:
    model = load_text_model(str(save(tmp_path, small)))
    messages = [{"role": "user", "content": TEXTS[4] * 20}]
    expected = model.encode_chat(messages, date="", args={})
    results: list[list[int]] = []

    def work() -> None:
        results.extend(model.encode_chat(messages, date="", args={}) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 80


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path, small: Tokenizer) -> None:
    model = load_text_model(str(save(tmp_path, small)))
    text = CORPUS[0] * 5_000
    started, encoding, seen = threading.Event(), threading.Event(), 0

    def work() -> None:
        encoding.set()
        started.set()
        model.encode(text)
        encoding.clear()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    while encoding.is_set():
        seen += 1
        time.sleep(0)
    thread.join()
    assert seen > 100
