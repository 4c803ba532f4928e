"""Body frames to token ids: what the text threads run. Hostile bodies cost little more than their own length.

A chat is untrusted msgpack of up to ``max_message_bytes``: a byte of it can stand for an object of 64 bytes. So array and map
headers are checked before anything is built, plain strings are read as they are, and structured values have a small budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from kvd_client.protocol.codec import nests_deeper
from kvd_client.protocol.messages import MAX_NESTING

from kvd.text.errors import TextError
from kvd.transport.errors import RequestError, bad_request
from kvd.transport.ports import Text
from kvd.types import TOKEN_BYTES, PackedTokens, pack_tokens, unpack_tokens

MAX_CHAT_MESSAGES = 4096
MAX_MESSAGE_KEYS = 32
MAX_STRUCTURED_BYTES = 256 * 1024
"""Bytes of a chat's values that are neither strings nor numbers (content parts, tool calls), together; of its tools the same."""
MAX_TOOLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJob:
    """A body to be turned into token ids. ``number`` names the job; jobs of one peer run in order."""

    number: int
    peer: bytes
    input: str
    body: bytes
    vocab_size: int = 0
    """For ids: how many there are."""
    template_args: dict[str, Any] = field(default_factory=dict)
    check_length: Callable[[int], None] | None = None
    """For a chat: told how many tokens it has at least, before its text is tokenised; raises ``RequestError`` if they can't fit."""
    is_prefix: bool = False
    """Whether the ids are to be what every conversation beginning with these messages shares (a pin)."""
    tools: bytes | None = None
    """For a chat: a msgpack array of maps; None: no tools."""
    keep_tokens: int = 0
    """Only so many of the last ids are kept; 0: all."""
    bad_words: tuple[str, ...] = ()
    """To be tokenised besides."""
    echo: bool = False
    """Whether the text of the ids is wanted, too."""
    is_continued: bool = True
    """Whether the output's text goes on where that ends: then the output finishes a character that the ids leave unfinished."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.tools or b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResult:
    """``error``, ``fault`` or ids; ``messages`` and ``text`` are the source, for a pin's recipe."""

    number: int
    token_ids: PackedTokens = b""
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids, distinct, that spell the job's."""
    echo: str = ""
    """The text of the ids."""
    error: RequestError | None = None
    fault: BaseException | None = None
    """What should not have been raised: the session counts and logs it and makes an error of it."""

    def require_ids(self) -> PackedTokens:
        """The ids; raises the error if there is one."""
        assert self.fault is None
        if self.error is not None:
            raise self.error
        return self.token_ids


def run_text_job(job: TextJob, text: Text, date: str) -> TextResult:
    """Render and tokenise; raises nothing."""
    try:
        return _run(job, text, date)
    except RequestError as error:
        return TextResult(number=job.number, error=error)
    except TextError as error:
        return TextResult(number=job.number, error=bad_request(str(error)))
    except BaseException as error:  # a tokenizer's panic is no Exception; one prompt's fault must not end the thread
        return TextResult(number=job.number, fault=error)


def _run(job: TextJob, text: Text, date: str) -> TextResult:
    result = _prompt(job, text, date)
    if job.keep_tokens:
        result = replace(result, token_ids=result.token_ids[-job.keep_tokens * TOKEN_BYTES :])
    if job.bad_words:
        result = replace(result, bad_words=_spellings(job.bad_words, text))
    if job.echo:
        detokenizer = text.detokenizer(())
        echo = detokenizer.push(unpack_tokens(result.token_ids))
        result = replace(result, echo=echo if job.is_continued else echo + detokenizer.flush())
    return result


def _prompt(job: TextJob, text: Text, date: str) -> TextResult:
    if job.input == "ids":
        return TextResult(number=job.number, token_ids=check_ids(job.body, job.vocab_size))
    if job.input == "text":
        source = _utf8(job.body)
        return TextResult(number=job.number, token_ids=pack_tokens(text.encode(source)), text=source)
    messages = unpack_messages(job.body)
    if job.is_prefix:
        token_ids = text.system_prefix(messages, date=date, args=job.template_args)
    else:
        tools = [] if job.tools is None else unpack_tools(job.tools)
        token_ids = text.encode_chat(messages, date=date, args=job.template_args, tools=tools, check_length=job.check_length)
    return TextResult(number=job.number, token_ids=pack_tokens(token_ids), messages=messages)


