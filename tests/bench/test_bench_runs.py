"""The order of a run, going on with one that was cut short, and the tables, pages and plots of its result: without a socket."""

from __future__ import annotations

import asyncio
import json
import math
from xml.etree import ElementTree as ET

import pytest
from scripted_server import ScriptedServer

from kvd.bench.comparing import MAX_APART_S, all_comparisons, best, compare, uneven_prompts
from kvd.bench.measuring import BenchError
from kvd.bench.plan import Point
from kvd.bench.plot import plot
from kvd.bench.report import PEAK_MEMORY, Claim, comparison_dicts, judge, page, text_tables
from kvd.bench.results import Result, merged, open_result, read_result
from kvd.bench.running import Entry, Progress, Runner, Target

DECODE = [Point("decode", 0, 8, width, width) for width in (1, 4)]
ENTRIES = [Entry(point) for point in DECODE]


def run(tmp_path, servers, *, entries=ENTRIES, rounds=2, out="out.json", **options):
    """A run over servers by name; the order in which they were measured comes with the result."""
    said: list[str] = []
    targets = [Target(name, server, f"scripted:{name}") for name, server in servers.items()]
    path = tmp_path / out
    runner = Runner(
        entries, targets, rounds, open_result(path, 0), out=path, progress=Progress(said=said.append), warmup_requests=1, **options
    )
    return asyncio.run(runner.run()), said


def test_targets_take_turns_and_are_as_often_first_as_last(tmp_path):
    _, said = run(tmp_path, {"a": ScriptedServer(), "b": ScriptedServer()}, entries=ENTRIES[:1], rounds=4)
    assert [line.split(":")[0] for line in said] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_both_targets_get_the_same_prompts_and_pairs_come_of_it(tmp_path):
    slow, quick = ScriptedServer(token_s=0.02), ScriptedServer(token_s=0.0005)
    result, _ = run(tmp_path, {"slow": slow, "quick": quick}, rounds=3)
    told = [{str(ask.messages) for ask in server.asked} for server in (slow, quick)]
    assert len(told[0] ^ told[1]) <= 2  # the sizing is asked of the first one only
    found = compare(result, DECODE[0].key, "decode_tokens_per_s", "quick", "slow")
    assert found.ratio.num_pairs == 3
    assert found.ratio.mean > 1
    assert best(result, DECODE[0].key, "decode_tokens_per_s", ["slow", "quick"]) == "quick"
    assert {each.ours for each in all_comparisons(result)} == {"quick"}


def test_a_run_that_was_cut_short_goes_on_where_it_was(tmp_path):
    class Breaking(ScriptedServer):
        async def ask(self, ask):
            if len(self.asked) == 6:
                raise BenchError("the lights went out", kind="unavailable")
            return await super().ask(ask)

    with pytest.raises(BenchError, match="lights"):
        run(tmp_path, {"a": Breaking()})
    before = read_result(tmp_path / "out.json")
    assert 0 < len(before.samples) < 4
    after, said = run(tmp_path, {"a": ScriptedServer()})
    assert len(after.samples) == 4
    assert len(said) == 4 - len(before.samples)
    assert after.samples[: len(before.samples)] == before.samples
    again, said = run(tmp_path, {"a": ScriptedServer()})
    assert said == ["nothing is left to measure"]
    assert again.samples == after.samples


def test_a_failure_is_noted_and_forgotten_when_the_measurement_succeeds(tmp_path):
    class Moody(ScriptedServer):
        async def ask(self, ask):
            if ask.max_tokens == 8 and len(self.asked) < 8:
                self.asked.append(ask)
                raise BenchError("not now")
            return await super().ask(ask)

    result, _ = run(tmp_path, {"a": Moody()}, entries=ENTRIES[:1], rounds=8, keeps_going=True)
    assert result.failures
    assert "not now" in text_tables(result)
    after, _ = run(tmp_path, {"a": ScriptedServer()}, entries=ENTRIES[:1], rounds=8)
    assert after.failures == []
    assert len(after.samples) == 8
    assert len(after.recovered) == len(result.failures)
    assert f"{len(after.recovered)} measurements failed and succeeded when the run was gone on with (a)" in text_tables(after)


def test_a_failure_stays_when_another_repeat_succeeds(tmp_path):
    class Moody(ScriptedServer):
        async def ask(self, ask):
            if ask.max_tokens == 8 and not any(each.max_tokens == 8 for each in self.asked):
                self.asked.append(ask)
                raise BenchError("not the first time")
            return await super().ask(ask)

    result, _ = run(tmp_path, {"a": Moody()}, entries=[Entry(DECODE[0], repeats=2)], rounds=1, keeps_going=True)
    assert [each["repeat"] for each in result.samples] == [1]
    assert [each["repeat"] for each in result.failures] == [0]
    assert "repeat 1: failed: not the first time" in text_tables(result)


