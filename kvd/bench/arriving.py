"""The scenario ``arriving``: streams decode while long prompts arrive one after another. How long do the streams wait for their next tokens, and the prompts for their first?"""

from __future__ import annotations

import asyncio
import statistics
from itertools import pairwise

from kvd.bench import prompts
from kvd.bench.asking import Setting, median, short_warnings, warm_warnings
from kvd.bench.measuring import Answer, Ask, BenchError, Measured, Server
from kvd.bench.ratios import percentile

_QUIET_S = 0.5
"""Between two prompts, and before the first."""

Span = tuple[float, float]


async def arriving(server: Server, setting: Setting) -> Measured:
    """Gaps between a stream's pieces that touch the time from a prompt's arrival to its first token, all streams and prompts together.

    A stream whose answer is over asks at once for another one; the wait for its first token is no gap. Streams draw at temperature 1 by seeds.
    """
    point = setting.point
    begun = [asyncio.Event() for _ in range(point.concurrency)]
    asks: list[Ask] = []
    is_over = False

    async def stream(number: int) -> list[Answer]:
        answers: list[Answer] = []
        while not is_over:
            text = prompts.story(f"{setting.seed}/{number}/{len(answers)}")
            answers.append(await server.ask(Ask(prompts.alone(text), point.output_tokens, seed=number, began=begun[number])))
        return answers

    async def arrivals() -> list[Answer]:
        nonlocal is_over
        for each in begun:
            await each.wait()
        answers = []
        for number in range(point.requests):
            await asyncio.sleep(_QUIET_S)
            asks.append(ask := Ask(prompts.chat(setting.system(number), prompts.question(f"{setting.seed}/{number}", 0)), 1))
            answers.append(await server.ask(ask))
        is_over = True
        return answers

    try:
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(stream(number)) for number in range(point.concurrency)]
            prompts_task = group.create_task(arrivals())
    except* BenchError as errors:
        raise errors.exceptions[0] from None
    long_answers = prompts_task.result()
    answers = [each for task in streams for each in task.result()]
    spans = [(each.asked_s, each.asked_s + each.ttft_s) for each in long_answers]
    within, outside = _split(answers, spans)
    if not within:
        raise BenchError("no stream ran while a prompt arrived: the target serves fewer requests at once, or does not stream")
    seconds = sum(end_s - begin_s for begin_s, end_s in spans)
    metrics = {
        "gap_p50_s": statistics.median(within),
        "gap_p99_s": percentile(within, 99),
        "gap_max_s": max(within),
        "long_ttft_s": median(each.ttft_s for each in long_answers),
        "beside_tokens_per_s": sum(answer.tokens_within(*span) for answer in answers for span in spans) / seconds,
    }
    if outside:
        metrics["quiet_gap_p99_s"] = percentile(outside, 99)
    stream_asks = [Ask([], point.output_tokens)] * len(answers)
    warnings = warm_warnings(long_answers) + short_warnings([*asks, *stream_asks], [*long_answers, *answers])
    return Measured(metrics, [*long_answers, *answers], warnings)


def _split(answers: list[Answer], spans: list[Span]) -> tuple[list[float], list[float]]:
    """Gaps that touch a span, and the others."""
    within: list[float] = []
    outside: list[float] = []
    for answer in answers:
        for begin_s, end_s in pairwise(answer.arrivals):
            touches = any(begin_s < span_end_s and end_s > span_begin_s for span_begin_s, span_end_s in spans)
            (within if touches else outside).append(end_s - begin_s)
    return within, outside
