"""The scenario ``trace``: requests of a recorded trace at their times, with its lengths and its shared prefixes.

The format is that of the Mooncake traces (FAST '25): a JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``,
the chained identities of the prompt's blocks of 512 tokens. A trace has no text: each block gets sentences drawn by its id and by the
place in the plan: no block is known from an earlier replay.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.bench import prompts
from kvd.bench.asking import Setting, coldest, short_warnings, warm_warnings
from kvd.bench.measuring import Answer, Ask, BenchError, Measured, Server
from kvd.bench.ratios import percentile

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace: seconds after its first request, the ids of its full blocks, the tokens after them, the answer's tokens."""

    at_s: float
    block_ids: tuple[int, ...]
    rest_tokens: int
    output_tokens: int


def read_trace(path: Path, limit: int) -> list[TraceRequest]:
    """The first ``limit`` requests of a JSONL file, gzipped or not.

    Raises:
        BenchError: it can't be read, or a line is none of a trace.
    """
    found: list[TraceRequest] = []
    number, first_ms = 0, None
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007  the error names it
                if len(found) == limit:
                    break
                entry = json.loads(line)
                length = int(entry["input_length"])
                first_ms = float(entry["timestamp"]) if first_ms is None else first_ms
                found.append(
                    TraceRequest(
                        (float(entry["timestamp"]) - first_ms) / 1000,
                        tuple(map(int, entry["hash_ids"][: length // BLOCK_TOKENS])),
                        length % BLOCK_TOKENS,
                        int(entry["output_length"]),
                    )
                )
    except (OSError, EOFError) as error:
        raise BenchError(f"the trace {path} can't be read: {error}", kind="usage") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{path}, line {number}: no request of a trace ({type(error).__name__}: {error})", kind="usage") from error
    if not found:
        raise BenchError(f"the trace {path} is empty", kind="usage")
    return found


def best_hit_rate(requests: Sequence[TraceRequest]) -> float:
    """What a cache without bounds would find of the prompts' tokens."""
    seen: set[int] = set()
    found = asked = 0
    for request in requests:
        found += BLOCK_TOKENS * sum(block in seen for block in request.block_ids)
        asked += BLOCK_TOKENS * len(request.block_ids) + request.rest_tokens
        seen.update(request.block_ids)
    return found / asked


def ask_of(request: TraceRequest, number: int, setting: Setting) -> Ask:
    """A request's text, every length times ``length_scale``; what follows its full blocks is its own."""
    sentences_a_token = setting.point.length_scale / setting.sizing.sentence_tokens
    per_block = max(1, round(BLOCK_TOKENS * sentences_a_token))
    system = prompts.joined([prompts.block(setting.seed, block_id, per_block) for block_id in request.block_ids])
    user = prompts.question(f"{setting.seed}/{number}", max(1, round(request.rest_tokens * sentences_a_token)))
    return Ask(
        prompts.chat(system, user) if system else prompts.alone(user), max(1, round(request.output_tokens * setting.point.length_scale))
    )


async def replay(server: Server, setting: Setting) -> Measured:
    """Each request at its time, whatever the ones before it do. ``late_s`` is how late the driver itself was, its 99th percentile."""
    point = setting.point
    requests = read_trace(Path(point.trace), point.requests)
    asks = [ask_of(request, number, setting) for number, request in enumerate(requests)]
    began_s = time.perf_counter() + 0.05
    lateness: list[float] = []

    async def one(request: TraceRequest, ask: Ask) -> Answer:
        due_s = began_s + request.at_s * point.time_scale
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        lateness.append(max(0.0, time.perf_counter() - due_s))
        return await server.ask(ask)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request, ask)) for request, ask in zip(requests, asks, strict=True)]
    except* BenchError as errors:
        raise errors.exceptions[0] from None
    answers = [task.result() for task in tasks]
    times = [each.ttft_s for each in answers]
    wall_s = max(each.ended_s for each in answers) - min(each.asked_s for each in answers)
    known = [each for each in answers if each.cached_tokens is not None]
    metrics = {
        "ttft_s": statistics.median(times),
        "ttft_p99_s": percentile(times, 99),
        "output_tokens_per_s": sum(each.completion_tokens for each in answers) / wall_s,
        "late_s": percentile(lateness, 99),
    }
    if known:
        metrics["hit_rate"] = sum(each.cached_tokens or 0 for each in known) / sum(each.prompt_tokens for each in known)
    return Measured(metrics, answers, warm_warnings(_first_of_each(requests, answers)) + short_warnings(asks, answers))


def _first_of_each(requests: Sequence[TraceRequest], answers: Sequence[Answer]) -> list[Answer]:
    """Of all requests that begin with the same block the one that found least: somebody must have computed it. Those without a block are each their own."""
    groups: dict[tuple[int, ...] | int, list[Answer]] = {}
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        groups.setdefault(request.block_ids[:1] or number, []).append(answer)
    return [coldest(group) for group in groups.values()]