@pytest.mark.parametrize(
    ("fact", "value", "message"),
    [("seed", 7, "seed 7"), ("machine", "another", "machine another"), ("build", "before", "build before"), ("schema", 1, "schema 1")],
)
def test_a_file_of_another_run_is_not_gone_on_with(tmp_path, fact, value, message):
    run(tmp_path, {"a": ScriptedServer()}, rounds=1)
    path = tmp_path / "out.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {fact: value}))
    with pytest.raises(BenchError, match=message) as failure:
        run(tmp_path, {"a": ScriptedServer()})
    assert failure.value.kind == "usage"


def test_another_server_under_a_name_of_the_file_ends_the_run(tmp_path):
    class Newer(ScriptedServer):
        async def version(self):
            return "scripted 2"

    before, _ = run(tmp_path, {"a": ScriptedServer()}, rounds=1)
    with pytest.raises(BenchError, match="a was measured as scripted 1, and now it is scripted 2"):
        run(tmp_path, {"a": Newer()}, keeps_going=True)
    assert read_result(tmp_path / "out.json").samples == before.samples


def test_a_target_that_is_not_there_is_named(tmp_path):
    server = ScriptedServer()
    server.is_up = False
    with pytest.raises(BenchError, match="a: no server that is ready at scripted:a") as failure:
        run(tmp_path, {"a": server})
    assert failure.value.kind == "unavailable"


def test_restart_needs_a_command(tmp_path):
    with pytest.raises(BenchError, match="--server-command"):
        run(tmp_path, {"a": ScriptedServer()}, entries=[Entry(Point("restart", 300, 4, 1, 3))])


def test_an_entry_may_be_of_some_targets_and_rounds_only(tmp_path):
    entries = [Entry(DECODE[0], frozenset({"a"})), Entry(DECODE[1], rounds=1, repeats=2)]
    result, _ = run(tmp_path, {"a": ScriptedServer(), "b": ScriptedServer()}, entries=entries)
    places = [(each["target"], each["point"].get("concurrency", 1), each["round"], each["repeat"]) for each in result.samples]
    assert sorted(places) == [("a", 1, 0, 0), ("a", 1, 1, 0), ("a", 4, 0, 0), ("a", 4, 0, 1), ("b", 4, 0, 0), ("b", 4, 0, 1)]


def test_every_sample_says_what_it_cost(tmp_path):
    result, _ = run(tmp_path, {"a": ScriptedServer()}, rounds=1)
    for sample in result.samples:
        assert sample["driver_cpu_s"] >= 0
        assert sample["wall_s"] > 0
        assert all(request["completion_tokens"] == 8 for request in sample["requests"])


