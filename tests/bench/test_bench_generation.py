"""Scenarios and page of the generation features, without a socket: drafts, streams beside arriving prompts, targets on one server."""

from __future__ import annotations

import asyncio
import itertools
from typing import ClassVar

import pytest
from held_time import run_in_held_time
from scripted_server import ScriptedServer

from kvd.bench.arriving import arriving
from kvd.bench.asking import Setting
from kvd.bench.comparing import all_comparisons, differing_answers
from kvd.bench.drafted import random, repetitive
from kvd.bench.generation_page import generation_page
from kvd.bench.measuring import BenchError
from kvd.bench.plan import Point
from kvd.bench.prompts import Sizing, repetition
from kvd.bench.results import Result
from kvd.bench.running import Entry, Progress, Runner, Target

SIZING = Sizing(50, 12)


def run(scenario, point, server):
    return run_in_held_time(scenario(server, Setting(point, "0/x", SIZING)))


# -------------------------------------------------------------------------------------------------------- scenarios


class Drafting(ScriptedServer):
    """Tells that it drafted four tokens for each answer, of which it accepted three."""

    async def ask(self, ask):
        answer = await super().ask(ask)
        answer.drafted_tokens, answer.accepted_tokens = 4, 3
        return answer


def test_acceptance_is_told_where_something_was_drafted():
    point = Point("repetitive", 0, 40, 2, 4)
    metrics = run(repetitive, point, Drafting()).metrics
    assert (metrics["acceptance"], metrics["from_drafts"]) == (0.75, 3 / 40)
    assert 0 < metrics["answer_s"] <= metrics["answer_max_s"]
    assert not {"acceptance", "from_drafts"} & run(repetitive, point, ScriptedServer()).metrics.keys()


def test_the_rate_is_that_of_the_time_in_which_all_streams_are_busy():
    class OneIsSlow(ScriptedServer):
        async def ask(self, ask):
            is_last = len(self.asked) == 9
            answer = await super().ask(ask)
            if is_last:
                await asyncio.sleep(0.5)
                answer.ended_s += 0.5
            return answer

    point = Point("repetitive", 0, 40, 2, 5)
    quick = run(repetitive, point, ScriptedServer()).metrics
    slow = run(repetitive, point, OneIsSlow()).metrics
    assert slow["answer_max_s"] > quick["answer_max_s"] + 0.4
    assert slow["output_tokens_per_s"] > 0.6 * quick["output_tokens_per_s"]


def test_only_what_is_known_is_timed():
    server = ScriptedServer(prompt_token_s=0.0002)
    measured = run(repetitive, Point("repetitive", 0, 40, 2, 4), server)
    assert measured.metrics["hit_rate"] == 1
    assert [ask.max_tokens for ask in server.asked] == [32] * 4 + [40] * 4
    assert [ask.messages for ask in server.asked[:4]] == [ask.messages for ask in server.asked[4:]]


@pytest.mark.parametrize(("scenario", "seeds"), [(repetitive, {None}), (random, {0, 1, 2, 3})], ids=["repetitive", "random"])
def test_what_repeats_is_greedy_and_what_does_not_is_drawn(scenario, seeds):
    server = ScriptedServer()
    run(scenario, Point("x", 0, 8, 1, 4), server)
    assert {ask.seed for ask in server.asked} == seeds


def test_a_repetition_has_four_kinds_whose_seeds_differ_from_the_first_word_on():
    texts = [repetition("0/a", kind, 6) for kind in range(4)]
    assert len({text.split(": ")[1].split("\n")[0] for text in texts}) == 4
    for kind, text in enumerate(texts):
        assert text.split()[0] != repetition("0/b", kind, 6).split()[0]
        assert len(repetition("0/a", kind, 12)) > 1.5 * len(text)


class Halting(ScriptedServer):
    """Decodes nothing while it computes a long prompt, as one that takes it in a single step."""

    def __init__(self, prompt_s):
        super().__init__(token_s=0.002)
        self.free = asyncio.Event()
        self.free.set()
        self.prompt_s = prompt_s

    async def ask(self, ask):
        if len(ask.messages) == 1:
            return await super().ask(ask)
        self.free.clear()
        await asyncio.sleep(self.prompt_s)
        self.free.set()
        answer = await super().ask(ask)
        answer.asked_s -= self.prompt_s
        return answer

    async def token(self):
        await self.free.wait()
        await super().token()


