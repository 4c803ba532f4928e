"""The tokenizer of a real model: the ``tokenizers`` library for ordinary text, special tokens beside it.

The library is given a vocabulary without the special tokens and without any merge that would make one. So no text becomes a special
token, whatever it holds; special tokens are put in by id, where a chat template wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.text.detokenizer import PieceRules, PieceTable
from kvd.text.errors import TokenizerError
from kvd.text.special_tokens import Segment, SpecialTokens
from kvd.text.token_length import TokenReach, reach_of_document

_TOKEN_IDS = range(-1, 2**31)
"""-1: files that have no such token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What a model says of its tokenizer beside the vocabulary.

    ``prefix_ids`` and ``suffix_ids`` surround plain text (begin and end of sequence). ``variables`` are the special tokens' texts under the names
    that chat templates use. ``reach``: how much text a token can stand for. ``identity`` is everything that decides ids, as JSON values,
    for the digest.
    """

    specials: SpecialTokens
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    reach: TokenReach
    variables: Mapping[str, str]
    identity: Mapping[str, Any]


class LibraryTokenizer:
    """Ordinary text through ``tokenizers.Tokenizer`` objects; may be used from several threads.

    ``inner`` encodes text that follows a special token, where that differs from text at the start.
    """

    def __init__(self, facts: TokenizerFacts, pieces: PieceTable, start: Any, inner: Any | None = None) -> None:
        self.facts = facts
        self.pieces = pieces
        self._start = start
        self._inner = inner or start

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text, between the ids that begin and end a sequence where the model has them."""
        plain = self.encode_segments((text,) if text else ())
        return [*self.facts.prefix_ids, *plain, *self.facts.suffix_ids]

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """The ids of ordinary text and special tokens in this order; nothing is put before or after them."""
        token_ids: list[int] = []
        backend = self._start
        for segment in segments:
            if isinstance(segment, int):
                token_ids.append(segment)
            else:
                # the batch call alone lets other threads run; "fast" leaves out the offsets that nobody asks for
                token_ids.extend(backend.encode_batch_fast([segment], add_special_tokens=False)[0].ids)
            backend = self._inner
        return token_ids


