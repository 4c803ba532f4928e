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
    """Output tokens over the time of all answers, so many at a time as the point says. The prompts have been asked before, so that hardly anything but decoding is left.

    Streams whose drafts are accepted end sooner than others beside them, and go on with the next answer: with one answer each, the time would be that of the slowest alone.
    """
    point = setting.point

    def asks(max_tokens: int) -> list[Ask]:
        numbers = range(point.requests)
        return [Ask(prompts.alone(text(number)), max_tokens, seed=number if is_drawn else None) for number in numbers]

    await together(server, asks(min(_PRIMER_TOKENS, point.output_tokens)), point.concurrency)
    answers, wall_s = await together(server, asked := asks(point.output_tokens), point.concurrency)
    return Measured(
        {
            "output_tokens_per_s": sum(each.completion_tokens for each in answers) / wall_s,
            "ttft_s": ttfts(answers)["ttft_s"],
            "answer_s": median(times := [each.ended_s - each.asked_s for each in answers]),
            "answer_max_s": max(times),
            **_acceptance(answers),
            **hit_rate(answers),
        },
        answers,
        short_warnings(asked, answers),
    )


def _acceptance(answers: list[Answer]) -> dict[str, float]:
    """Accepted over drafted tokens, and accepted over all tokens of the answers; nothing where nobody drafted."""
    drafted = sum(each.drafted_tokens or 0 for each in answers)
    accepted = sum(each.accepted_tokens or 0 for each in answers)
    return {"acceptance": accepted / drafted, "from_drafts": accepted / sum(each.completion_tokens for each in answers)} if drafted else {}