def test_gaps_are_those_that_touch_a_prompts_arrival():
    halting = run(arriving, Point("arriving", 600, 400, 3, 2), Halting(0.2)).metrics
    assert halting["gap_max_s"] >= 0.19
    assert halting["quiet_gap_p99_s"] < 0.15
    assert halting["long_ttft_s"] >= 0.19
    smooth = run(arriving, Point("arriving", 600, 400, 3, 2), ScriptedServer(token_s=0.002, prompt_token_s=0.0003)).metrics
    assert smooth["gap_p99_s"] < 0.15 < smooth["long_ttft_s"]
    assert smooth["beside_tokens_per_s"] > halting["beside_tokens_per_s"]


def test_prompts_arrive_when_all_streams_have_begun_and_streams_go_on_until_the_last_one():
    server = ScriptedServer(token_s=0.002, prompt_token_s=0.0001)
    measured = run(arriving, Point("arriving", 600, 20, 3, 2), server)
    long = [number for number, ask in enumerate(server.asked) if len(ask.messages) > 1]
    assert len(long) == 2
    assert long[0] >= 3
    assert len(server.asked) > 3 + 2  # answers were over while prompts arrived: others took their places
    assert len(measured.answers) == len(server.asked)


def test_a_server_that_does_not_stream_has_no_gaps():
    class Whole(ScriptedServer):
        async def ask(self, ask):
            answer = await super().ask(ask)
            del answer.arrivals[:-1], answer.pieces[:-1]
            return answer

    with pytest.raises(BenchError, match="does not stream"):
        run(arriving, Point("arriving", 100, 4, 1, 1), Whole())


# -------------------------------------------------------------------------------------------------------------- plan


class FakeLaunch:
    """Counts starts; one server at a time."""

    alive: ClassVar[list[str]] = []

    def __init__(self, name):
        self.name, self.starts, self.pid, self.visit, self.peak_start_bytes = name, 0, None, "", 1

    async def start(self, _server):
        assert FakeLaunch.alive == []
        FakeLaunch.alive.append(self.name)
        self.starts, self.pid = self.starts + 1, 1 << 30
        return 0.1

    def kill(self):
        self.pid = None
        FakeLaunch.alive[:] = [name for name in FakeLaunch.alive if name != self.name]


def test_targets_on_one_server_take_turns_on_it_and_others_have_their_own(monkeypatch):
    monkeypatch.setattr("kvd.bench.running.build", lambda: "123")
    monkeypatch.setattr("kvd.bench.results.build", lambda: "123")
    shared, alone = FakeLaunch("shared"), FakeLaunch("alone")
    targets = [
        Target("a", ScriptedServer(), "x", shared),
        Target("b", ScriptedServer(), "x", shared),
        Target("c", ScriptedServer(), "y", alone),
    ]
    entries = [Entry(Point("random", 0, 8, 1, 1)), Entry(Point("random", 0, 8, 2, 2))]
    said: list[str] = []
    runner = Runner(entries, targets, 2, Result.begun(0), warmup_requests=1, progress=Progress(said=said.append))
    result = asyncio.run(runner.run())
    assert [line.split(":")[0] for line in said if ": random" in line] == [*"ababcc", *"ccbaba"]
    assert (shared.starts, alone.starts) == (2, 2)
    warm = [[ask for ask in target.server.asked if ask.max_tokens == 16] for target in targets]
    assert [len(asks) for asks in warm] == [2, 2, 2]  # each anew after each start
    assert {(each.theirs, each.ours) for each in all_comparisons(result)} == {("a", "b"), ("a", "c")}


# -------------------------------------------------------------------------------------------------------------- page