def read_directory(path: Path) -> LibraryTokenizer:
    """The tokenizer of a Hugging Face directory.

    Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json and config.json; only the first must be there.

    Raises:
        TokenizerError: tokenizer.json is missing, damaged or of a kind that is not supported.
    """
    document = read_json(path / "tokenizer.json")
    if not document:
        raise TokenizerError(f"{path}: no tokenizer.json; a Hugging Face directory needs one")
    config = read_json(path / "tokenizer_config.json")
    mapped = read_json(path / "special_tokens_map.json")
    texts = _special_texts(mapped) | _special_texts(config)
    with _naming(path / "special_tokens_map.json"):
        named = {*texts.values(), *_additional(mapped)}
    with _naming(path / "tokenizer_config.json"):
        named.update(_additional(config))
        listed = _listed_tokens(config)
    with _naming(path / "tokenizer.json"):
        document["added_tokens"] = _added_tokens(document, listed, named)
        return _build(path, document, config, texts)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Whatever its values break is an error that names the file.

    Raises:
        TokenizerError: for it.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(f"{file}: damaged or not understood: {type(error).__name__}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no such file.

    Raises:
        TokenizerError: the file is there and is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value


def _build(path: Path, document: dict[str, Any], config: dict[str, Any], texts: dict[str, str]) -> LibraryTokenizer:
    model = document["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
    if kind != "BPE":
        raise TokenizerError(f"{path}: a tokenizer.json of model {kind} is not supported; supported: BPE")
    added: list[dict[str, Any]] = document["added_tokens"]
    id_of = dict(model["vocab"]) | {token["content"]: token["id"] for token in added}
    eos = _eos_ids(path, id_of, texts)
    special = {token["content"]: token for token in added if token["special"] or token["id"] in eos}
    specials = SpecialTokens(
        {content: token["id"] for content, token in special.items()},
        strips_left=frozenset(token["id"] for token in special.values() if token.get("lstrip")),
        strips_right=frozenset(token["id"] for token in special.values() if token.get("rstrip")),
    )
    prefix, suffix = _surroundings(document.get("post_processor"), id_of)
    prefix = _override(prefix, config.get("add_bos_token"), id_of.get(texts.get("bos_token", "")))
    suffix = _override(suffix, config.get("add_eos_token"), id_of.get(texts.get("eos_token", "")))
    plain = [token for token in added if token["content"] not in special]
    start = _without_specials(document, plain, special)
    facts = TokenizerFacts(
        specials=specials,
        prefix_ids=prefix,
        suffix_ids=suffix,
        eos_token_ids=tuple(sorted(eos)),
        vocab_size=max(id_of.values(), default=-1) + 1,
        reach=reach_of_document(start),
        variables=texts,
        identity={"tokenizer.json": document, "prefix": prefix, "suffix": suffix, "eos": sorted(eos)},
    )
    pieces = PieceTable(
        {token_id: text for text, token_id in id_of.items() if text not in special}, _decoder_rules(path, document.get("decoder"))
    )
    inner, differs = _never_at_start(start)
    return LibraryTokenizer(facts, pieces, _library(path, start), _library(path, inner) if differs else None)


def _listed_tokens(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The added tokens that tokenizer_config.json lists, by their texts."""
    listed: dict[str, dict[str, Any]] = {}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        listed.setdefault(token["content"], {"id": int(token_id), "normalized": False, "special": False, **token})
    return listed


def _added_tokens(document: Mapping[str, Any], listed: Mapping[str, dict[str, Any]], named: set[str]) -> list[dict[str, Any]]:
    """The added tokens of tokenizer.json, and those that tokenizer_config.json alone lists; special too are those that a file names as such."""
    added = {token["content"]: token for token in document.get("added_tokens") or []}
    for content, token in listed.items():
        added.setdefault(content, token)
    return [{**token, "special": bool(token["special"]) or token["content"] in named} for token in added.values()]


def _without_specials(document: dict[str, Any], plain: list[dict[str, Any]], special: Mapping[str, Any]) -> dict[str, Any]:
    """The document with a vocabulary in which the special tokens cannot occur.

    The unknown token stays in the vocabulary, where the model needs it, but no merge leads to it. Other added tokens get their ids from the vocabulary.
    """
    model = document["model"]
    removed = set(special) - {model.get("unk_token")}
    vocab = {text: token_id for text, token_id in model["vocab"].items() if text not in removed}
    vocab.update((token["content"], token["id"]) for token in plain)
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if not special.keys().isdisjoint(model["vocab"]):
        merges = [(left, right) for left, right in merges if not {left, right, left + right} & special.keys()]
    return {
        **document,
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "added_tokens": plain,
        "model": {**model, "type": "BPE", "dropout": None, "vocab": vocab, "merges": merges},
    }


def _never_at_start(document: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The document for text that is not at the start, and whether that is another: a Metaspace may put a space before the first word alone."""
    differs = False

    def changed(part: Any) -> Any:
        nonlocal differs
        if not isinstance(part, dict):
            return part
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            differs = True
            return {**part, "prepend_scheme": "never"}
        if part.get("type") == "Sequence":
            return {**part, "pretokenizers": [changed(step) for step in part["pretokenizers"]]}
        return part

    pre_tokenizer = changed(document.get("pre_tokenizer"))
    return {**document, "pre_tokenizer": pre_tokenizer}, differs


def _library(path: Path, document: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}/tokenizer.json: {error}") from error


def _special_texts(document: Mapping[str, Any]) -> dict[str, str]:
    """The texts of ``bos_token`` and its like; written as a string or as an object with ``content``."""
    texts = {}
    for name, value in document.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _additional(document: Mapping[str, Any]) -> list[str]:
    values = document.get("additional_special_tokens") or []
    return [value["content"] if isinstance(value, dict) else str(value) for value in values]


def _eos_ids(path: Path, id_of: Mapping[str, int], texts: Mapping[str, str]) -> set[int]:
    """Ids that end a generation, by every file that says so."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item in _TOKEN_IDS for item in values):
            raise TokenizerError(f"{path / name}: eos_token_id must be the id of a token or a list of ids, is {value!r}")
        found.update(item for item in values if item >= 0)
    if texts.get("eos_token") in id_of:
        found.add(id_of[texts["eos_token"]])
    return found


def _surroundings(processor: Any, id_of: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a post-processor puts before and after a text."""
    if not processor:
        return (), ()
    kind = processor["type"]
    if kind == "Sequence":
        prefix: tuple[int, ...] = ()
        suffix: tuple[int, ...] = ()
        for step in processor["processors"]:
            before, after = _surroundings(step, id_of)
            prefix, suffix = before + prefix, suffix + after
        return prefix, suffix
    if kind in ("RobertaProcessing", "BertProcessing"):
        return (processor["cls"][1],), (processor["sep"][1],)
    if kind == "TemplateProcessing":
        sides: tuple[list[int], list[int]] = ([], [])
        side = 0
        for item in processor["single"]:
            if "Sequence" in item:
                side = 1
            else:
                sides[side].extend(processor["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        return tuple(sides[0]), tuple(sides[1])
    return (), ()


def _override(found: tuple[int, ...], wanted: Any, token_id: int | None) -> tuple[int, ...]:
    """tokenizer_config.json's ``add_bos_token`` or ``add_eos_token``, where it is set, overrules the post-processor."""
    if wanted is None or token_id is None:
        return found
    return (token_id,) if wanted else ()


def _decoder_rules(path: Path, decoder: Any) -> PieceRules:
    """How the document's decoder joins pieces.

    Raises:
        TokenizerError: it is of a kind that is not supported.
    """
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    byte_level = byte_fallback = False
    replacements: list[tuple[str, str]] = []
    num_leading_spaces = 0
    for step in steps:
        kind = step["type"] if step else "none"
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            starts = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
            num_leading_spaces = max(num_leading_spaces, int(starts))
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            num_leading_spaces = max(num_leading_spaces, step["start"])
        elif kind != "Fuse":
            raise TokenizerError(f"{path}/tokenizer.json: decoder {kind} is not supported; supported: ByteLevel, or Metaspace-like steps")
    return PieceRules(
        byte_level=byte_level,
        byte_fallback=byte_fallback,
        replacements=tuple(replacements),
        num_leading_spaces=num_leading_spaces,
    )
