"""Pins: nothing is acknowledged before it is on disk, nothing is held that has no recipe, and whatever fails leaves the old pin in its place."""

from __future__ import annotations

import pytest
from engine_client import POISON
from engine_world import World, namespace_of, recipe

from kvd.cache.events import BlockOrigin
from kvd.commands import Drain, Query, RecipeDurable, Unpin
from kvd.engine.loop import LoopEnd, State
from kvd.types import pack_tokens

SYSTEM = list(b"You are a helpful assistant, and you answer in rhyme. Always.")
OTHER = list(b"You are a terse machine; you answer in numbers, and in nothing else.")


def ends(life, *, work=None, **options):
    world = World(**options)
    assert world.run(life(world), **(work(world) if work else {})) is LoopEnd.DRAINED
    return world


def held(world, name):
    return world.cache.pins()[name].token_ids


def prefix(tokens):
    return pack_tokens(tokens[: len(tokens) // 16 * 16])


def settled(world, *op_ids, recipe_error="", bytes_error=""):
    """Let the disk answer until the operations are."""
    for _ in range(200):
        if all(each in world.client.answers for each in op_ids):
            return
        world.book.settle(error=recipe_error)
        world.store.settle(bytes_error)
        yield
    raise AssertionError("no answer")


def pinned(world, name, tokens, **options):
    op_id = world.pin(name, tokens, **options)
    yield from settled(world, op_id)
    assert world.client.answers[op_id].result["name"] == name


def reported(world, name):
    return next(entry for entry in world.pins.report(world.clock.unix()) if entry["name"] == name)


# ----------------------------------------------------------------------------------------- the way of a pin


def test_a_pin_is_computed_then_held_then_recorded_then_persisted_then_acknowledged():
    def life(world):
        yield from world.ready()
        op_id = world.pin("system", SYSTEM)
        yield
        assert not world.cache.pins()
        yield from world.until(lambda: world.book.pending)
        assert held(world, "system") == prefix(SYSTEM)
        for _ in range(5):
            yield
        assert world.store.checkpoints == []
        world.book.settle()
        yield from world.until(lambda: world.store.checkpoints)
        assert op_id not in world.client.answers
        world.store.settle()
        yield from world.answered(op_id)
        assert world.client.answers[op_id].result == {"name": "system", "tokens": 48, "blocks": 3, "durable": "recipe+bytes"}

    ends(life, max_tokens_per_step=16)


def test_a_store_that_fails_leaves_the_recipe():
    def life(world):
        yield from world.ready()
        op_id = world.pin("system", SYSTEM)
        yield from settled(world, op_id, bytes_error="no space left")
        assert world.client.answers[op_id].result["durable"] == "recipe"
        assert held(world, "system") == prefix(SYSTEM)

    ends(life)


def test_the_bytes_are_known_to_the_store_before_it_is_asked_for_them():
    def life(world):
        yield from world.ready()
        seen = []
        world.store.checkpoint_now = lambda op_id: seen.append(len(world.store.blocks)) or world.store.checkpoints.append(op_id)
        world.book.put = lambda op_id, value: (
            world.book.durable.update({value.name: value}),
            world.book.history.append((op_id, value.name)),
            world.book.written.add(op_id),
            world.inbox.put_internal(RecipeDurable(op_id)),
        )
        op_id = world.pin("system", SYSTEM)
        yield from settled(world, op_id)
        assert seen == [3]

    ends(life)


def test_a_prefix_that_is_there_is_held_without_computing():
    def life(world):
        yield from world.ready()
        yield from world.over(world.submit(SYSTEM, max_tokens=1))
        steps = world.scheduler.stats()["steps"]
        yield from pinned(world, "system", SYSTEM)
        assert world.scheduler.stats()["steps"] == steps

    ends(life)


def test_a_pin_outlives_what_would_evict_it():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "system", SYSTEM)
        for letter in b"abcdefgh":
            yield from world.over(world.submit([letter] * 90, max_tokens=2))
        request_id = world.submit(SYSTEM, max_tokens=1)
        yield from world.over(request_id)
        assert world.client.requests[request_id].terminal.usage.cached_tokens == 48
        assert reported(world, "system")["hits"] > 0

    ends(life, num_blocks=10)


def test_a_pin_waits_for_whoever_is_filling_its_last_block():
    """A background request fills the prefix a token a step; the pin neither overtakes it nor fails for want of its block."""

    def life(world):
        yield from world.ready()
        yield
        assert world.pins.num_pending == 1
        op_id = world.pin("mine", SYSTEM[:16])
        yield from settled(world, op_id)
        assert world.client.answers[op_id].result["blocks"] == 1

    ends(life, recipes=[recipe("system", SYSTEM)], max_tokens_per_step=5)


def test_tenants_hold_blocks_of_their_own():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "one", SYSTEM, salt=b"one")
        yield from pinned(world, "two", SYSTEM, salt=b"two")
        assert world.cache.pinned_blocks == 6

    ends(life)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("tokens", "code", "words"),
    [
        (SYSTEM[:15], "pin_too_short", "16 tokens, this prefix has 15"),
        ([97] * 96, "pin_capacity", "kv_memory or max_pinned_fraction"),
        ([*SYSTEM[:31], POISON, 98], "nonfinite_logits", "not finite"),
    ],
)
def test_a_pin_that_can_not_be_held_says_why_and_leaves_nothing(tokens, code, words):
    def life(world):
        yield from world.ready()
        op_id = world.pin("system", tokens)
        yield from world.answered(op_id)
        assert world.client.answers[op_id].code == code
        assert words in world.client.answers[op_id].message
        assert not world.book.history
        assert not world.cache.pins()

    ends(life, num_blocks=10)