def made(point, rates, *, is_same=True):
    texts = itertools.repeat(7) if is_same else itertools.count()
    result = Result(0, {"date": "2026-01-01", "machine": "a machine", "load_before": 0.1, "commit": "abc", "build": "123"})
    for name, values in rates.items():
        result.targets[name] = {"url": name, "version": f"{name} 1", "command": f"kvd serve --model /some/where/{name}"}
        crc = next(texts)
        for round_, metrics in enumerate(values):
            result.samples.append(
                {
                    "key": point.key,
                    "point": point.as_dict(),
                    "target": name,
                    "round": round_,
                    "repeat": 0,
                    "at_unix_s": 0.0,
                    "metrics": metrics,
                    "wall_s": 1.0,
                    "driver_cpu_s": 0.05,
                    "server_cpu_s": None,
                    "other_cores": None,
                    "resident_bytes": None,
                    "requests": [{"prompt_tokens": 9, "cached_tokens": 0, "text_crc32": crc}],
                    "warnings": [],
                }
            )
    return result


def rates(*values, **others):
    return [{"output_tokens_per_s": value, **others} for value in values]


def test_the_page_has_ratios_with_their_spread_and_acceptance():
    point = Point("repetitive", 0, 128, 8, 8)
    text = generation_page(
        made(point, {"off": rates(100, 100, answer_s=2.0, answer_max_s=3.0), "auto": rates(150, 170, acceptance=0.5, from_drafts=0.25)})
    )
    assert "| repetitive | 8 | auto | 160 (150 to 170) | 1.60 (1.50 to 1.70) | 0.5 (0.5 to 0.5) | 0.25 (0.25 to 0.25) | - | - |" in text
    assert "| repetitive | 8 | off | 100 (100 to 100) |  | - | - | 2 (2 to 2) | 3 (3 to 3) |" in text
    assert "## Streams beside" not in text
    assert "answered differently" not in text
    assert "/some/where" not in text


def test_the_page_says_when_the_machine_was_busy():
    result = made(Point("random", 0, 128, 1, 4), {"off": rates(100, 100)})
    assert "busy machine" not in generation_page(result)
    for sample in result.samples:
        sample["other_cores"] = 0.1
    assert "busy machine" not in generation_page(result)
    result.samples[0]["other_cores"] = 1.5
    assert "other processes had 0.8 cores" in generation_page(result)


def test_modes_that_answer_differently_are_said():
    point = Point("random", 0, 128, 1, 4)
    result = made(point, {"off": rates(100, 100), "auto": rates(100, 100)}, is_same=False)
    assert differing_answers(result) == [f"{point.key}: the targets answered differently in 2 of 2 measurements"]
    assert "answered differently" in generation_page(result)
    assert differing_answers(made(Point("decode", 0, 128, 1, 4), {"off": rates(1), "auto": rates(1)}, is_same=False)) == []


def test_the_page_holds_the_bound_against_both_others():
    def gaps(p99_s):
        metrics = {"gap_p50_s": 0.1, "gap_p99_s": p99_s, "gap_max_s": p99_s, "long_ttft_s": 5.0, "beside_tokens_per_s": 40.0}
        return [metrics, metrics]

    point = Point("arriving", 4000, 256, 8, 3)
    text = generation_page(made(point, {"unchunked": gaps(4.0), "chunked": gaps(1.0), "bound-200": gaps(0.2)}))
    assert "8 streams, prompts of 4,000 tokens:" in text
    [line] = [line for line in text.splitlines() if line.startswith("| bound-200 | 0.1")]
    assert line.endswith("| 20.00 (20.00 to 20.00) | 5.00 (5.00 to 5.00) |")
    assert "| - |" in line  # no other gaps were seen


def test_the_page_has_the_blocks_that_were_saved():
    point = Point("shared-prefix", 160, 64, 2, 6)
    both = {
        "samples-2": rates(9, 9, blocks_saved=0.38, ttft_s=1.0),
        "beams-2": [*rates(9, blocks_saved=0.46), *rates(9, blocks_saved=0.49)],
    }
    text = generation_page(made(point, both))
    assert "| 2 samples | 38 % | 1 (1 to 1) |" in text
    assert "| 2 beams | 46 to 49 % | - |" in text
