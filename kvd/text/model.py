"""The text side of a model: tokenizer, chat template, detokenizer, by one name."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvd.text.detokenizer import IncrementalDetokenizer, PieceTable
from kvd.text.errors import ChatTemplateError, TextError, TokenizerError
from kvd.text.special_tokens import Segment
from kvd.text.tokenizer import TokenizerFacts, read_directory, read_json

__all__ = ["BYTES", "ChatTemplateError", "TextError", "TextModel", "TokenizerError", "load_text_model"]

BYTES = "bytes"
"""The source of the byte-level vocabulary that needs no model."""

_DIGEST_DOMAIN = "kvd text 1"
_PROBES = ("A", "7")
"""User turns that share nothing, to find where a system prompt's tokens end."""


class Tokenizer(Protocol):
    """Text to ids; safe to use from several threads."""

    @property
    def facts(self) -> TokenizerFacts: ...

    @property
    def pieces(self) -> PieceTable: ...

    def encode(self, text: str, /) -> list[int]: ...

    def encode_segments(self, segments: Iterable[Segment], /) -> list[int]: ...


class Template(Protocol):
    """Messages to text; safe to use from several threads."""

    @property
    def source(self) -> str: ...

    @property
    def takes_tools(self) -> bool: ...

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, date: dt.date, args: Mapping[str, Any], add_generation_prompt: bool
    ) -> list[Segment]: ...


class TextModel:
    """Tokenizer and chat template of one model. Immutable: every method may be called from any thread.

    ``digest`` is 32 bytes over everything that decides which ids a text or a chat becomes. ``vocab_size`` counts ids up to the largest;
    a model's own vocabulary may be padded beyond.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._loaded_on = dt.datetime.now(tz=dt.UTC).astimezone().date()
        self.vocab_size = tokenizer.facts.vocab_size
        self.eos_token_ids = tokenizer.facts.eos_token_ids
        self.digest = _digest(tokenizer.facts, template)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The special tokens' ids by their texts."""
        return self._tokenizer.facts.specials.ids

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the begin-of-sequence token where the model wants one. Special tokens' texts are text like any other."""
        return self._tokenizer.encode(text)

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a text in the middle of another: nothing is put before it."""
        return self._tokenizer.encode_segments(("", text))

    def fewest_tokens(self, text: bytes) -> int:
        """How many tokens a text in UTF-8 has at least, told without tokenising it; 0 if nothing is known."""
        return self._tokenizer.facts.reach.fewest_tokens(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        date: str,
        args: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        check_length: Callable[[int], None] | None = None,
    ) -> list[int]:
        """Token ids of a chat. The template alone decides about special tokens, the begin of sequence among them.

        Args:
            messages: maps with a ``role``, mostly a ``content``, and whatever else the template knows.
            date: the day that the template sees, YYYY-MM-DD; empty: the day on which the model was loaded.
            args: further variables of the template (``enable_thinking``, …).
            tools: what the assistant may call, for the template's ``tools``.
            add_generation_prompt: end with the beginning of an assistant's turn.
            check_length: told how many tokens the rendered chat has at least, before it is tokenised; what it raises is passed on.

        Raises:
            ChatTemplateError: there is no template, it refused the messages, they are no messages, or it has no place for tools.
        """
        if self._template is None:
            raise ChatTemplateError("the model has no chat template; send text or token ids instead")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ChatTemplateError(f"message {number} is not a map with a role")
        if tools:
            if not self._template.takes_tools:
                raise ChatTemplateError("the model's chat template has no place for tools; leave them away, or describe them in a message")
            if "tools" in args:
                raise ChatTemplateError("tools are given twice: among the template's variables too")
            args = {**args, "tools": tools}
        segments = self._template.render(messages, date=self._date(date), args=args, add_generation_prompt=add_generation_prompt)
        if check_length is not None:
            check_length(sum(1 if isinstance(each, int) else self.fewest_tokens(each.encode("utf-8", "replace")) for each in segments))
        return self._tokenizer.encode_segments(segments)

    def system_prefix(self, messages: Sequence[Mapping[str, Any]], *, date: str, args: Mapping[str, Any]) -> list[int]:
        """The tokens that every chat beginning with these messages shares: the longest common prefix of two chats with different user turns after them.

        Raises:
            ChatTemplateError: as ``encode_chat``; a template that wants roles to alternate refuses messages that end with a user's.
        """
        first, second = (self.encode_chat([*messages, {"role": "user", "content": probe}], date=date, args=args) for probe in _PROBES)
        length = next(
            (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), min(len(first), len(second))
        )
        return first[:length]

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        """For one sequence of tokens after a prompt."""
        return IncrementalDetokenizer(self._tokenizer.pieces, prompt_ids)

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes that each id stands for; none for special tokens and ids without a piece."""
        bytes_of = self._tokenizer.pieces.bytes_of
        return [bytes_of(token_id) for token_id in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence; special tokens have none."""
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def _date(self, text: str) -> dt.date:
        if not text:
            return self._loaded_on
        try:
            return dt.date.fromisoformat(text)
        except ValueError as error:
            raise ChatTemplateError(f"the template's date must be YYYY-MM-DD, not {text!r}") from error


def load_text_model(source: str) -> TextModel:
    """Load the text side of a model.

    Args:
        source: path of a GGUF file or of a Hugging Face directory, or ``bytes`` for the byte-level vocabulary that needs no files.

    Raises:
        TokenizerError: there is no such model, or its vocabulary is damaged or not supported.
        ChatTemplateError: its chat template is not a template.
    """
    if source == BYTES:
        from kvd.text.byte_level import ByteTemplate, ByteTokenizer

        return TextModel(ByteTokenizer(), ByteTemplate())
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # texts come one at a time: the library's thread pool would only wake up for nothing
    path = Path(source)
    if path.is_dir():
        tokenizer = read_directory(path)
        template = _directory_template(path)
    elif path.is_file():
        from kvd.text.gguf_vocab import read_gguf

        tokenizer, template = read_gguf(path)
    else:
        raise TokenizerError(f"{source}: no such model file or directory")
    if template is None:
        return TextModel(tokenizer, None)
    from kvd.text.chat_template import ChatTemplate

    return TextModel(tokenizer, ChatTemplate(template, tokenizer.facts.specials, tokenizer.facts.variables))


class SharedTextModel:
    """A text model for several threads of one process: loaded by the first that asks, once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._model: TextModel | None = None

    def load(self) -> TextModel:
        """Errors are those of ``load_text_model``, and come again at the next call."""
        with self._lock:
            if self._model is None:
                self._model = load_text_model(self.source)
            return self._model


def _directory_template(path: Path) -> str | None:
    """chat_template.jinja, else the template in tokenizer_config.json (of several, the one named ``default``)."""
    try:
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"{path}/chat_template.jinja: {error}") from error
    template = read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get("default")
    return template if isinstance(template, str) else None


def _digest(facts: TokenizerFacts, template: Template | None) -> bytes:
    identity = {"tokenizer": facts.identity, "variables": facts.variables, "template": template.source if template else None}
    encoded = json.dumps([_DIGEST_DOMAIN, identity], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(encoded.encode()).digest()
