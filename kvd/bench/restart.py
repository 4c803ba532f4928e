"""The scenario ``restart``: a server that knows a system prompt is killed with SIGKILL and started again, and a user asks a new question."""

from __future__ import annotations

import asyncio

from kvd.bench import prompts
from kvd.bench.asking import Setting
from kvd.bench.launching import Launched
from kvd.bench.measuring import Ask, Measured, Server


async def restart(server: Server, setting: Setting, launched: Launched, *, settle_s: float) -> Measured:
    """Figures: exec to ready and to the first token, the first question's TTFT and how many of its tokens were reused, and a hit's TTFT before the kill.

    The prompt is pinned where the target can pin. ``settle_s`` is the time that a target gets to write by itself what it wants to keep.
    """
    point, system = setting.point, setting.system()

    def ask(name: str) -> Ask:
        return Ask(prompts.chat(system, prompts.question(f"{setting.seed}/{name}", 1)), point.output_tokens)

    await server.pin("kvd-bench.restart", prompts.chat(system, "")[:1])
    before = [await server.ask(ask(f"before {number}")) for number in range(max(2, point.requests))]
    await asyncio.sleep(settle_s)
    launched.kill()
    ready_s = await launched.start(server)
    answers = [await server.ask(ask(f"after {number}")) for number in range(2)]
    first = answers[0]
    metrics = {
        "ready_s": ready_s,
        "first_token_s": first.asked_s + first.ttft_s - launched.began_s,
        "restored_ttft_s": first.ttft_s,
        "before_kill_ttft_s": min(each.ttft_s for each in before[1:]),
    }
    if first.cached_tokens is not None:
        metrics["reused_tokens"] = float(first.cached_tokens)
    return Measured(metrics, [*before, *answers])
