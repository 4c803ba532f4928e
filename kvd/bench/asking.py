"""What scenarios are made of: a place in the plan, requests side by side, the figures of their answers, and what a reader must be told of them."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd.bench import prompts
from kvd.bench.measuring import Answer, Ask, BenchError, Server
from kvd.bench.plan import Point
from kvd.bench.prompts import Sizing
from kvd.bench.ratios import percentile


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a measurement stands: the point, a seed that no other measurement of the plan has, and how long sentences are."""

    point: Point
    seed: str
    sizing: Sizing

    def system(self, name: str | int = 0) -> str:
        """A system prompt of the point's length that only this measurement has."""
        return prompts.rules(f"{self.seed}/{name}", self.sizing.sentences(self.point.prompt_tokens))


async def together(server: Server, asks: Sequence[Ask], width: int) -> tuple[list[Answer], float]:
    """All requests in order, ``width`` at a time; the answers, and the seconds from the first request to the last answer."""
    gate = asyncio.Semaphore(width)

    async def one(ask: Ask) -> Answer:
        async with gate:
            return await server.ask(ask)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(ask)) for ask in asks]
    except* BenchError as errors:
        raise errors.exceptions[0] from None
    answers = [task.result() for task in tasks]
    return answers, max(each.ended_s for each in answers) - min(each.asked_s for each in answers)


def median(values: Iterable[float]) -> float:
    """Of at least one value, also of a generator."""
    return statistics.median(list(values))


def ttfts(answers: Sequence[Answer]) -> dict[str, float]:
    """Median and 99th percentile of the times to the first token."""
    times = [each.ttft_s for each in answers]
    return {"ttft_s": statistics.median(times), "ttft_p99_s": percentile(times, 99)}


def gaps(answers: Sequence[Answer]) -> dict[str, float]:
    """Median and 99th percentile of the times between the pieces of an answer."""
    found = [gap for each in answers for gap in each.gaps_s]
    return {"gap_p50_s": statistics.median(found), "gap_p99_s": percentile(found, 99)} if found else {}


def hit_rate(answers: Sequence[Answer]) -> dict[str, float]:
    """Cached over all prompt tokens; nothing where the target doesn't tell."""
    known = [each for each in answers if each.cached_tokens is not None]
    asked = sum(each.prompt_tokens for each in known)
    return {"hit_rate": sum(each.cached_tokens or 0 for each in known) / asked} if asked else {}


def coldest(answers: Sequence[Answer]) -> Answer:
    """Of requests on a prefix that nobody had seen: the one that had to compute it, whichever came first."""
    return min(answers, key=lambda each: each.cached_tokens or 0)


def warm_warnings(answers: Sequence[Answer]) -> list[str]:
    """A prompt that was meant to be new and was not: of 64 tokens the template may account."""
    worst = max((each.cached_tokens or 0 for each in answers), default=0)
    return [f"{worst} tokens of a prompt that should be new were cached: give another --seed"] if worst > 64 else []


def short_warnings(asks: Sequence[Ask], answers: Sequence[Answer]) -> list[str]:
    """Answers that ended early: their rates are of less work than was asked for. All asks have the same length where they are in another order than the answers."""
    short = sum(answer.completion_tokens < ask.max_tokens * ask.n for ask, answer in zip(asks, answers, strict=True))
    return [f"{short} of {len(answers)} answers were shorter than asked: the target ignores ignore_eos"] if short else []