def test_room_that_another_pin_takes_meanwhile_is_refused():
    def life(world):
        yield from world.ready()
        ops = [world.pin("one", SYSTEM), world.pin("two", OTHER)]
        yield from settled(world, *ops)
        assert sorted(type(world.client.answers[each]).__name__ for each in ops) == ["OpDone", "OpFailed"]
        assert [world.client.answers[each].code for each in ops if hasattr(world.client.answers[each], "code")] == ["pin_capacity"]
        assert world.cache.pins().keys() == world.book.durable.keys()

    ends(life, num_blocks=10)


# ---------------------------------------------------------------------------------- the same name once more


def test_a_pin_takes_the_place_of_the_one_of_its_name():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "system", SYSTEM)
        yield from pinned(world, "system", OTHER)
        assert held(world, "system") == prefix(OTHER)
        assert world.cache.pinned_blocks == 4
        assert world.book.durable["system"].token_ids == pack_tokens(OTHER)

    ends(life)


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_recipe_that_can_not_be_written_leaves_the_old_pin(is_evicted):
    def life(world):
        yield from world.ready()
        yield from pinned(world, "system", SYSTEM)
        op_id = world.pin("system", OTHER[:48])
        yield from world.until(lambda: world.book.pending)
        assert held(world, "system") == prefix(OTHER[:48])
        if is_evicted:
            for letter in b"abcdefgh":
                yield from world.over(world.submit([letter] * 90, max_tokens=2))
        yield from settled(world, op_id, recipe_error="no space left")
        assert world.client.answers[op_id].code == "storage_error"
        assert "no space left" in world.client.answers[op_id].message
        yield from world.until(lambda: "system" in world.cache.pins())
        assert held(world, "system") == prefix(SYSTEM)

    ends(life, num_blocks=12)


def test_a_recipe_that_can_not_be_written_leaves_no_new_pin():
    def life(world):
        yield from world.ready()
        op_id = world.pin("system", SYSTEM)
        yield from settled(world, op_id, recipe_error="no space left")
        assert world.client.answers[op_id].code == "storage_error"
        assert not world.cache.pins()

    ends(life)


def test_a_failed_write_takes_nothing_from_a_later_pin_of_that_name():
    def life(world):
        yield from world.ready()
        world.pin("system", SYSTEM)
        yield from world.until(lambda: len(world.book.pending) == 1)
        later = world.pin("system", OTHER, digest=b"another text side")
        yield from world.until(lambda: len(world.book.pending) == 2)
        world.book.settle(1, error="no space left")
        yield
        yield
        assert held(world, "system") == prefix(OTHER)
        yield from settled(world, later)
        assert world.client.answers[later].result["name"] == "system"

    ends(life)


def test_a_failed_write_does_not_bring_back_ids_of_another_text_side():
    def life(world):
        yield from world.ready()
        op_id = world.pin("system", OTHER)
        yield from settled(world, op_id, recipe_error="no space left")
        assert not world.cache.pins()
        assert "could not be written" in reported(world, "system")["reason"]

    old = recipe("system", SYSTEM, digest=b"another text side")
    world = World(recipes=[old])
    world.start_recipes = {}
    assert world.run(life(world), pins_not_computed={"system": "its ids are another tokenizer's"}) is LoopEnd.DRAINED


