"""The scenarios: how each asks, and what its figures are. Every prompt is drawn by the place of its measurement in the plan, so all targets get the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from kvd.bench import prompts
from kvd.bench.arriving import arriving
from kvd.bench.asking import Setting, coldest, gaps, hit_rate, median, short_warnings, together, ttfts, warm_warnings
from kvd.bench.drafted import random, repetitive
from kvd.bench.measuring import Answer, Ask, BenchError, Measured, Server
from kvd.bench.prompts import Sizing

_LONG_OUTPUT_TOKENS = 16
_QUESTION_SENTENCES = 3


async def prefill(server: Server, setting: Setting) -> Measured:
    """Prompt tokens over the time until the last first token."""
    point = setting.point
    asks = [
        Ask(prompts.chat(setting.system(number), prompts.question(f"{setting.seed}/{number}", 0)), 1) for number in range(point.requests)
    ]
    if point.concurrency == 1:  # one after another: the rates of single prompts, of which the median is a figure
        answers = [await server.ask(ask) for ask in asks]
        rate = median(each.prompt_tokens / (each.ended_s - each.asked_s) for each in answers)
    else:
        answers, wall_s = await together(server, asks, point.concurrency)
        rate = sum(each.prompt_tokens for each in answers) / wall_s
    metrics = {"prefill_tokens_per_s": rate, "ttft_s": median(each.ttft_s for each in answers)}
    return Measured(metrics, answers, warm_warnings(answers) + short_warnings(asks, answers))


async def decode(server: Server, setting: Setting) -> Measured:
    """Tokens a second in the time after the last stream's first and before the first stream's last token."""
    point = setting.point
    asks = [Ask(prompts.alone(prompts.story(f"{setting.seed}/{number}")), point.output_tokens) for number in range(point.requests)]
    answers, _ = await together(server, asks, point.concurrency)
    if not all(each.arrivals for each in answers):
        raise BenchError("an answer came without any text: there is no moment in which all streams ran")
    begin_s, end_s = max(each.arrivals[0] for each in answers), min(each.arrivals[-1] for each in answers)
    if end_s <= begin_s:
        raise BenchError("no moment in which all streams ran: the answers are too short, or the target serves fewer requests at once")
    rate = sum(each.tokens_within(begin_s, end_s) for each in answers) / (end_s - begin_s)
    return Measured({"decode_tokens_per_s": rate, **gaps(answers)}, answers, short_warnings(asks, answers))


async def shared_prefix(server: Server, setting: Setting) -> Measured:
    """Output tokens over the whole time of requests that share a system prompt."""
    point, system = setting.point, setting.system()
    if point.primed:
        await server.ask(Ask(prompts.chat(system, prompts.question(f"{setting.seed}/primer", 1)), 2))
    asks = [
        Ask(prompts.chat(system, prompts.question(f"{setting.seed}/{number}", _QUESTION_SENTENCES)), point.output_tokens, point.n)
        for number in range(point.requests)
    ]
    answers, wall_s = await together(server, asks, point.concurrency)
    return Measured(
        {
            "output_tokens_per_s": sum(each.completion_tokens for each in answers) / wall_s,
            **ttfts(answers),
            **(gaps(answers) if point.n == 1 else {}),
            **hit_rate(answers),
        },
        answers,
        ([] if point.primed else warm_warnings([coldest(answers)])) + short_warnings(asks, answers),
    )


async def prefix_hit(server: Server, setting: Setting) -> Measured:
    """TTFT of a system prompt's first question, and the median of later ones."""
    point, system = setting.point, setting.system()
    asks = [
        Ask(prompts.chat(system, prompts.question(f"{setting.seed}/{number}", 1)), point.output_tokens) for number in range(point.requests)
    ]
    answers = [await server.ask(ask) for ask in asks]
    metrics = {"cold_ttft_s": answers[0].ttft_s, "hit_ttft_s": median(each.ttft_s for each in answers[1:])}
    return Measured(metrics | hit_rate(answers[1:]), answers, warm_warnings(answers[:1]) + short_warnings(asks, answers))


