"""The scenarios ``repetitive`` and ``random``: decoding where an answer repeats its prompt, and where nothing repeats. The first shows what speculation brings, the second what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvd.bench import prompts
from kvd.bench.asking import Setting, hit_rate, median, short_warnings, together, ttfts
from kvd.bench.measuring import Answer, Ask, Measured, Server

_PRIMER_TOKENS = 32
"""Of the answers before those that count: a target that learns what drafts cost has learned it, with as many streams."""
_LONGER = 1.5
"""How much longer than the answer the text is that it repeats: the answer must not come to its end."""


async def repetitive(server: Server, setting: Setting) -> Measured:
    """Greedy answers to tasks that repeat a text: word for word, with a word replaced, as a list, as a log that goes on."""
    sentences = math.ceil(_LONGER * setting.point.output_tokens / setting.sizing.sentence_tokens)
    return await _decoded(server, setting, lambda number: prompts.repetition(f"{setting.seed}/{number}", number, sentences), is_drawn=False)


async def random(server: Server, setting: Setting) -> Measured:
    """Stories, each drawn at temperature 1 by a seed of its own."""
    return await _decoded(server, setting, lambda number: prompts.story(f"{setting.seed}/{number}"), is_drawn=True)


async def _decoded(server: Server, setting: Setting, text: Callable[[int], str], *, is_drawn: bool) -> Measured:
    """Output tokens by time while every stream has an answer under way, so many at a time as the point says. The prompts have been asked before, so that hardly anything but decoding is left.

    Streams whose drafts are accepted end sooner than others beside them, and go on with the next answer. When there is none, fewer and fewer run: that would measure how unlike the answers are.
    """
    point = setting.point

    def asks(max_tokens: int) -> list[Ask]:
        numbers = range(point.requests)
        return [Ask(prompts.alone(text(number)), max_tokens, seed=number if is_drawn else None) for number in numbers]

    await together(server, asks(min(_PRIMER_TOKENS, point.output_tokens)), point.concurrency)
    answers, _ = await together(server, asked := asks(point.output_tokens), point.concurrency)
    return Measured(
        {
            "output_tokens_per_s": _rate_while_all_run(answers, point.concurrency),
            "ttft_s": ttfts(answers)["ttft_s"],
            "answer_s": median(times := [each.ended_s - each.asked_s for each in answers]),
            "answer_max_s": max(times),
            **_acceptance(answers),
            **hit_rate(answers),
        },
        answers,
        short_warnings(asked, answers),
    )


def _rate_while_all_run(answers: list[Answer], width: int) -> float:
    """Tokens a second from the first request until fewer than ``width`` answers are under way."""
    begin_s = min(each.asked_s for each in answers)
    end_s = sorted(each.ended_s for each in answers)[len(answers) - width]
    return sum(each.tokens_within(begin_s, end_s) for each in answers) / (end_s - begin_s)


def _acceptance(answers: list[Answer]) -> dict[str, float]:
    """Accepted over drafted tokens, and accepted over all tokens of the answers; nothing where nobody drafted."""
    drafted = sum(each.drafted_tokens or 0 for each in answers)
    accepted = sum(each.accepted_tokens or 0 for each in answers)
    return {"acceptance": accepted / drafted, "from_drafts": accepted / sum(each.completion_tokens for each in answers)} if drafted else {}
