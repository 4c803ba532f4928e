"""What is measured: points of a plan, each a scenario with its parameters, and the figures that each scenario gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from kvd.bench.measuring import BenchError


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure: its unit, and whether more of it is better."""

    unit: str
    is_rate: bool = True

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better ours is: above 1 is better, for rates and for times. Infinite against nothing at all, and 1 between two nothings."""
        ahead, behind = (ours, theirs) if self.is_rate else (theirs, ours)
        if ahead == behind:
            return 1.0
        return ahead / behind if behind else math.inf


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "prefill_tokens_per_s": Metric("tokens/s"),
        "decode_tokens_per_s": Metric("tokens/s"),
        "output_tokens_per_s": Metric("tokens/s"),
        "ttft_s": Metric("s", is_rate=False),
        "ttft_p99_s": Metric("s", is_rate=False),
        "cold_ttft_s": Metric("s", is_rate=False),
        "hit_ttft_s": Metric("s", is_rate=False),
        "long_ttft_s": Metric("s", is_rate=False),
        "second_turn_ttft_s": Metric("s", is_rate=False),
        "restored_ttft_s": Metric("s", is_rate=False),
        "before_kill_ttft_s": Metric("s", is_rate=False),
        "gap_p50_s": Metric("s", is_rate=False),
        "gap_p99_s": Metric("s", is_rate=False),
        "ready_s": Metric("s", is_rate=False),
        "first_token_s": Metric("s", is_rate=False),
        "hit_rate": Metric("of the prompt tokens"),
        "reused_tokens": Metric("tokens"),
        "peak_blocks": Metric("blocks", is_rate=False),
        "blocks_saved": Metric("of the blocks"),
        "peak_memory_gib": Metric("GiB", is_rate=False),
        "late_s": Metric("s", is_rate=False),
        "acceptance": Metric("of the drafted tokens"),
        "from_drafts": Metric("of the output tokens"),
        "answer_s": Metric("s", is_rate=False),
        "answer_max_s": Metric("s", is_rate=False),
        "gap_max_s": Metric("s", is_rate=False),
        "quiet_gap_p99_s": Metric("s", is_rate=False),
        "beside_tokens_per_s": Metric("tokens/s"),
    }
)


@dataclass(frozen=True, slots=True)
class Point:
    """One scenario at one setting. Lengths are in tokens; those that a scenario has no use for say nothing.

    Attributes:
        prompt_tokens: of a prompt, or of the prefix that prompts share.
        output_tokens: of each answer.
        concurrency: requests under way at once; for ``trace`` no bound.
        requests: in all (``multi-turn``: users are ``concurrency``; ``arriving``: long prompts, beside ``concurrency`` streams).
        turns: of each conversation.
        primed: whether one earlier request has brought the shared prefix into the cache.
        n: answers of each request.
        trace, time_scale, length_scale: the file, what its times are multiplied by, what its lengths are.
    """

    scenario: str
    prompt_tokens: int = 0
    output_tokens: int = 1
    concurrency: int = 1
    requests: int = 1
    turns: int = 1
    primed: bool = True
    n: int = 1
    trace: str = ""
    time_scale: float = 1.0
    length_scale: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """The parameters that differ from the defaults, by name."""
        defaults = Point(self.scenario)
        return {name: value for name, value in asdict(self).items() if name == "scenario" or value != getattr(defaults, name)}

    @property
    def key(self) -> str:
        """A name that no other setting has."""
        return " ".join(str(value) if name == "scenario" else f"{name}={value}" for name, value in self.as_dict().items())


HEADLINE: Mapping[str, str] = MappingProxyType(
    {
        "prefill": "prefill_tokens_per_s",
        "decode": "decode_tokens_per_s",
        "shared-prefix": "output_tokens_per_s",
        "prefix-hit": "hit_ttft_s",
        "mixed": "output_tokens_per_s",
        "multi-turn": "second_turn_ttft_s",
        "repetitive": "output_tokens_per_s",
        "random": "output_tokens_per_s",
        "arriving": "gap_p99_s",
        "restart": "first_token_s",
        "trace": "ttft_s",
    }
)
"""Every scenario, and the figure that it is run for."""


ANSWERS_A_STREAM = 4
"""Of ``repetitive``, which has four kinds of tasks, and ``random``: one after another, so that all streams are busy for most of the time."""


def expand(
    scenarios: Sequence[str],
    *,
    concurrency: Sequence[int],
    prompt_tokens: Sequence[int],
    prefix_tokens: Sequence[int],
    output_tokens: int,
    requests: int,
    turns: int,
    cold: bool,
    trace: str,
    time_scale: float,
    length_scale: float,
) -> list[Point]:
    """The points of a command line: each scenario over the settings that it has.

    Raises:
        BenchError: an unknown scenario, or ``trace`` without a file.
    """
    points: list[Point] = []
    for scenario in scenarios:
        match scenario:
            case "prefill":
                points += [Point(scenario, size, 1, width, max(width, 2)) for size in prompt_tokens for width in concurrency]
            case "decode":
                points += [Point(scenario, 0, output_tokens * 2, width, width) for width in concurrency]
            case "shared-prefix":
                points += [
                    Point(scenario, size, output_tokens, width, requests, primed=not cold)
                    for size in prefix_tokens
                    for width in concurrency
                ]
            case "prefix-hit":
                points += [Point(scenario, size, min(output_tokens, 16), 1, 4) for size in prefix_tokens]
            case "mixed":
                points += [
                    Point(scenario, size, output_tokens, width, max(requests, 2 * width)) for size in prompt_tokens for width in concurrency
                ]
            case "multi-turn":
                points += [Point(scenario, size, output_tokens, width, turns=turns) for size in prefix_tokens for width in concurrency]
            case "repetitive" | "random":
                points += [Point(scenario, 0, output_tokens * 2, width, width * ANSWERS_A_STREAM) for width in concurrency]
            case "arriving":
                points += [Point(scenario, size, output_tokens * 4, width, 3) for size in prompt_tokens for width in concurrency]
            case "restart":
                points += [Point(scenario, size, min(output_tokens, 16), 1, 3) for size in prefix_tokens]
            case "trace":
                if not trace:
                    raise BenchError("the scenario trace needs a file: --trace FILE", kind="usage")
                points.append(Point(scenario, requests=requests, trace=trace, time_scale=time_scale, length_scale=length_scale))
            case _:
                raise BenchError(f"there is no scenario {scenario!r}; there are {', '.join(HEADLINE)}", kind="usage")
    return points