# --------------------------------------------------------------------------------------------------- unpin


def test_an_unpin_is_acknowledged_when_it_is_on_disk():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "system", SYSTEM)
        op_id = world.op(Unpin, "system")
        for _ in range(5):
            yield
        assert not world.cache.pins()
        assert op_id not in world.client.answers
        yield from settled(world, op_id)
        assert world.client.answers[op_id].result == {"name": "system"}
        again = world.op(Unpin, "system")
        yield from world.answered(again)
        assert world.client.answers[again].code == "not_found"

    ends(life)


def test_an_unpin_that_can_not_be_written_is_no_success():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "system", SYSTEM)
        op_id = world.op(Unpin, "system")
        yield
        yield from settled(world, op_id, recipe_error="no space left")
        assert world.client.answers[op_id].code == "storage_error"
        assert "system" in world.book.recipes()
        assert "system" in world.cache.pins(), "what is on disk is held"

    ends(life)


# --------------------------------------------------------------------------------------------------- start


def starting(*recipes, deadline_s=60.0, **options):
    """A world, and the work of a start that has these recipes to hold."""
    world = World(recipes=recipes, **options)
    return world, {"pins_deadline_s": world.clock.now_s + deadline_s}


def test_the_start_holds_every_recipe_the_most_important_first():
    order = []

    def life(world):
        pin = world.cache.pin
        world.cache.pin = lambda name, *rest: (pin(name, *rest), order.append(name))[0]
        yield from world.ready()
        assert held(world, "first") == prefix(SYSTEM)
        assert held(world, "second") == prefix(OTHER)
        assert reported(world, "first")["state"] == "held"
        assert not world.book.history
        assert {node.origin for node in world.cache._pins.nodes["first"]} == {BlockOrigin.RECOMPUTED}

    world, work = starting(recipe("second", OTHER, priority=1), recipe("first", SYSTEM, priority=99), max_tokens_per_step=8)
    assert world.run(life(world), **work) is LoopEnd.DRAINED
    assert order == ["first", "second"]


def test_recipes_that_can_not_be_held_do_not_keep_ready_away_and_say_why():
    def life(world):
        yield from world.ready()
        assert list(world.cache.pins()) == ["good"]
        assert "one full block" in reported(world, "short")["reason"]
        assert "max_pinned_fraction" in reported(world, "large")["reason"]
        assert "not finite" in reported(world, "poison")["reason"]
        assert reported(world, "foreign")["reason"] == "its ids are another tokenizer's"
        assert {reported(world, name)["state"] for name in ("short", "large", "poison", "foreign")} == {"not_held"}
        assert world.client.snapshots[-1].status["rehydration"]["pins_not_held"] == 4
        yield from pinned(world, "short", SYSTEM[:16])
        assert reported(world, "short")["state"] == "held"
        assert reported(world, "short")["reason"] == ""

    bad = [recipe("short", SYSTEM[:9]), recipe("large", [97] * 200), recipe("poison", [POISON] * 20), recipe("foreign", OTHER)]
    world, work = starting(recipe("good", SYSTEM), *bad, num_blocks=20)
    del world.start_recipes["foreign"]
    assert world.run(life(world), pins_not_computed={"foreign": "its ids are another tokenizer's"}, **work) is LoopEnd.DRAINED
    assert world.states == [State.READY, State.DRAINING]


@pytest.mark.parametrize("act", ["unpin", "pin"])
def test_what_the_start_still_computes_gives_way_to_what_is_asked_now(act):
    def life(world):
        yield from world.ready()
        assert reported(world, "system")["state"] == "computing"
        op_id = world.op(Unpin, "system") if act == "unpin" else world.pin("system", OTHER[:16])
        yield from settled(world, op_id)
        yield from world.until(lambda: not world.scheduler.has_work())
        assert [info.token_ids for info in world.cache.pins().values()] == ([] if act == "unpin" else [prefix(OTHER[:16])])
        assert world.book.recipes().keys() == world.cache.pins().keys()

    world, work = starting(recipe("system", SYSTEM), deadline_s=0.0, max_tokens_per_step=4)
    assert world.run(life(world), **work) is LoopEnd.DRAINED


# --------------------------------------------------------------------------------------------------- drain


def test_a_drain_waits_for_a_pin_on_its_way():
    def life(world):
        yield from world.ready()
        op_id = world.pin("system", SYSTEM)
        yield
        world.op(Drain, 60.0)
        yield from settled(world, op_id)
        assert world.client.answers[op_id].result["durable"] == "recipe+bytes"

    ends(life, max_tokens_per_step=4)


