"""What the fake executor answers to a request, computed by a lone runner a token at a time: no scheduler, cache, drafts, store or socket.

It covers what is no constraint and no beam search.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any

from request_drawing import Ask
from request_rules import Facts, constraint_of, stop_ids_of

from kvd.executor.fake import FakeRunner
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow
from kvd.types import BlockId, SamplingParams, TokenLogprobs, pack_tokens


@dataclass(frozen=True, slots=True)
class PlainChoice:
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...]
    text: str


def prompt_tokens(ask: Ask, facts: Facts) -> list[int]:
    """Bytes are tokens; a chat is a line for each message, after one for the tools."""
    if isinstance(ask.prompt, str):
        token_ids = list(ask.prompt.encode())
    elif isinstance(ask.prompt[0], int):
        token_ids = list(ask.prompt)
    else:
        lines = [f"{message['role']}: {message['content']}\n" for message in ask.prompt]
        if ask.options.get("tools"):
            lines.insert(0, f"tools: {json.dumps(list(ask.options['tools']))}\n")
        token_ids = list("".join([*lines, "assistant: "]).encode())
    return truncated(ask, token_ids, facts)


def truncated(ask: Ask, token_ids: list[int], facts: Facts) -> list[int]:
    keep = ask.options.get("truncate_prompt", 0)
    if keep == -1:
        keep = max(1, facts.max_model_len - ask.options["max_tokens"])
    return token_ids[-keep:] if keep else token_ids


def is_plain(ask: Ask) -> bool:
    options = ask.options
    return constraint_of(ask) is None and "beam_width" not in options and not _is_drawn_by_rejection(options)


def _is_drawn_by_rejection(options: dict[str, Any]) -> bool:
    return options.get("draft_acceptance") == "rejection"


def plain_answer(ask: Ask, prompt_ids: list[int], seed: int, digest: bytes, facts: Facts) -> list[PlainChoice]:
    """The choices, the best first where the best are chosen."""
    options = ask.options
    n, num_sampled = options.get("n", 1), max(options.get("n", 1), options.get("best_of", 0))
    choices = [_choice(ask, prompt_ids, seed, digest, choice, facts) for choice in range(num_sampled)]
    if num_sampled > n:
        choices.sort(key=lambda each: -sum(entry.logprob for entry in each.logprobs))
    return choices[:n]


def _choice(ask: Ask, prompt_ids: list[int], seed: int, digest: bytes, choice: int, facts: Facts) -> PlainChoice:
    options = ask.options
    most, fewest = options["max_tokens"], options.get("min_tokens", 0)
    stop_ids = stop_ids_of(ask, facts)
    runner = FakeRunner((len(prompt_ids) + most) // 16 + 1, 16, max_rows=1)
    if digest:
        runner.install_adapter(digest, None)
    started = StartedRow(
        row=0,
        token_ids=pack_tokens(prompt_ids),
        num_prompt_tokens=len(prompt_ids),
        num_computed=0,
        num_tokens=len(prompt_ids),
        block_ids=tuple(BlockId(index) for index in range(runner.num_blocks)),
        sampling=_sampling(ask, seed),
        choice=choice,
        banned_token_ids=tuple(sorted(stop_ids)) if fewest else (),
        min_tokens=fewest,
        adapter=digest,
    )
    output = runner.execute(SchedulerOutput(0, (started,), ContinuedRows()))
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    text, finish_reason = "", "length"
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(prompt_ids))  # a character that it leaves unfinished goes on in the output
    while True:
        if not output.token_ids:
            raise LookupError("no token may follow")
        (token_id,) = output.token_ids
        token_ids.append(token_id)
        logprobs += [entry for entry in output.logprobs or () if entry is not None]
        if token_id in stop_ids:
            finish_reason = "stop"
            break
        for char in decoder.decode(bytes([token_id]) if token_id < 256 else b""):
            text += char
            ending = [stop for stop in options.get("stop", ()) if text.endswith(stop)]
            if ending and len(token_ids) > fewest:
                text = text if options.get("include_stop") else text[: len(text) - max(map(len, ending))]
                return PlainChoice(tuple(token_ids), "stop", tuple(logprobs), text)
        if len(token_ids) == most:
            break
        output = runner.execute(SchedulerOutput(len(token_ids), (), ContinuedRows([0], [1], [0, 0], [])))
    return PlainChoice(tuple(token_ids), finish_reason, tuple(logprobs), text + decoder.decode(b"", final=True))


def _sampling(ask: Ask, seed: int) -> SamplingParams:
    options = ask.options
    words = (space + word.lstrip(" ") for word in options.get("bad_words", ()) for space in ("", " "))
    num_logprobs = options.get("logprobs")
    if options.get("best_of", 0) > options.get("n", 1) and num_logprobs is None:
        num_logprobs = 0
    return SamplingParams(
        temperature=options.get("temperature", 1.0),
        seed=seed,
        num_logprobs=num_logprobs,
        logit_bias=tuple(options.get("logit_bias", {}).items()),
        allowed_token_ids=tuple(options.get("allowed_token_ids", ())),
        banned_token_ids=tuple(options.get("banned_token_ids", ())),
        bad_words=tuple(dict.fromkeys(tuple(word.encode()) for word in words)),
    )
