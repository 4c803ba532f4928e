"""The reports: the keys that docs and clients rely on, with the right numbers."""

from __future__ import annotations

from engine_world import World, recipe

from kvd.commands import Query
from kvd.engine.loop import LoopEnd, State
from kvd.engine.reports import starting_report

PROMPT = list(b"It was a dark and stormy night; the rain fell in torrents")


def report(world, what):
    """The answer to a query, asked through the loop."""
    op_id = world.op(Query, what)
    yield from world.answered(op_id)
    return world.client.answers[op_id].result


def ends(life, **options):
    world = World(**options)
    assert world.run(life(world)) is LoopEnd.DRAINED


def test_status_counts_requests_and_blocks():
    def life(world):
        yield from world.ready()
        running = world.submit(PROMPT, max_tokens=150)
        stalled = world.submit(PROMPT[:20], max_tokens=150, credit_tokens=1)
        waiting = world.submit(PROMPT[1:], max_tokens=150, num_choices=2)
        yield from world.until(lambda: world.scheduler.num_stalled == 1 and world.scheduler.num_waiting == 1)
        status = yield from report(world, "status")
        assert status["requests"] == {"running": 1, "waiting": 1, "stalled": 1}
        blocks = status["blocks"]
        assert blocks["total"] == 64 == blocks["used"] + blocks["cached"] + blocks["free"]
        assert blocks["used"] >= 4
        assert blocks["pinned"] == 0
        assert status["state"] == "ready"
        assert status["model"] == "fake"
        assert status["instance"] == "instance"
        assert status["store"] == {"nodes": len(world.store.blocks)}
        assert status["rehydration"] == {"blocks": 2, "pins_pending": 0, "pins_not_held": 0}
        assert status["startup_s"] == {"weights": 1.5}
        assert 0 < status["uptime_s"] <= world.clock.now_s - 1000.0
        assert {running, stalled, waiting} == set(world.client.requests)

    ends(life, max_running=2)


def test_the_report_before_there_is_an_engine_has_the_keys_of_the_one_after():
    def life(world):
        yield from world.ready()
        status = yield from report(world, "status")
        before = starting_report(world.facts, world.clock, State.STARTING)
        assert before.keys() == status.keys()
        assert before["state"] == "starting"
        for part in ("requests", "blocks"):
            assert before[part].keys() == status[part].keys()
            assert set(before[part].values()) == {0}

    ends(life)


def test_stats_count_and_rates_are_per_second_of_the_last_minute():
    def life(world):
        yield from world.ready()
        world.round_s = 1.0
        for _ in range(2):
            yield
        before = yield from report(world, "stats")
        assert before["scheduler"]["finished"] == 0
        request_id = world.submit(PROMPT, max_tokens=30)
        yield from world.over(request_id)
        stats = yield from report(world, "stats")
        assert stats["scheduler"]["finished"] == 1
        assert stats["scheduler"]["decode_tokens"] == 29
        assert stats["scheduler"]["prefill_tokens"] == len(PROMPT)
        assert stats["cache"]["allocations"] == 6
        assert stats["store"] == {"wal_records": 5}
        assert stats["executor"] == {"executor": "fake"}
        window_s = stats["rates_window_s"]
        assert 30 < window_s <= 60
        assert abs(stats["rates_per_s"]["decode_tokens"] * window_s - 29) < 0.1
        world.round_s = 40.0
        for _ in range(4):
            yield
        later = yield from report(world, "stats")
        assert later["rates_window_s"] <= 60
        assert later["rates_per_s"]["decode_tokens"] == 0

    ends(life)


def test_many_reports_in_a_moment_keep_the_rates():
    def life(world):
        yield from world.ready()
        world.round_s = 0.0
        began_s = world.clock.now_s
        for _ in range(50):
            yield from report(world, "stats")
        assert len(world.reports._samples) <= 2 * (world.clock.now_s - began_s) + 3

    ends(life)


def test_prefixes_name_pins_and_the_hottest_with_their_residency():
    def life(world):
        yield from world.ready()
        for _ in range(3):
            yield from world.over(world.submit([*PROMPT, 1], max_tokens=1))
        yield
        prefixes = yield from report(world, "prefixes")
        pins = {entry["name"]: entry for entry in prefixes["pins"]}
        assert pins["held"]["state"] == "held"
        assert (pins["held"]["tokens"], pins["held"]["hits"], pins["held"]["priority"]) == (16, 3, 7)
        assert (pins["held"]["residency"], pins["held"]["age_s"]) == ("memory+disk", 7.0)
        world.store.last_use_s_ago = -7.0  # a clock that fell back since
        assert {pin["age_s"] for pin in (yield from report(world, "prefixes"))["pins"] if pin["name"] == "held"} == {0.0}
        assert pins["short"]["state"] == "not_held"
        assert (pins["short"]["residency"], pins["short"]["age_s"], pins["short"]["hits"]) == ("none", None, 0)
        assert "one full block" in pins["short"]["reason"]
        (hottest,) = [entry for entry in prefixes["hottest"] if entry["tokens"] == 48]
        assert (hottest["residency"], hottest["pinned"]) == ("memory+disk", False)
        world.store.blocks.clear()
        world.store.prefixes.clear()
        prefixes = yield from report(world, "prefixes")
        assert {(entry["residency"], entry["age_s"]) for entry in prefixes["hottest"]} == {("memory", None)}

    ends(life, recipes=[recipe("held", PROMPT[:20], priority=7), recipe("short", PROMPT[:3])])
