"""Loads from disk, one promise after the other: shared, bounded, beside running requests, and without a trace when they fail or nobody wants them any more."""

from __future__ import annotations

import pytest
from simulation import Simulation
from stream_checker import namespace_of

from kvd.types import pack_tokens


def make(**options):
    defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 100, "max_tokens_per_step": 32, "max_running": 8, "max_waiting": 16}
    return Simulation(**(defaults | {"disk": True} | options))


def prompt(num_tokens, salt=0):
    return [(salt >> index) & 1 if index < 4 else index * index // 3 % 2 for index in range(num_tokens)]


def cold(num_tokens, salt=0, **options):
    """A simulation in which this prompt's blocks are on disk and not in memory."""
    sim = make(**options)
    first = sim.submit(prompt(num_tokens, salt), max_tokens=1)
    run(sim, first)
    sim.evict_all()
    return sim


def run(sim, *request_ids):
    for _ in range(100):
        if all(sim.terminal(request_id) for request_id in request_ids):
            return
        sim.round()
    raise AssertionError("not over after 100 rounds")


def usage(sim, request_id):
    told = sim.terminal(request_id).usage
    return (told.cached_tokens, told.restored_tokens)


def prefill(sim):
    return sim.scheduler.stats()["prefill_tokens"]


def matched(sim, tokens):
    return sim.cache.match(pack_tokens(tokens), namespace_of(b"", b"")).num_tokens


def test_what_left_memory_is_loaded_and_the_rest_computed():
    sim = cold(18)
    before = prefill(sim)
    again = sim.submit(prompt(18), max_tokens=5)
    assert sim.round() is None, "it waits for its blocks"
    sim.read()
    run(sim, again)
    assert usage(sim, again) == (16, 16)
    assert prefill(sim) - before == 2
    sim.finish_all()


def test_others_run_while_blocks_are_read():
    sim = cold(18)
    again = sim.submit(prompt(18), max_tokens=5)
    other = sim.submit(prompt(18, 5), max_tokens=5)
    run(sim, other)
    assert sim.terminal(again) is None
    assert sim.scheduler.stats()["loading_blocks"] == 4
    sim.read()
    run(sim, again)
    sim.finish_all()


def test_what_is_in_memory_is_not_loaded():
    sim = cold(30)
    short = sim.submit(prompt(10), max_tokens=1)
    sim.round()
    sim.read()
    run(sim, short)
    sim.submit(prompt(30), max_tokens=1)
    sim.round()
    assert sim.scheduler.stats()["loading_blocks"] == 7 - 2
    sim.finish_all()


def test_two_with_one_prompt_share_a_load_and_only_the_first_counts_it_as_restored():
    sim = cold(18)
    ids = [sim.submit(prompt(18), max_tokens=3) for _ in range(2)]
    sim.round()
    sim.round()
    assert sim.scheduler.stats()["loads"] == 1
    sim.read()
    run(sim, *ids)
    assert [usage(sim, each) for each in ids] == [(16, 16), (16, 0)]
    sim.finish_all()


def test_a_longer_prompt_loads_behind_the_load_of_a_shorter_one():
    sim = cold(30)
    ids = [sim.submit(prompt(10), max_tokens=3), sim.submit(prompt(30), max_tokens=3)]
    sim.round()
    assert (sim.scheduler.stats()["loads"], sim.scheduler.stats()["loading_blocks"]) == (2, 7)
    sim.read()
    run(sim, *ids)
    assert [usage(sim, each) for each in ids] == [(8, 8), (28, 20)]
    sim.finish_all()


def test_a_load_behind_one_that_fails_ends_too_and_writes_nothing():
    sim = cold(30)
    short, long = sim.submit(prompt(10), max_tokens=3), sim.submit(prompt(30), max_tokens=3)
    sim.round()
    behind = [target.block_id for target in sim.disk.loads[1][1]]
    sim.disk.fail()
    before = {block_id: list(sim.executor.pool[block_id]) for block_id in behind}
    sim.read()
    assert {block_id: sim.executor.pool[block_id] for block_id in behind} == before
    assert sim.scheduler.stats()["loading_blocks"] == 0
    run(sim, short, long)
    assert usage(sim, short) == (0, 0)
    assert sim.scheduler.stats()["failed_loads"] == 2
    sim.finish_all()


@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_a_load_that_fails_keeps_what_was_good_and_the_request_computes_the_rest(num_good):
    sim = cold(18)
    before = prefill(sim)
    again = sim.submit(prompt(18), max_tokens=5)
    sim.round()
    sim.disk.read(num_good)
    lookups = sim.disk.num_lookups
    sim.disk.fail()
    run(sim, again)
    assert usage(sim, again) == (4 * num_good, 4 * num_good)
    assert prefill(sim) - before == 18 - 4 * num_good
    assert sim.disk.num_lookups == lookups, "a request whose load failed does not ask again"
    sim.finish_all()


def test_an_abort_while_loading_leaks_nothing_and_the_blocks_are_cached():
    sim = cold(18)
    again = sim.submit(prompt(18), max_tokens=5)
    sim.round()
    sim.abort(again)
    assert sim.code(again) == "done"
    sim.check()
    assert sim.cache.num_used == 4, "the load goes on"
    sim.read()
    assert (sim.cache.num_used, matched(sim, prompt(18))) == (0, 16)
    later = sim.submit(prompt(18), max_tokens=2)
    run(sim, later)
    assert usage(sim, later) == (16, 16), "nobody had been given them before"
    sim.finish_all()


def test_an_abort_while_a_load_fails_leaks_nothing():
    sim = cold(18)
    again = sim.submit(prompt(18), max_tokens=5)
    sim.round()
    sim.abort(again)
    sim.disk.fail()
    assert sim.cache.num_free == sim.cache.num_blocks
    sim.finish_all()


def test_what_a_load_may_not_fill_is_computed():
    sim = cold(30, num_blocks=20, max_loading_fraction=0.15)
    again = sim.submit(prompt(30), max_tokens=2)
    sim.round()
    assert sim.scheduler.stats()["loading_blocks"] == 3
    other = sim.submit(prompt(30), max_tokens=2)
    sim.round()
    sim.read()
    run(sim, again, other)
    assert usage(sim, again) == (12, 12)
    sim.finish_all()


def test_a_load_takes_no_block_that_those_who_run_need_next():
    sim = make(num_blocks=8, max_loading_fraction=1.0)
    run(sim, sim.submit(prompt(18), max_tokens=1))
    sim.evict_all()
    running = sim.submit(prompt(12, 5), max_tokens=8)
    sim.round()
    waiting = sim.submit(prompt(18), max_tokens=1)
    sim.round()
    assert sim.scheduler.stats()["loads"] == 0
    assert sim.scheduler.stats()["preemptions"] == 0
    run(sim, running)
    sim.round()
    assert sim.scheduler.stats()["loads"] == 1, "it loads as soon as there is room"
    sim.read()
    run(sim, running, waiting)
    sim.finish_all()


def test_one_who_needs_a_block_waits_for_a_load_that_nobody_wants_instead_of_failing():
    sim = cold(18, num_blocks=6, max_loading_fraction=1.0)
    dropped = sim.submit(prompt(18), max_tokens=1)
    sim.round()
    sim.abort(dropped)
    other = sim.submit(prompt(15, 5), max_tokens=4)
    for _ in range(3):
        assert sim.round() is None
    assert sim.terminal(other) is None
    sim.read()
    run(sim, other)
    assert sim.code(other) == "done"
    sim.finish_all()


def test_preempted_while_loading_it_comes_back_to_the_loaded_blocks():
    sim = cold(18, num_blocks=9, max_loading_fraction=1.0)
    running = sim.submit(prompt(10, 5), max_tokens=9)
    sim.round()
    loading = sim.submit(prompt(18), max_tokens=2)
    for _ in range(9):
        sim.round()
    assert sim.scheduler.stats()["loading_blocks"] == 4
    assert sim.scheduler.stats()["preemptions"] == 1
    sim.read()
    run(sim, running, loading)
    assert usage(sim, loading)[0] == 16
    assert sim.scheduler.stats()["loads"] == 1
    sim.finish_all()


def test_what_lies_behind_a_prompt_that_is_being_computed_is_not_read_before_it():
    sim = cold(30, max_in_flight=2)
    sim.disk.is_slower = True
    first = sim.submit(prompt(10), max_tokens=2)
    sim.submit_step()
    sim.disk.is_slower = False
    num_lookups = sim.disk.num_lookups
    second = sim.submit(prompt(30), max_tokens=2)
    sim.submit_step()
    assert sim.disk.num_lookups == num_lookups
    run(sim, first, second)
    assert usage(sim, second) == (8, 0)
    sim.finish_all()


def test_what_the_disk_would_take_longer_for_is_computed():
    sim = cold(18)
    sim.disk.is_slower = True
    again = sim.submit(prompt(18), max_tokens=2)
    run(sim, again)
    assert usage(sim, again) == (0, 0)
    sim.finish_all()


def test_work_that_no_user_waits_for_loads_too_and_leaves_the_blocks_fresh():
    sim = cold(18)
    sim.submit(prompt(18), max_tokens=1, internal=True, background=True)
    sim.round()
    sim.read()
    sim.round()
    sim.round()
    user = sim.submit(prompt(18), max_tokens=2)
    run(sim, user)
    assert usage(sim, user) == (16, 16)
    sim.finish_all()


def test_without_a_disk_nothing_is_asked():
    sim = make(disk=False)
    first = sim.submit(prompt(18), max_tokens=1)
    run(sim, first)
    sim.evict_all()
    run(sim, sim.submit(prompt(18), max_tokens=1))
    assert sim.scheduler.stats()["loads"] == 0
    sim.finish_all()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_loaded_blocks_are_kept_as_the_request_that_asked_for_them_wants(is_aborted):
    """And not as if somebody had asked for them without a wish: a scan of what is on disk at priority 0 drives nothing out."""
    sim = cold(18)
    asked = sim.submit(prompt(18), max_tokens=1, cache_priority=0)
    sim.round()
    (target, *_) = sim.disk.loads[0][1]
    if is_aborted:
        sim.abort(asked)
    sim.read()
    run(sim, asked)
    assert target.node.in_tree
    assert target.node.priority == 0
    wanted = sim.submit(prompt(18), max_tokens=1, cache_priority=70, cache_ttl_s=60.0)
    run(sim, wanted)
    assert target.node.priority == 70
    sim.finish_all()