def test_a_pin_that_the_deadline_of_a_drain_overtakes_is_told():
    def life(world):
        yield from world.ready()
        op_id = world.pin("system", SYSTEM)
        yield
        world.op(Drain, 0.02)
        yield from world.answered(op_id)
        assert world.client.answers[op_id].code == "draining"

    ends(life, max_tokens_per_step=1)


def test_answers_of_the_disk_that_nobody_waits_for_are_ignored():
    def life(world):
        yield from world.ready()
        world.send(RecipeDurable(b"nobody"))
        op_id = world.op(Query, "prefixes")
        yield from world.answered(op_id)

    ends(life)


# ----------------------------------------------------------------------------------------- pins that end by themselves


def passed(world, seconds):
    end_s = world.clock.now_s + seconds
    yield from world.until(lambda: world.clock.now_s >= end_s, max_rounds=5000)


def test_a_pin_with_an_end_is_unpinned_then_durably_and_nobody_is_told():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "short", SYSTEM, expires_unix_s=world.clock.unix() + 5.0)
        yield from pinned(world, "long", OTHER)
        assert 4.0 < reported(world, "short")["expires_in_s"] <= 5.0
        assert reported(world, "long")["expires_in_s"] is None
        yield from passed(world, 3.0)
        assert set(world.cache.pins()) == {"short", "long"}
        yield from passed(world, 4.0)
        assert set(world.cache.pins()) == {"long"}
        num_answers = len(world.client.answers)
        world.book.settle()
        yield from passed(world, 2.0)
        assert set(world.book.durable) == {"long"}
        assert len(world.client.answers) == num_answers
        assert world.cache.num_cached >= 3  # its blocks stay until the room is needed

    ends(life)


def test_the_acknowledgement_says_when_a_pin_ends():
    def life(world):
        yield from world.ready()
        op_id = world.pin("short", SYSTEM, expires_unix_s=2.0e9)
        yield from settled(world, op_id)
        assert world.client.answers[op_id].result["expires_unix_s"] == 2.0e9

    ends(life)


def test_an_end_that_the_disk_refuses_is_tried_again_and_the_pin_stays_out_of_memory():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "short", SYSTEM, expires_unix_s=world.clock.unix() + 1.0)
        yield from passed(world, 3.0)
        num_removals = len(world.book.history)
        world.book.settle(error="no space left")
        yield from passed(world, 10.0)
        assert len(world.book.history) == num_removals
        assert not world.cache.pins()
        yield from passed(world, 60.0)
        assert len(world.book.history) == num_removals + 1
        world.book.settle()
        yield
        assert not world.book.durable

    ends(life)


def test_a_pin_anew_outlives_the_end_of_the_old_one():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "system", SYSTEM, expires_unix_s=world.clock.unix() + 3.0)
        yield from pinned(world, "system", SYSTEM)
        yield from passed(world, 10.0)
        assert set(world.cache.pins()) == set(world.book.durable) == {"system"}

    ends(life)


def test_a_start_restores_no_pin_whose_time_is_over_and_removes_it():
    recipes = [recipe("over", SYSTEM, expires_unix_s=1.7e9 + 999.0), recipe("not_yet", OTHER, expires_unix_s=1.7e9 + 99_999.0)]

    def life(world):
        world.book.settle()
        yield from world.ready()
        assert set(world.cache.pins()) == {"not_yet"}
        assert set(world.book.durable) == {"not_yet"}
        assert [entry["name"] for entry in world.pins.report(world.clock.unix())] == ["not_yet"]

    ends(life, recipes=recipes)


# ----------------------------------------------------------------------------------------- how requests want their blocks kept


def test_a_requests_priority_and_its_end_decide_what_leaves():
    def life(world):
        yield from world.ready()
        yield from world.over(world.submit(SYSTEM, max_tokens=1, cache_priority=90, cache_ttl_s=20.0))
        yield from world.over(world.submit(OTHER, max_tokens=1, cache_priority=10))
        kept = [world.cache.match(pack_tokens([*each, 1]), namespace_of(b"", b"")).nodes for each in (SYSTEM, OTHER)]
        assert [{node.priority for node in nodes} for nodes in kept] == [{90}, {10}]
        yield from passed(world, 15.0)
        assert {node.priority for node in kept[0]} == {90}
        yield from passed(world, 10.0)
        assert {node.priority for node in kept[0]} == {0}

    ends(life)