def _spellings(words: Sequence[str], text: Text) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands after a space and without one, as vLLM has it: two spellings in vocabularies whose tokens begin with spaces."""
    spelt = (tuple(text.encode_inside(space + word.lstrip(" "))) for word in words for space in ("", " "))
    return tuple(dict.fromkeys(ids for ids in spelt if ids))


def check_ids(body: bytes, vocab_size: int) -> PackedTokens:
    """Packed ids as they came, once each is known to be in the vocabulary.

    Raises:
        RequestError: the length is not a multiple of four, or an id is out of range.
    """
    if len(body) % 4:
        raise bad_request(f"a body of {len(body)} bytes is not packed u32 token ids")
    largest = max(unpack_tokens(body), default=0)
    if largest >= vocab_size:
        raise bad_request(f"token id {largest} is not in the vocabulary of {vocab_size}")
    return body


def unpack_messages(body: bytes) -> list[dict[str, Any]]:
    """A chat: an array of maps with string keys, each with a ``role`` and mostly strings as values.

    Raises:
        RequestError: not that, or beyond this module's bounds.
    """
    num_messages = _length(body, fixed=0x90, fixed_bits=0x0F, wide=0xDC)
    if num_messages is None:
        raise bad_request("the messages are not a msgpack array")
    if not 1 <= num_messages <= MAX_CHAT_MESSAGES:
        raise bad_request(f"a chat of {num_messages} messages; there must be 1 to {MAX_CHAT_MESSAGES}")
    budget = MAX_STRUCTURED_BYTES
    messages = []
    for raw in _decode(body, list[msgspec.Raw]):
        num_keys = _length(bytes(memoryview(raw)[:5]), fixed=0x80, fixed_bits=0x0F, wide=0xDE)
        if num_keys is None or num_keys > MAX_MESSAGE_KEYS:
            raise bad_request(f"each message must be a map of at most {MAX_MESSAGE_KEYS} keys")
        message: dict[str, Any] = {}
        for key, value in _decode(raw, dict[str, msgspec.Raw]).items():
            packed = bytes(value)
            if _is_structured(packed[0]):
                budget -= len(packed)
                if budget < 0:
                    raise bad_request(f"structured values of a chat may have {MAX_STRUCTURED_BYTES} bytes together")
            message[key] = _decode(packed, Any)
        if not isinstance(message.get("role"), str):
            raise bad_request("each message needs a role, a string")
        messages.append(message)
    if nests_deeper(messages, MAX_NESTING):
        raise bad_request(f"arrays and maps of the messages nest more than {MAX_NESTING} deep")
    return messages


def unpack_tools(body: bytes) -> list[dict[str, Any]]:
    """Tools: an array of maps with string keys. They are JSON to every template: what JSON has no form for is refused.

    Raises:
        RequestError: not that, or beyond this module's bounds.
    """
    if len(body) > MAX_STRUCTURED_BYTES:
        raise bad_request(f"the tools have {len(body)} bytes; at most {MAX_STRUCTURED_BYTES} are allowed")
    num_tools = _length(body, fixed=0x90, fixed_bits=0x0F, wide=0xDC)
    if num_tools is None or not 1 <= num_tools <= MAX_TOOLS:
        raise bad_request(f"the tools are not a msgpack array of 1 to {MAX_TOOLS} maps")
    tools: list[dict[str, Any]] = _decode(body, list[dict[str, Any]])
    if nests_deeper(tools, MAX_NESTING):
        raise bad_request(f"arrays and maps of the tools nest more than {MAX_NESTING} deep")
    if not _is_json(tools):
        raise bad_request("the tools hold bytes, an extension type or a key that is no string; they must be what JSON has a form for")
    return tools


def _is_json(value: Any) -> bool:
    """Of a value whose nesting is bounded."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(child) for key, child in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def _utf8(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the text is not UTF-8: {error.reason} at byte {error.start}") from None


def _decode(data: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the messages or tools are not what they should be: {error!s:.200}") from None


def _length(packed: bytes, *, fixed: int, fixed_bits: int, wide: int) -> int | None:
    """The length that a msgpack array's or map's header states; None if it is something else."""
    first = packed[0] if packed else 0
    if first & ~fixed_bits == fixed:
        return first & fixed_bits
    if first == wide:
        return int.from_bytes(packed[1:3], "big")
    if first == wide + 1:
        return int.from_bytes(packed[1:5], "big")
    return None


def _is_structured(first: int) -> bool:
    """Whether a msgpack value that begins so is an array, a map or an extension."""
    return 0x80 <= first <= 0x9F or first in {0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8} or 0xDC <= first <= 0xDF