# ------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "no result"),
        ("[]", "no result"),
        ('{"kind": "other"}', "no result"),
        ('{"kind": "kvd-bench", "schema": 99}', "schema 99"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        read_result(path)


def test_a_file_that_is_not_there_and_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(BenchError, match="can't be read"):
        read_result(tmp_path / "gone.json")
    with pytest.raises(BenchError, match="can't be written") as failure:
        Result.begun(0).write(tmp_path / "gone" / "x.json")
    assert failure.value.kind == "output"


def test_what_is_written_is_read_again(tmp_path):
    result, _ = run(tmp_path, {"a": ScriptedServer()}, rounds=1)
    assert read_result(tmp_path / "out.json").as_dict() == json.loads(json.dumps(result.as_dict()))


def test_results_of_one_machine_become_one_and_of_two_do_not(tmp_path):
    one, _ = run(tmp_path, {"a": ScriptedServer()}, rounds=1)
    two, _ = run(tmp_path, {"a": ScriptedServer()}, rounds=1, out="two.json")
    assert len(merged([one, two]).samples) == 4
    two.targets["a"] = {**two.targets["a"], "version": "scripted 2"}
    with pytest.raises(BenchError, match="different servers by"):
        merged([one, two])
    two.facts["machine"] = "another"
    with pytest.raises(BenchError, match="different machines"):
        merged([one, two])


# ---------------------------------------------------------------------------------------------- tables and pages


def made(rates, *, metric="decode_tokens_per_s", key="decode concurrency=8", prompt_tokens=10, at_unix_s=None):
    """A result with the given rates by target, one a round or several repeats of one; ``at_unix_s``: of a target's samples, else 0."""
    facts = {"date": "2026-01-01", "machine": "a machine", "load_before": 0.1, "commit": "abc", "build": "123"}
    result = Result(0, facts)
    for name, values in rates.items():
        result.targets[name] = {"url": name, "version": f"{name} 1", "command": ""}
        repeats = [(round_, each if isinstance(each, list) else [each]) for round_, each in enumerate(values)]
        for round_, repeat, value in ((round_, repeat, value) for round_, each in repeats for repeat, value in enumerate(each)):
            result.samples.append(
                {
                    "key": key,
                    "point": {"scenario": key.split(" ")[0], "concurrency": 8},
                    "target": name,
                    "round": round_,
                    "repeat": repeat,
                    "at_unix_s": (at_unix_s or {}).get(name, 0.0),
                    "metrics": {metric: value},
                    "wall_s": 1.0,
                    "driver_cpu_s": 0.05,
                    "server_cpu_s": None,
                    "other_cores": None,
                    "resident_bytes": None,
                    "requests": [{"prompt_tokens": prompt_tokens + len(name), "cached_tokens": 0}],
                    "warnings": [],
                }
            )
    return result


KEY, RATE = "decode concurrency=8", "decode_tokens_per_s"


def test_repeats_of_a_round_are_one_pair():
    result = made({"a": [[100, 100, 100], [100, 100, 100]], "b": [[120, 121, 119], [130, 500, 110]]})
    found = compare(result, KEY, RATE, "b", "a")
    assert (found.ratio.num_pairs, found.ratio.low, found.ratio.mean, found.ratio.high) == (2, 1.2, 1.25, 1.3)


def test_a_round_in_which_a_target_got_nothing_counts():
    result = made({"a": [0.5, 0.5, 0.5], "b": [0.6, 0.0, 0.7]}, metric="hit_rate")
    found = compare(result, KEY, "hit_rate", "b", "a")
    assert (found.ratio.num_pairs, found.ratio.low, found.our_median) == (3, 0.0, 0.6)
    nothing = compare(result, KEY, "hit_rate", "a", "b").ratio
    assert (nothing.num_pairs, nothing.high) == (3, math.inf)
    assert all(value is None or math.isfinite(value) for each in comparison_dicts(result) for value in (each["ratio"], each["high"]))


def test_medians_are_of_the_pairs():
    found = compare(made({"a": [10, 20, 30], "b": [20]}), KEY, RATE, "b", "a")
    assert (found.our_median, found.their_median, found.ratio.mean) == (20, 10, 2)


def test_a_target_that_was_added_later_has_no_pairs():
    rates = {"kvd": [100, 100], "peer": [50, 50]}
    assert compare(made(rates, at_unix_s={"peer": MAX_APART_S}), KEY, RATE, "kvd", "peer")
    later = made(rates, at_unix_s={"peer": MAX_APART_S + 1})
    assert compare(later, KEY, RATE, "kvd", "peer") is None
    found = judge(later, Claim("decode", KEY, RATE, "kvd", ("peer",), 1.2))
    assert (found.our_median, found.ratio, found.holds) == (100, None, None)


def test_a_claim_is_held_against_the_better_peer():
    result = made({"kvd": [120, 130, 125], "slow": [50, 50, 50], "quick": [100, 104, 100]})
    found = judge(result, Claim("decode", KEY, RATE, "kvd", ("slow", "quick"), 1.2))
    assert found.peer == "quick"
    assert found.ratio.mean == 1.25
    assert (found.ratio.low, found.ratio.high) == (1.2, 1.25)
    assert found.holds


def test_a_claim_about_times_an_own_figure_or_a_bound():
    result = made({"kvd": [0.1, 0.1]}, metric="restored_ttft_s", key="restart")
    for sample in result.samples:
        sample["metrics"]["before_kill_ttft_s"] = 0.09
    assert judge(result, Claim("x", "restart", "restored_ttft_s", "kvd", (), 0.8, "before_kill_ttft_s")).ratio.mean == pytest.approx(0.9)
    assert judge(result, Claim("x", "restart", "restored_ttft_s", "kvd", bound=0.05)).holds is False
    assert judge(result, Claim("x", "restart", "restored_ttft_s", "kvd", bound=0.2)).holds is True


def test_the_most_memory_of_start_and_load_is_held_against_its_bound():
    result = made({"kvd": [1, 1]})
    claim = Claim("memory", KEY, PEAK_MEMORY, "kvd", bound=1.2)
    assert judge(result, claim).holds is None
    result.facts["starts"] = [{"target": "kvd", "ready_s": 1, "peak_unshared_bytes": 1 << 30}]
    assert (judge(result, claim).our_median, judge(result, claim).holds) == (1.0, True)
    result.samples[1]["resident_bytes"] = {"pss": 1, "unshared": 3 << 29}
    assert (judge(result, claim).our_median, judge(result, claim).holds) == (1.5, False)
    text = page(result, {"kvd": [claim]}, command="a command")
    assert "* memory misses what was wanted: 1.5 GiB where at most 1.2 were wanted." in text


def test_what_was_not_measured_neither_holds_nor_misses():
    found = judge(made({"kvd": [1, 1]}), Claim("decode", KEY, RATE, "kvd", ("gone",), 1.2))
    assert (found.peer, found.holds, found.our_median) == (None, None, 1)


def test_the_page_names_every_row_in_which_kvd_is_behind():
    result = made({"kvd": [90, 90], "peer": [100, 100]})
    claims = [
        Claim("decode of eight", KEY, RATE, "kvd", ("peer",), 1.2),
        Claim("something else", "gone", RATE, "kvd", ("peer",), 1.2),
    ]
    text = page(result, {"kvd against its peers": claims}, command="a command")
    behind = text.split("## Where kvd is behind")[1].split("##")[0]
    assert "decode of eight: peer is better, 1.11 times" in behind
    assert "Not measured: something else" in behind
    assert "| decode of eight | 90 tokens/s | 100 (peer) | 0.90 (0.90 to 0.90) | at least 1.20 | **misses** |" in text
    assert "nothing here is typed by hand" in text


def test_the_page_shows_what_each_target_is_and_how_it_was_started_but_no_folder():
    result = made({"kvd": [150], "peer": [100]}, at_unix_s={"peer": 60.0})
    result.targets["kvd"] = {"url": "ipc://x", "version": "kvd 1, m.gguf, cpu-avx2", "command": "kvd serve --dtype bfloat16"}
    result.targets["peer"]["command"] = "exec /opt/some/place/peer.sh 8101 --to=/opt/x/y | tee"
    result.failures.append({"key": KEY, "target": "peer", "round": 0, "repeat": 0, "error": "/opt/some/place/log ends: no"})
    text = page(result, {}, command="a command")
    assert "| kvd | kvd 1, m.gguf, cpu-avx2 | `kvd serve --dtype bfloat16` |" in text
    assert "| peer | peer 1 | `exec peer.sh 8101 --to=y \\| tee` |" in text
    assert "failed: log ends: no" in text
    assert "commit abc" in text
    assert "1970-01-01 00:00 to 00:01 UTC" in text


def test_a_target_that_never_tells_its_hits_is_named_once():
    result = made({"kvd": [150, 150], "mute": [100, 100]})
    for sample in result.samples:
        sample["requests"][0]["cached_tokens"] = None if sample["target"] == "mute" else 0
    assert text_tables(result).count("tells no cached tokens") == 1
    assert "note: mute tells no cached tokens" in text_tables(result)


def test_the_page_shows_starts():
    result = made({"kvd": [150], "peer": [100]})
    result.facts["starts"] = [{"target": "kvd", "ready_s": ready_s, "peak_unshared_bytes": 600 << 20} for ready_s in (2, 1, 3)]
    text = page(result, {}, command="a command")
    assert "| exec to ready, s | 2 |" in text
    assert "| peak RssAnon + RssShmem, MiB | 600 |" in text


def test_a_page_on_which_all_holds_says_so():
    text = page(made({"kvd": [150], "peer": [100]}), {"x": [Claim("decode", KEY, RATE, "kvd", ("peer",), 1.2)]}, command="a command")
    assert "Nowhere in these rows." in text
    assert "(one pair)" in text


def test_targets_that_count_other_tokens_are_said():
    result = made({"a": [1], "longer": [1]})
    assert "different prompt tokens (a 11, longer 16)" in uneven_prompts(result)[0]
    assert "different prompt tokens" in text_tables(result)
    assert uneven_prompts(made({"a": [1], "b": [1]})) == []


def test_ratios_as_json_are_finite():
    found = comparison_dicts(made({"a": [10], "b": [20]}))
    assert found[0]["ratio"] == 2
    assert found[0]["high"] is None
    assert "Infinity" not in json.dumps(found)


def test_a_plot_has_a_line_for_each_target_and_is_well_formed(tmp_path):
    result, _ = run(tmp_path, {"a & b": ScriptedServer(), "c": ScriptedServer()}, rounds=1)
    root = ET.fromstring(plot(result))
    lines = [each for each in root.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 2
    assert all(math.isfinite(float(number)) for line in lines for pair in line.get("points").split() for number in pair.split(","))
    assert "a & b" in [each.text for each in root.iter() if each.tag.endswith("text")]


def test_a_plot_needs_two_concurrencies():
    with pytest.raises(ValueError, match="two or more"):
        plot(made({"a": [1.0]}))
