"""What scenarios ask, and the figures they make of the answers, on a server without a socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import time

import pytest
from scripted_server import ScriptedServer

from kvd.bench import prompts
from kvd.bench.asking import Setting
from kvd.bench.measuring import BenchError
from kvd.bench.plan import HEADLINE, METRICS, Point, expand
from kvd.bench.prompts import Sizing
from kvd.bench.scenarios import SCENARIOS, measure_sizing
from kvd.bench.trace import BLOCK_TOKENS, ask_of, best_hit_rate, read_trace, replay

SIZING = Sizing(50, 12)
SETTINGS = {
    "concurrency": (1, 4),
    "prompt_tokens": (600,),
    "prefix_tokens": (300,),
    "output_tokens": 8,
    "requests": 6,
    "turns": 3,
    "cold": False,
    "trace": "",
    "time_scale": 1.0,
    "length_scale": 1.0,
}


def run(point: Point, server: ScriptedServer, seed: str = "0/x"):
    return asyncio.run(SCENARIOS[point.scenario](server, Setting(point, seed, SIZING)))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_gives_its_headline_and_known_figures_only(scenario):
    for point in expand([scenario], **SETTINGS):
        measured = run(point, ScriptedServer())
        assert measured.metrics[HEADLINE[scenario]] > 0
        assert measured.metrics.keys() <= METRICS.keys()
        assert measured.warnings == []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_seed_asks_the_same_of_every_target_and_another_seed_something_else(scenario):
    point = expand([scenario], **SETTINGS)[-1]
    one, two, other = ScriptedServer(), ScriptedServer(), ScriptedServer()
    for server, seed in ((one, "0/x"), (two, "0/x"), (other, "0/y")):
        run(point, server, seed)
    # streams beside arriving prompts are as many as there is time for
    asked = [[ask for ask in server.asked if scenario != "arriving" or len(ask.messages) > 1] for server in (one, two, other)]
    first_turns = [sorted(str(ask.messages[:2]) for ask in asks) for asks in asked]
    assert first_turns[0] == first_turns[1]
    assert not set(first_turns[0]) & set(first_turns[2])


def test_no_more_requests_are_under_way_than_the_point_says():
    server = ScriptedServer()
    run(Point("shared-prefix", 300, 8, 3, 12), server)
    assert server.most_at_once == 3


def test_a_shared_prefix_is_primed_or_never_seen():
    primed, cold = ScriptedServer(), ScriptedServer()
    hot = run(Point("shared-prefix", 600, 4, 1, 4), primed).metrics["hit_rate"]
    assert len(primed.asked) == 5
    assert run(Point("shared-prefix", 600, 4, 1, 4, primed=False), cold).metrics["hit_rate"] < hot
    assert len(cold.asked) == 4


def test_a_prompt_that_was_seen_before_is_said():
    server = ScriptedServer()
    run(Point("prefill", 600, 1, 1, 2), server)
    assert "another --seed" in run(Point("prefill", 600, 1, 1, 2), server).warnings[0]


@pytest.mark.parametrize(
    "point", [Point("shared-prefix", 600, 4, 4, 4, primed=False), Point("mixed", 600, 4, 1, 4)], ids=lambda point: point.scenario
)
def test_a_cold_run_on_a_warm_server_is_said(point):
    server = ScriptedServer()
    assert run(point, server).warnings == []
    assert "another --seed" in run(point, server).warnings[0]


def test_prompts_that_differ_share_only_their_first_words():
    one, two = (prompts.rules(f"0/{number}", 20).split() for number in range(2))
    assert next(index for index, (a, b) in enumerate(zip(one, two, strict=True)) if a != b) < 6


class Stingy(ScriptedServer):
    """Answers with a token less than was asked for."""

    async def ask(self, ask):
        answer = await super().ask(ask)
        answer.completion_tokens -= 1
        return answer


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_short_answers_are_said(scenario):
    assert "ignore_eos" in run(expand([scenario], **SETTINGS)[-1], Stingy()).warnings[0]


def test_an_answer_without_text_has_no_moment_for_decode():
    class Mute(ScriptedServer):
        async def ask(self, ask):
            answer = await super().ask(ask)
            answer.arrivals, answer.pieces = [], []
            return answer

    with pytest.raises(BenchError, match="without any text"):
        run(Point("decode", 0, 4, 2, 2), Mute())


def test_a_target_that_serves_fewer_streams_than_asked_has_no_moment_for_decode():
    class OneByOne(ScriptedServer):
        gate = asyncio.Semaphore(1)

        async def ask(self, ask):
            async with self.gate:
                return await super().ask(ask)

    with pytest.raises(BenchError, match="no moment"):
        run(Point("decode", 0, 4, 3, 3), OneByOne())


def test_turns_grow_and_hold_the_answers():
    server = ScriptedServer()
    run(Point("multi-turn", 300, 4, 1, turns=3), server)
    assert [len(ask.messages) for ask in server.asked] == [2, 4, 6]
    assert server.asked[1].messages[2] == {"role": "assistant", "content": "word word word word "}


def test_one_answer_that_fails_fails_the_measurement_with_its_own_error():
    class Failing(ScriptedServer):
        async def ask(self, ask):
            await super().ask(ask)
            if ask is self.asked[2]:
                raise BenchError("out of luck", kind="refused")
            await asyncio.sleep(60)

    with pytest.raises(BenchError, match="out of luck"):
        run(Point("shared-prefix", 300, 4, 6, 6, primed=False), Failing())


def test_sentences_are_counted_once():
    sizing = asyncio.run(measure_sizing(ScriptedServer()))
    words = len((prompts.rules("0/x", sizing.sentences(1000)) + " " + prompts.question("sizing", 0)).split())
    assert words == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize(("scenario", "message"), [("nonsense", "no scenario"), ("trace", "needs a file")])
def test_a_plan_that_can_not_be_is_refused(scenario, message):
    with pytest.raises(BenchError, match=message) as failure:
        expand([scenario], **SETTINGS)
    assert failure.value.kind == "usage"


def test_the_key_of_a_point_names_what_differs():
    assert Point("decode", 0, 128, 8, 8).key == "decode output_tokens=128 concurrency=8 requests=8"
    keys = [point.key for point in expand(list(SCENARIOS), **SETTINGS)]
    assert len(set(keys)) == len(keys)


# ------------------------------------------------------------------------------------------------------- traces


TRACE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 40, "hash_ids": [1, 2, 3]},
    {"timestamp": 1030, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 4]},
    {"timestamp": 1060, "input_length": 100, "output_length": 10, "hash_ids": [9]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        lines.writelines(json.dumps(entry) + "\n" for entry in TRACE)
    return path


def test_a_trace_is_read_as_far_as_it_is_wanted(trace):
    requests = read_trace(trace, 2)
    assert [request.block_ids for request in requests] == [(1, 2), (1, 2)]
    assert [request.at_s for request in requests] == [0.0, 0.03]
    assert requests[0].rest_tokens == 1100 - 2 * BLOCK_TOKENS
    assert best_hit_rate(requests) == pytest.approx(1024 / 2600)


def test_equal_blocks_of_a_trace_are_equal_text_and_the_rest_is_its_own(trace):
    setting = Setting(Point("trace", length_scale=0.25), "0", SIZING)
    one, two, short = (ask_of(request, number, setting) for number, request in enumerate(read_trace(trace, 3)))
    assert one.messages[0] == two.messages[0]
    assert one.messages[1] != two.messages[1]
    assert one.max_tokens == 10
    assert [message["role"] for message in short.messages] == ["user"]


def test_a_trace_is_replayed_at_its_times(trace):
    server = ScriptedServer(token_s=0.0001)
    point = Point("trace", requests=3, trace=str(trace), time_scale=2.0, length_scale=0.1)
    began_s = time.perf_counter()
    measured = asyncio.run(replay(server, Setting(point, "0", SIZING)))
    assert [answer.asked_s - began_s >= at_s for answer, at_s in zip(measured.answers, (0, 0.06, 0.12), strict=True)] == [True] * 3
    assert measured.metrics["hit_rate"] > 0.3
    assert measured.metrics["late_s"] < 5


def test_a_trace_is_new_in_every_round_and_the_same_for_every_target(trace):
    point = Point("trace", requests=3, trace=str(trace), time_scale=0.0, length_scale=0.5)

    def rate_and_warnings(server, seed):
        measured = asyncio.run(replay(server, Setting(point, seed, SIZING)))
        return measured.metrics["hit_rate"], measured.warnings

    first, second = ScriptedServer(), ScriptedServer()
    rate, warnings = rate_and_warnings(first, "0/0")
    assert warnings == []
    again, warnings = rate_and_warnings(first, "0/1")
    assert warnings == []
    assert again == pytest.approx(rate, abs=0.02)
    assert rate_and_warnings(second, "0/0")[0] == rate
    asked = [sorted(str(ask.messages) for ask in server.asked[:3]) for server in (first, second)]  # they all come at once
    assert asked[0] == asked[1]
    assert "another --seed" in rate_and_warnings(first, "0/0")[1][0]


def test_short_answers_of_a_trace_are_said(trace):
    point = Point("trace", requests=3, trace=str(trace), time_scale=0.0, length_scale=0.1)
    assert "ignore_eos" in asyncio.run(replay(Stingy(), Setting(point, "0", SIZING))).warnings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), ("{}\n", "line 1"), ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": []}\nnonsense\n', "line 2")],
)
def test_a_broken_trace_is_refused_by_its_line(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        read_trace(path, 10)


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BenchError, match="gone"):
        read_trace(tmp_path / "gone.jsonl", 10)
