"""Vocabularies in GGUF files, written here with the format's own writer: SentencePiece against ``sentencepiece``, the rest against Hugging Face's parts."""

from __future__ import annotations

import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from kvd.text.model import TextModel, TokenizerError, load_text_model
from kvd.text.pre_tokenizers import PRE_TOKENIZERS

pytestmark = pytest.mark.oracle

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789 don't we're",
    "def f(x): return {'a': [1, 2.5]} # naïve café </s> <s> s> </",
    "日本語 テキスト 中文 Привет мир γειά",
] * 20
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TEXTS = [
    "Hello, world! 123",
    "  two leading and trailing  ",
    "</s> and <s> and <unk> as text",
    "naïve 日本語 😀\n\n\ttabs \x00 \ufffd",
    "<0x0A> ▁ don't WE'RE",
]


def write(path: Path, **facts: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    names = {"template": "chat_template"}
    for name, value in facts.items():
        key = f"tokenizer.{names[name]}" if name in names else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=430,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_facts(trained: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    types = []
    for token_id in range(trained.get_piece_size()):
        flags = ((trained.is_unknown, UNKNOWN), (trained.is_control, CONTROL), (trained.is_byte, BYTE))
        kind = next((kind for test, kind in flags if test(token_id)), NORMAL)
        types.append(USER_DEFINED if trained.id_to_piece(token_id) == "<think>" else kind)
    size = range(trained.get_piece_size())
    return {
        "model": "llama",
        "tokens": [trained.id_to_piece(token_id) for token_id in size],
        "scores": [float(trained.get_score(token_id)) for token_id in size],
        "token_type": types,
        "bos_token_id": trained.bos_id(),
        "eos_token_id": trained.eos_id(),
        "unknown_token_id": trained.unk_id(),
    }


@pytest.fixture(scope="module")
def llama(trained: sentencepiece.SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    path = write(
        tmp_path_factory.mktemp("llama") / "v.gguf",
        **sentencepiece_facts(trained),
        template="{{ bos_token }}[{{ messages[0].content }}]</s>",
    )
    return load_text_model(str(path))


def test_sentencepiece_ids_and_text(trained: sentencepiece.SentencePieceProcessor, llama: TextModel) -> None:
    draw = random.Random(7)
    mixtures = ["".join(draw.choice("ab cdeqtu</s>日本é😀\n'15") for _ in range(draw.randint(1, 30))) for _ in range(500)]
    for text in [*TEXTS, *CORPUS[:3], *mixtures]:
        expected = trained.encode(text)
        assert llama.encode(text) == [trained.bos_id(), *expected], text
        assert llama.decode(expected) == text.replace("▁", " ")  # SentencePiece's own stand-in for a space


def test_a_token_of_the_users_stands_for_itself(trained: sentencepiece.SentencePieceProcessor, llama: TextModel) -> None:
    think = trained.piece_to_id("<think>")
    assert llama.encode("<think>").count(think) == 1
    assert llama.encode("a<think>b").count(think) == 1
    assert llama.decode([think]) == "<think>"


LONG = [*TEXTS, "the quick brown fox " * 20, " " * 300, "<think>" * 40, "日本語" * 50, "\U0010ffff" * 50, "▁ " * 90]


def test_no_token_stands_for_more_bytes_than_the_longest(llama: TextModel, tmp_path: Path) -> None:
    for model in (llama, load_text_model(str(write(tmp_path / "v.gguf", **bpe_facts("gpt-2"))))):
        assert model.fewest_tokens(b"a" * 2000) > 20
        for text in LONG:
            assert len(model.encode(text)) >= model.fewest_tokens(text.encode()), text


def test_bytes_that_a_vocabulary_lacks_are_not_counted(tmp_path: Path) -> None:
    facts = bpe_facts("gpt-2")
    facts["token_type"][facts["tokens"].index("Ą")] = UNUSED  # byte 4
    model = load_text_model(str(write(tmp_path / "v.gguf", **facts)))
    assert model.encode("\x04" * 500) == []
    assert model.fewest_tokens(b"\x04" * 500) == 0
    assert len(model.encode("\x04a" * 500)) >= model.fewest_tokens(b"\x04a" * 500) == model.fewest_tokens(b"a" * 500) > 0


def test_a_vocabulary_without_every_byte_bounds_nothing(trained: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    facts = sentencepiece_facts(trained)
    facts["tokens"][facts["tokens"].index("<0xF4>")] = "[gone]"
    model = load_text_model(str(write(tmp_path / "v.gguf", **facts)))
    assert model.fewest_tokens(b"a" * 2000) == 0
    assert len(model.encode("\U0010ffff" * 500)) < 10  # all of it one unknown token


def test_a_chat_can_be_refused_by_its_bytes_before_it_is_tokenised(llama: TextModel) -> None:
    told: list[int] = []
    llama.encode_chat([{"role": "user", "content": "é</s>"}], date="", args={}, check_length=told.append)
    (fewest,) = told
    assert 3 <= fewest <= len(llama.encode("[é</s>]")) + 1  # the template's two special tokens, and the text


def test_sentencepiece_defaults_and_flags(trained: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    facts = sentencepiece_facts(trained) | {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    model = load_text_model(str(write(tmp_path / "v.gguf", **facts)))
    dummy = trained.encode("a quick")
    ids = model.encode("a quick")
    assert ids[-1] == trained.eos_id()
    assert ids[0] != trained.bos_id()
    assert ids[:-1] != dummy
    assert model.decode(ids) == "a quick"
    assert model.eos_token_ids == (trained.eos_id(),)
    assert not model.has_chat_template


def test_the_template_comes_from_the_file(trained: sentencepiece.SentencePieceProcessor, llama: TextModel) -> None:
    ids = llama.encode_chat([{"role": "user", "content": "</s>"}], date="", args={})
    assert (ids[0], ids[-1]) == (trained.bos_id(), trained.eos_id())
    assert ids.count(trained.eos_id()) == 1
    assert llama.decode(ids) == "[</s>]"


def bpe_facts(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary with every kind of token; merges would lead to the control token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    document = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(document["vocab"], key=document["vocab"].__getitem__)
    merges = [" ".join(merge) for merge in document["merges"]]
    extra = [("<|", NORMAL), ("|>", NORMAL), ("<|>", CONTROL), ("<think>", USER_DEFINED), ("[unused]", UNUSED), ("<|im_end|>", NORMAL)]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *(text for text, _ in extra)],
        "token_type": [*[NORMAL] * len(tokens), *(kind for _, kind in extra)],
        "merges": [*merges, "< |", "| >", "<| >"],
        "eos_token_id": len(tokens) + 2,
    }


def test_a_byte_level_vocabulary(tmp_path: Path) -> None:
    facts = bpe_facts("gpt-2")
    model = load_text_model(str(write(tmp_path / "v.gguf", **facts)))
    reference = Tokenizer(
        models.BPE(
            vocab={text: number for number, text in enumerate(facts["tokens"])}, merges=[(*merge.split(" "),) for merge in facts["merges"]]
        )
    )
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in TEXTS:
        assert model.encode(text) == reference.encode(text).ids
        assert model.decode(model.encode(text)) == text
    control, think, end = (facts["tokens"].index(text) for text in ("<|>", "<think>", "<|im_end|>"))
    assert control in reference.encode("<|>").ids
    assert model.decode(model.encode("<|> <|im_end|> [unused]")) == "<|> <|im_end|> [unused]"
    assert not {control, end} & set(model.encode("<|> <|im_end|>"))
    assert model.encode("a<think>").count(think) == 1
    assert model.eos_token_ids == (control, end)
    assert model.vocab_size == len(facts["tokens"])


WORDS: dict[str, list[list[str]]] = {
    "smollm": [["a"], ["1"], ["2"], ["3"], [" b"], ["'s"], [" "], [" c"], ["\n"]],
    "gpt-2": [["a"], ["123"], [" b"], ["'s"], [" "], [" c"], ["\n"]],
    "llama-bpe": [["a"], ["123"], [" b"], ["'s"], [" "], [" c"], ["\n"]],
    "qwen2": [["a"], ["1"], ["2"], ["3"], [" b"], ["'s"], [" "], [" c"], ["\n"]],
    "tekken": [["a"], ["1"], ["2"], ["3"], [" b"], ["'s"], [" "], [" c"], ["\n"]],
    "deepseek-v3": [["a"], ["123"], [" b"], ["'s"], [" "], [" c"], ["\n"]],
    "default": [["a"], ["123"], [" b"], ["'"], ["s"], [" "], [" c"], ["\n"]],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_as_the_name_says(pre: str, tmp_path: Path) -> None:
    """Tokens for whole words only: text is one token a word, or falls apart where a word was cut otherwise."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["".join(word).replace(" ", "Ġ").replace("\n", "Ċ") for word in WORDS[pre]]
    tokens = list(alphabet)
    merges = []
    for word in ["123", *words]:
        for stop in range(2, len(word) + 1):
            if word[:stop] not in tokens:
                tokens.append(word[:stop])
                merges.append(f"{word[: stop - 1]} {word[stop - 1]}")
    path = write(tmp_path / "v.gguf", model="gpt2", pre=pre, tokens=tokens, merges=merges, add_bos_token=False)
    ids = load_text_model(str(path)).encode("a123 b's  c\n")
    assert [tokens[token_id] for token_id in ids] == words


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_name_keeps_all_text(pre: str, tmp_path: Path) -> None:
    facts = bpe_facts(pre) | {"bos_token_id": 0}
    model = load_text_model(str(write(tmp_path / "v.gguf", **facts)))
    for text in [*TEXTS, *CORPUS[:3], "ÉCOLE Élan ǅ x² ½ 1234567 a\r\nb \u3000 'S \u0301"]:
        ids = model.encode(text)
        assert model.decode(ids[1:] if PRE_TOKENIZERS[pre].add_bos else ids) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "'bert' is not supported; supported: gpt2, llama"),
        ({"model": "t5"}, "'t5' is not supported"),
        ({"pre": "kimi-k2"}, "'kimi-k2' is not supported; supported: .*smollm"),
        ({"token_type": [1]}, "damaged: ValueError"),
        ({"merges": ["abc"]}, "damaged"),
        ({"add_bos_token": True}, "names no bos_token_id"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_text_model(str(write(tmp_path / "v.gguf", **(bpe_facts("gpt-2") | change))))


def test_a_missing_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model None"):
        load_text_model(str(write(tmp_path / "v.gguf")))


def test_damaged_files_are_refused_wherever_they_are_cut(tmp_path: Path) -> None:
    whole = write(tmp_path / "v.gguf", **bpe_facts("gpt-2")).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(64), *range(64, len(whole) - 64, 997)]:
        path.write_bytes(whole[:size])
        with pytest.raises(TokenizerError):
            load_text_model(str(path))
    for garbage in (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), b"\xff" * 64):
        path.write_bytes(garbage)
        with pytest.raises(TokenizerError, match="not a GGUF file"):
            load_text_model(str(path))


def test_the_digest_sees_the_vocabulary(tmp_path: Path) -> None:
    variants = [
        {},
        {"pre": "smollm"},
        {"merges": bpe_facts("gpt-2")["merges"][:-1]},
        {"add_eos_token": True},
        {"template": "x"},
        {"template": "y"},
    ]
    digests = {load_text_model(str(write(tmp_path / "v.gguf", **(bpe_facts("gpt-2") | change)))).digest for change in variants}
    assert len(digests) == len(variants)
