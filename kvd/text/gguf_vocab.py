"""Tokenizer and chat template from a GGUF file's metadata, giving the ids that llama.cpp gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.text.detokenizer import PieceRules, PieceTable
from kvd.text.errors import TokenizerError
from kvd.text.gguf_metadata import read_metadata
from kvd.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from kvd.text.special_tokens import SpecialTokens
from kvd.text.token_length import reach
from kvd.text.tokenizer import LibraryTokenizer, TokenizerFacts

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""``tokenizer.ggml.token_type``."""

_SPACE = "▁"
"""SentencePiece's stand-in for a space."""

_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "</s>",
        "<EOT>",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
    )
)
"""Tokens that end a generation wherever a vocabulary has them: files name one at most, and chat models use several."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_VARIABLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
}
"""The names that chat templates use, and the keys under ``tokenizer.ggml`` (spelled as the format spells them)."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The arrays of the file, of one length: by token id."""

    texts: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    special: Mapping[str, int]
    """Control and unknown tokens, and the end tokens whatever their type."""

    def ordinary(self) -> dict[str, int]:
        """Texts that tokenising may give: normal and byte tokens, and those that the user defined."""
        return {
            text: token_id
            for token_id, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind != _UNUSED and text not in self.special
        }

    def ids_of_type(self, wanted: int) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind == wanted and self.texts[token_id] not in self.special]


def read_gguf(path: Path) -> tuple[LibraryTokenizer, str | None]:
    """The tokenizer and the chat template's source, if the file has one.

    Raises:
        TokenizerError: the file is damaged, or its vocabulary is of a kind that is not supported.
    """
    metadata = read_metadata(path)
    template = metadata.get("tokenizer.chat_template")
    facts = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    try:
        tokenizer = _build(path, facts)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise TokenizerError(f"{path}: its vocabulary is damaged: {type(error).__name__}: {error}") from error
    return tokenizer, template if isinstance(template, str) else None


def _build(path: Path, facts: dict[str, Any]) -> LibraryTokenizer:
    model = facts.get("model")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(f"{path}: tokenizer.ggml.model {model!r} is not supported; supported: gpt2, llama")
    vocabulary = _vocabulary(facts)
    if model == "gpt2":
        name = facts.get("pre") or "default"
        pre = PRE_TOKENIZERS.get(name)
        if pre is None:
            raise TokenizerError(f"{path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}")
        backend = _byte_level(vocabulary, facts["merges"], pre)
        rules = PieceRules(byte_level=True)
        add_bos, defaults = pre.add_bos, {}
    else:
        add_prefix = bool(facts.get("add_space_prefix", True))
        backend = _sentencepiece(vocabulary, add_prefix=add_prefix)
        rules = PieceRules(byte_fallback=True, replacements=((_SPACE, " "),), num_leading_spaces=int(add_prefix))
        add_bos, defaults = True, {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    ids = defaults | {key: value for key, value in facts.items() if key.endswith("_token_id") and value < len(vocabulary.texts)}
    user_defined = vocabulary.ids_of_type(_USER_DEFINED)
    whole = [vocabulary.texts[token_id] for token_id in user_defined]
    _add_user_defined(backend, whole)
    pieces = {token_id: text for token_id, text in enumerate(vocabulary.texts) if text not in vocabulary.special}
    return LibraryTokenizer(
        TokenizerFacts(
            specials=SpecialTokens(vocabulary.special),
            prefix_ids=_surrounding(path, ids, "bos_token_id", wanted=facts.get("add_bos_token", add_bos)),
            suffix_ids=_surrounding(path, ids, "eos_token_id", wanted=facts.get("add_eos_token", False)),
            eos_token_ids=_end_ids(ids, vocabulary),
            vocab_size=len(vocabulary.texts),
            reach=reach(vocabulary.ordinary(), whole, byte_level=rules.byte_level),
            variables={name: vocabulary.texts[ids[key]] for name, key in _VARIABLES.items() if key in ids},
            identity=facts,
        ),
        PieceTable(pieces, rules, frozenset(user_defined)),
        backend,
    )


def _vocabulary(facts: Mapping[str, Any]) -> _Vocabulary:
    texts: list[str] = facts["tokens"]
    types: list[int] = facts.get("token_type") or [_NORMAL] * len(texts)
    scores: list[float] = facts.get("scores") or [0.0] * len(texts)
    if not len(texts) == len(types) == len(scores):
        raise ValueError("tokens, types and scores differ in number")
    ends = {facts[key] for key in _END_KEYS if key in facts}
    special = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(texts, types, strict=True))
        if text and (kind in (_CONTROL, _UNKNOWN) or text in _ENDS or token_id in ends)
    }
    return _Vocabulary(texts, types, scores, special)


def _byte_level(vocabulary: _Vocabulary, merges: Sequence[str], pre: PreTokenizer) -> Any:
    """A byte-level BPE: words, each as bytes' stand-ins, merged by rank."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    ordinary = vocabulary.ordinary()
    pairs = []
    for merge in merges:
        at = merge.index(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if left in ordinary and right in ordinary and left + right in ordinary:
            pairs.append((left, right))
    backend = Tokenizer(models.BPE(vocab=ordinary, merges=pairs, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def _sentencepiece(vocabulary: _Vocabulary, *, add_prefix: bool) -> Any:
    """SentencePiece's BPE: the whole text merged by the score of what a merge makes, bytes for what the vocabulary lacks."""
    from tokenizers import Tokenizer, models, normalizers

    ordinary = vocabulary.ordinary()
    whole = {*vocabulary.ids_of_type(_BYTE), *vocabulary.ids_of_type(_USER_DEFINED)}
    mergeable = {text: token_id for text, token_id in ordinary.items() if token_id not in whole}
    ranked = []
    for text, token_id in mergeable.items():
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in mergeable and right in mergeable:
                ranked.append((-vocabulary.scores[token_id], mergeable[left], mergeable[right], left, right))
    ranked.sort()
    unknown = next((text for text, token_id in vocabulary.special.items() if vocabulary.types[token_id] == _UNKNOWN), None)
    if unknown is not None:
        ordinary[unknown] = vocabulary.special[unknown]
    backend = Tokenizer(
        models.BPE(vocab=ordinary, merges=[pair[3:] for pair in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Prepend(_SPACE)] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    return backend


def _add_user_defined(backend: Any, texts: Sequence[str]) -> None:
    """Tokens that stand for themselves wherever their text occurs, before any merging."""
    from tokenizers import AddedToken

    backend.add_tokens([AddedToken(text, normalized=False) for text in texts if text])


def _surrounding(path: Path, ids: Mapping[str, int], key: str, *, wanted: bool) -> tuple[int, ...]:
    if not wanted:
        return ()
    if key not in ids:
        raise TokenizerError(f"{path}: the vocabulary wants a token at the ends of a text, but names no {key}")
    return (ids[key],)


def _end_ids(ids: Mapping[str, int], vocabulary: _Vocabulary) -> tuple[int, ...]:
    named = {ids[key] for key in _END_KEYS if key in ids}
    return tuple(sorted(named | {token_id for text, token_id in vocabulary.special.items() if text in _ENDS}))
