"""The forms of answers: whole ones as plain data, pieces of streams as bytes.

A stream's piece is put together from bytes that were made once for the request: what a token costs here is paid by every token of every stream.
"""

from __future__ import annotations

import codecs
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from kvd_client.protocol.messages import TokenLogprob
from kvd_client.results import Choice, Chunk, Completion, PromptEcho

from kvd.gateway.token_texts import TokenTexts, chat_text, completion_text

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""
DONE = b"data: [DONE]\n\n"
_NO_PROMPT = PromptEcho()

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every answer and every piece of a stream begins with."""

    id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens of all prompts together. ``cached_tokens`` were found in the prefix cache; where tokens were proposed ahead, how many became output."""
    prompt = sum(each.usage.prompt_tokens for each in completions)
    completion = sum(each.usage.completion_tokens for each in completions)
    cached = sum(each.usage.cached_tokens for each in completions)
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    drafted = sum(each.usage.drafted_tokens or 0 for each in completions)
    if drafted:
        accepted = sum(each.usage.accepted_tokens or 0 for each in completions)
        told["completion_tokens_details"] = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return told


def extension(completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """What kvd says besides, of each prompt: where cached tokens came from, times within the daemon, the seed."""
    return [
        {
            "restored_tokens": each.usage.restored_tokens,
            "recomputed_tokens": each.usage.recomputed_tokens,
            "queue_ms": each.timings.queue_ms,
            "ttft_ms": each.timings.ttft_ms,
            "total_ms": each.timings.total_ms,
            "seed": each.seed,
            "choices": [_choice_usage(choice) for choice in each.choices],
        }
        for each in completions
    ]


def _choice_usage(choice: Choice) -> dict[str, Any]:
    told: dict[str, Any] = {"completion_tokens": len(choice.token_ids)}
    for name in ("cumulative_logprob", "score"):
        if (value := getattr(choice, name)) is not None:
            told[name] = value
    return told


def without_output(completion: Completion) -> Completion:
    """The answer to a request that wanted its prompt scored and nothing generated."""
    choices = tuple(Choice(choice.index, "", (), "length") for choice in completion.choices)
    usage = msgspec.structs.replace(completion.usage, completion_tokens=0)
    return replace(completion, choices=choices, usage=usage)


def prompt_logprobs(prompt: PromptEcho | None, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """VLLM's form: nothing for the first token, then for each a map by token id. The rank is told of those among the most likely."""

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": max(logprob, _LEAST_LOGPROB), "rank": rank, "decoded_token": chat_text(texts.bytes_of(token_id))}

    told: list[dict[str, Any] | None] = [None]
    for each in prompt.logprobs if prompt is not None else ():
        top = {str(token_id): entry(token_id, logprob, place + 1) for place, (token_id, logprob) in enumerate(each.top)}
        told.append({str(each.token_id): entry(each.token_id, each.logprob, None)} | top)
    return told


class ChatForm:
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl-"
    piece_kind = "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, *, logprobs: bool, prompt_logprobs: bool = False) -> None:
        self._texts = texts
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def whole(self, head: Head, completions: Sequence[Completion]) -> bytes:
        """The answer to a request that is no stream."""
        choices = [self._choice(choice) for completion in completions for choice in completion.choices]
        fields = head.fields("chat.completion")
        if self._prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(completions[0].prompt, self._texts)
        return _whole(fields, choices, completions)

    def begin(self, number: int, prompt: PromptEcho | None) -> None:
        """A prompt's stream begins."""

    def first_piece(self, choice: int) -> bytes:  # noqa: ARG002  the other form counts by choice
        """What a choice's stream begins with, between its index and its end."""
        return b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'

    def piece(self, choice: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str | None) -> bytes:  # noqa: ARG002  the other form counts by choice
        """A choice's further text, between its index and its end."""
        delta = b'{"content":' + _encode(text) + b"}" if text else b"{}"
        entries = _encode(self._entries(logprobs)) if self._logprobs and logprobs else b"null"
        return b',"delta":' + delta + b',"logprobs":' + entries + b',"finish_reason":' + _reason(finish_reason) + b"}]"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._entries(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _entries(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(each.token_id, each.logprob),
                    "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in each.top],
                }
                for each in logprobs
            ]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._texts.bytes_of(token_id)
        return {"token": chat_text(data), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(data)}


class _Offsets:
    """Where tokens begin in a text, in characters: one that several tokens share counts with the last of them."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._num_chars = 0

    def pass_by(self, token: bytes) -> int:
        """Where the text's next token begins."""
        offset = self._num_chars
        self._num_chars += len(self._decode(token))
        return offset


class CompletionForm:
    """``/v1/completions``."""

    id_prefix = "cmpl-"
    piece_kind = "text_completion"

    def __init__(self, texts: TokenTexts, *, logprobs: bool, num_choices: int, echo: bool = False, prompt_logprobs: bool = False) -> None:
        """``num_choices``: of each prompt; the choices of several prompts are numbered on. ``echo``: each text begins with its prompt."""
        self._texts = texts
        self._logprobs = logprobs
        self._echo = echo
        self._prompt_logprobs = prompt_logprobs
        self._prompts: dict[int, PromptEcho] = {}
        """By number, where they are to be echoed in streams."""
        self._num_choices = num_choices
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)
        """By choice."""

    def whole(self, head: Head, completions: Sequence[Completion]) -> bytes:
        """The answer to a request that is no stream."""
        choices = [
            self._choice(number * self._num_choices + choice.index, choice, completion.prompt)
            for number, completion in enumerate(completions)
            for choice in completion.choices
        ]
        return _whole(head.fields("text_completion"), choices, completions)

    def _choice(self, index: int, choice: Choice, prompt: PromptEcho | None) -> dict[str, Any]:
        echoed = prompt if self._echo and prompt is not None else PromptEcho()
        told: dict[str, Any] = {
            "index": index,
            "text": echoed.text + choice.text,
            "logprobs": self._entries(index, choice.logprobs, echoed) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if self._prompt_logprobs:
            told["prompt_logprobs"] = prompt_logprobs(prompt, self._texts)
        return told

    def begin(self, number: int, prompt: PromptEcho | None) -> None:
        """A prompt's stream begins."""
        if self._echo and prompt is not None:
            self._prompts[number] = prompt

    def first_piece(self, choice: int) -> bytes:
        """A completion's stream begins with its text, or with that of its prompt."""
        prompt = self._prompts.get(choice // self._num_choices)
        if prompt is None:
            return b""
        entries = _encode(self._entries(choice, (), prompt)) if self._logprobs else b"null"
        return b',"text":' + _encode(prompt.text) + b',"logprobs":' + entries + b',"finish_reason":null}]'

    def piece(self, choice: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str | None) -> bytes:
        """A choice's further text, between its index and its end."""
        entries = _encode(self._entries(choice, logprobs)) if self._logprobs and logprobs else b"null"
        return b',"text":' + _encode(text) + b',"logprobs":' + entries + b',"finish_reason":' + _reason(finish_reason) + b"}]"

    def _entries(self, choice: int, logprobs: Sequence[TokenLogprob], echoed: PromptEcho = _NO_PROMPT) -> dict[str, Any]:
        """Of the prompt where it is echoed, whose first token nothing precedes, and of a choice's further tokens."""
        told: list[TokenLogprob | None] = [None] if echoed.token_ids else []
        told += [*echoed.logprobs, *logprobs]
        data = [self._texts.bytes_of(echoed.token_ids[0] if each is None else each.token_id) for each in told]
        tokens = [completion_text(each) for each in data]
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else max(each.logprob, _LEAST_LOGPROB) for each in told],
            "top_logprobs": [None if each is None else self._top(each, token) for each, token in zip(told, tokens, strict=True)],
            "text_offset": [self._offsets[choice].pass_by(each) for each in data],
        }

    def _top(self, each: TokenLogprob, token: str) -> dict[str, float]:
        """By text, the likelier of two that are spelt alike; the sampled token is always among them."""
        top: dict[str, float] = {}
        for token_id, logprob in each.top:
            top.setdefault(completion_text(self._texts.bytes_of(token_id)), max(logprob, _LEAST_LOGPROB))
        top.setdefault(token, max(each.logprob, _LEAST_LOGPROB))
        return top


Form = ChatForm | CompletionForm


class Pieces:
    """The pieces of one request's stream, ready to be sent."""

    def __init__(self, form: Form, head: Head, *, with_usage: bool) -> None:
        self._form = form
        encoded = _encode(head.fields(form.piece_kind))
        self._start = b"data: " + encoded[:-1] + b',"choices":['
        self._end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._with_usage = with_usage
        self._begun: dict[int, bytes] = {}
        """By choice that has begun: what its pieces start with."""

    def begin(self, number: int, prompt: PromptEcho | None) -> None:
        """The stream of a prompt begins; what was to be told of it."""
        self._form.begin(number, prompt)

    def of(self, chunks: Sequence[Chunk], first_choice: int = 0) -> bytes:
        """What has come of one prompt's choices as one piece each; ``first_choice`` is the number of the prompt's first."""
        if len(chunks) == 1:
            (chunk,) = chunks
            return self._piece(first_choice + chunk.choice, chunk.text, chunk.logprobs, chunk.finish_reason)
        by_choice: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            by_choice.setdefault(chunk.choice, []).append(chunk)
        return b"".join(
            self._piece(
                first_choice + choice,
                "".join([chunk.text for chunk in own]),
                [each for chunk in own for each in chunk.logprobs],
                own[-1].finish_reason,
            )
            for choice, own in by_choice.items()
        )

    def end(self, completions: Sequence[Completion]) -> bytes:
        """After all choices: the usage if it was asked for, and the end of the stream."""
        if not self._with_usage:
            return DONE
        facts = _encode({"usage": usage(completions), "kvd": extension(completions)})
        return self._start + b"]," + facts[1:] + b"\n\n" + DONE

    def _piece(self, choice: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str | None) -> bytes:
        start = self._begun.get(choice)
        first = b""
        if start is None:
            start = self._begun[choice] = self._start + b'{"index":%d' % choice
            if opening := self._form.first_piece(choice):
                first = start + opening + self._end
        if not text and not logprobs and finish_reason is None:
            return first  # an unfinished character, or what may become a stop string
        return first + start + self._form.piece(choice, text, logprobs, finish_reason) + self._end


def _whole(fields: dict[str, Any], choices: list[dict[str, Any]], completions: Sequence[Completion]) -> bytes:
    return _encode({**fields, "choices": choices, "usage": usage(completions), "kvd": extension(completions)})


def _reason(finish_reason: str | None) -> bytes:
    return b"null" if finish_reason is None else b'"' + finish_reason.encode() + b'"'