async def mixed(server: Server, setting: Setting) -> Measured:
    """Chats with a story each, and a long prompt after every third: what the long ones cost the others."""
    point = setting.point
    is_long = [number % 4 == 3 for number in range(point.requests)]
    asks = [
        Ask(prompts.chat(setting.system(number), prompts.question(f"{setting.seed}/{number}", 0)), _LONG_OUTPUT_TOKENS)
        if long
        else Ask(prompts.alone(prompts.story(f"{setting.seed}/{number}")), point.output_tokens)
        for number, long in enumerate(is_long)
    ]
    answers, wall_s = await together(server, asks, point.concurrency)
    short, long = ([each for each, is_one in zip(answers, is_long, strict=True) if is_one is wanted] for wanted in (False, True))
    long_ttft = {"long_ttft_s": median(each.ttft_s for each in long)} if long else {}
    return Measured(
        {
            "output_tokens_per_s": sum(each.completion_tokens for each in answers) / wall_s,
            **ttfts(short),
            **long_ttft,
            **gaps(short),
        },
        answers,
        warm_warnings(long) + short_warnings(asks, answers),
    )


async def multi_turn(server: Server, setting: Setting) -> Measured:
    """Conversations with a system prompt of their own; each turn holds the answers that came before."""
    point = setting.point
    by_turn: list[list[Answer]] = [[] for _ in range(point.turns)]
    asks: list[Ask] = []

    async def user(number: int) -> None:
        messages = [{"role": "system", "content": setting.system(number)}]
        for turn in range(point.turns):
            messages = [*messages, {"role": "user", "content": prompts.question(f"{setting.seed}/{number}/{turn}", 1)}]
            asks.append(ask := Ask(messages, point.output_tokens))
            answer = await server.ask(ask)
            messages = [*messages, {"role": "assistant", "content": answer.text}]
            by_turn[turn].append(answer)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(point.concurrency):
                group.create_task(user(number))
    except* BenchError as errors:
        raise errors.exceptions[0] from None
    answers = [each for turn in by_turn for each in turn]
    wall_s = max(each.ended_s for each in answers) - min(each.asked_s for each in answers)
    later = [each for turn in by_turn[1:] for each in turn]
    metrics = {
        "output_tokens_per_s": sum(each.completion_tokens for each in answers) / wall_s,
        "cold_ttft_s": median(each.ttft_s for each in by_turn[0]),
    }
    if later:
        metrics |= {"second_turn_ttft_s": median(each.ttft_s for each in by_turn[1]), **hit_rate(later)}
    return Measured(metrics, answers, warm_warnings(by_turn[0]) + short_warnings(asks, answers))


Scenario = Callable[[Server, Setting], Awaitable[Measured]]

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "prefill": prefill,
        "decode": decode,
        "shared-prefix": shared_prefix,
        "prefix-hit": prefix_hit,
        "mixed": mixed,
        "multi-turn": multi_turn,
        "repetitive": repetitive,
        "random": random,
        "arriving": arriving,
    }
)
"""Those that only ask; ``restart`` and ``trace`` are run by modules of their own."""


async def warm_up(server: Server, num_requests: int) -> None:
    """So that nothing is done for the first time while it is measured."""
    for number in range(num_requests):
        await server.ask(Ask(prompts.alone(prompts.story(f"warm-up {number}")), 16))


async def measure_sizing(server: Server) -> Sizing:
    """Ask for the tokens of a prompt with few and one with many sentences, and draw the line between them."""
    few, many = 2, 66
    counts = []
    for number in (few, many):
        answer = await server.ask(Ask(prompts.chat(prompts.rules(f"sizing {number}", number), prompts.question("sizing", 0)), 1))
        counts.append(answer.prompt_tokens)
    slope = (counts[1] - counts[0]) / (many - few)
    if slope <= 0:
        raise BenchError(f"the target counts {counts[1]} tokens for a prompt of {many} sentences and {counts[0]} for one of {few}")
    return Sizing(counts[0] - few * slope, slope)
