"""Forgetting through the loop, and that a tenant learns nothing of another's prefixes: neither by time nor by report."""

from __future__ import annotations

import pytest
from engine_world import World, recipe

from kvd.cache.tenants import tenant_salt
from kvd.commands import ForgetDone, ForgetPrefixes, Query
from kvd.engine.loop import LoopEnd
from kvd.types import pack_tokens

SYSTEM = list(b"You are a helpful assistant, and you answer in rhyme. Always.")
OTHER = list(b"You are a terse machine; you answer in numbers, and in nothing else.")
ACME, RIVAL = tenant_salt("acme", b""), tenant_salt("rival", b"")


def ends(life, **options):
    world = World(**options)
    assert world.run(life(world)) is LoopEnd.DRAINED
    return world


def pinned(world, name, tokens, **options):
    op_id = world.pin(name, tokens, **options)
    for _ in range(300):
        if op_id in world.client.answers:
            return
        world.book.settle()
        world.store.settle()
        yield


def asked(world, tokens, salt, **options):
    request_id = world.submit(tokens, tenant_salt=salt, **options)
    yield from world.over(request_id)


def forgotten(world, *args, error=""):
    op_id = world.op(ForgetPrefixes, *args)
    yield from world.until(lambda: world.store.forgets)
    assert op_id not in world.client.answers, "not before it is durable"
    world.store.settle_forget(error)
    yield from world.answered(op_id)
    world.last = world.client.answers[op_id]


def test_a_tenants_prefixes_and_pins_leave_memory_and_others_stay():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "acme/system", SYSTEM, salt=ACME)
        yield from pinned(world, "rival/system", SYSTEM, salt=RIVAL)
        yield from asked(world, OTHER, ACME)
        yield from forgotten(world, "acme")
        assert world.last.result["pins"] == 1
        assert world.last.result["blocks"] >= 3 + 4
        assert set(world.cache.pins()) == {"rival/system"}
        assert {node.namespace.tenant_salt for node in world.cache._blocks.tree.nodes()} == {RIVAL}
        assert set(world.book.recipes()) == {"rival/system"}

    ends(life)


def test_running_and_waiting_requests_go_on_and_leave_nothing():
    def life(world):
        yield from world.ready()
        ids = [world.submit(SYSTEM, 40, tenant_salt=ACME) for _ in range(6)]
        for _ in range(8):
            yield
        assert any(node.namespace.tenant_salt == ACME for node in world.cache._blocks.tree.nodes())
        yield from forgotten(world, "acme")
        assert any(world.client.requests[each].terminal is None for each in ids), "some still run"
        yield from world.over(*ids)
        assert not [node for node in world.cache._blocks.tree.nodes() if node.namespace.tenant_salt == ACME]

    ends(life, max_tokens_per_step=16)


def test_pins_on_their_way_are_told_that_their_prefix_was_forgotten():
    def life(world):
        yield from world.ready()
        computing = world.pin("acme/a", SYSTEM, salt=ACME)
        yield
        yield from forgotten(world, "acme", ACME, pack_tokens(SYSTEM[:32]))
        assert world.client.answers[computing].code == "not_found"
        recording = world.pin("acme/b", SYSTEM, salt=ACME)
        yield from world.until(lambda: world.book.pending)
        yield from forgotten(world, "acme", ACME, pack_tokens(SYSTEM[:32]))
        assert world.client.answers[recording].code == "not_found"
        assert not world.book.recipes()
        assert not world.cache.pins()
        yield from pinned(world, "acme/a", SYSTEM, salt=ACME)
        assert set(world.cache.pins()) == {"acme/a"}

    ends(life, max_tokens_per_step=8)


@pytest.mark.parametrize("num_forgets", [1, 2])
def test_a_pin_on_its_way_outlives_that_more_than_its_prefix_is_forgotten(num_forgets):
    """Its blocks lead nowhere but to the forgotten ones, and go with them; nobody was told that they are not wanted."""

    def life(world):
        yield from world.ready()
        pin = world.pin("acme/a", SYSTEM[:32], salt=ACME)
        for _ in range(num_forgets):
            for _ in range(3):
                yield
            assert world.pins.has_open_operations
            yield from forgotten(world, "acme", ACME, pack_tokens(SYSTEM[:48]))
            assert pin not in world.client.answers
        for _ in range(300):
            if pin in world.client.answers:
                break
            world.book.settle()
            world.store.settle()
            yield
        assert world.client.answers[pin].result["blocks"] == 2
        assert {name: info.num_tokens for name, info in world.cache.pins().items()} == {"acme/a": 32}

    ends(life, max_tokens_per_step=8)


def test_a_pin_that_a_start_computes_outlives_that_more_than_its_prefix_is_forgotten():
    def life(world):
        for _ in range(4):
            yield
        assert world.pins.num_pending == 1
        yield from forgotten(world, "acme", ACME, pack_tokens(SYSTEM[:48]))
        yield from world.until(lambda: not world.pins.num_pending)
        assert set(world.cache.pins()) == {"acme/a"}

    world = World(recipes=[recipe("acme/a", SYSTEM[:32], salt=ACME)], max_tokens_per_step=8)
    assert world.run(life(world)) is LoopEnd.DRAINED


def test_what_is_being_forgotten_can_not_be_pinned_until_that_is_over():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "acme/a", SYSTEM, salt=ACME)
        op_id = world.op(ForgetPrefixes, "acme")
        yield from world.until(lambda: world.store.forgets)
        refused = world.pin("acme/a", SYSTEM, salt=ACME)
        yield from world.answered(refused)
        assert world.client.answers[refused].code == "overloaded"
        yield from pinned(world, "rival/a", SYSTEM, salt=RIVAL)
        world.store.settle_forget("the disk is on fire")
        yield from world.answered(op_id)
        assert world.client.answers[op_id].code == "storage_error"
        world.store.unfinished.add(ACME)  # whatever completes it would take the pin
        refused = world.pin("acme/a", SYSTEM, salt=ACME)
        yield from world.answered(refused)
        assert world.client.answers[refused].code == "overloaded"
        world.store.unfinished.clear()
        yield from pinned(world, "acme/a", SYSTEM, salt=ACME)
        assert set(world.book.recipes()) == {"acme/a", "rival/a"}

    ends(life)


@pytest.mark.parametrize("num_tokens", [1, 15])
def test_less_than_a_block_is_refused(num_tokens):
    def life(world):
        yield from world.ready()
        op_id = world.op(ForgetPrefixes, "acme", ACME, pack_tokens(SYSTEM[:num_tokens]))
        yield from world.answered(op_id)
        assert world.client.answers[op_id].code == "pin_too_short"
        assert not world.store.forgets

    ends(life)


def test_reports_name_a_tenants_own_alone():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "acme/system", SYSTEM, salt=ACME)
        yield from pinned(world, "system", OTHER)
        for salt in (ACME, b""):
            yield from asked(world, SYSTEM, salt)
            yield from asked(world, SYSTEM, salt)
        reports = {}
        for tenant in ("acme", "rival", ""):
            op_id = world.op(Query, "prefixes", tenant)
            yield from world.answered(op_id)
            reports[tenant] = world.client.answers[op_id].result
        assert [pin["name"] for pin in reports["acme"]["pins"]] == ["system"]
        assert [pin["tokens"] for pin in reports["acme"]["pins"]] == [48]
        assert reports["rival"] == {"pins": [], "hottest": []}
        assert [pin["tokens"] for pin in reports[""]["pins"]] == [64]
        assert reports["acme"]["hottest"]
        assert reports[""]["hottest"]

    ends(life)


def schedule_of(warm_salt, salt):
    """Token counts of each step for a request under ``salt`` when ``warm_salt`` has the same prompt cached."""
    counts = []

    def life(world):
        yield from world.ready()
        for _ in range(2):
            yield from asked(world, SYSTEM, warm_salt)
        original = world.scheduler.schedule

        def schedule():
            step = original()
            if step is not None:
                counts.append(([row.num_tokens for row in step.started], list(step.continued.num_tokens)))
            return step

        world.scheduler.schedule = schedule
        yield from asked(world, SYSTEM, salt)

    ends(life, max_tokens_per_step=16)
    return counts


def test_whether_another_tenant_has_a_prefix_cached_does_not_show_in_the_schedule():
    cold = schedule_of(tenant_salt("nobody", b""), RIVAL)
    assert schedule_of(ACME, RIVAL) == cold
    assert schedule_of(b"", RIVAL) == cold
    assert schedule_of(tenant_salt("rival", b"night"), RIVAL) == cold
    assert sum(len(started) for started, _ in schedule_of(RIVAL, RIVAL)) == 1
    assert schedule_of(RIVAL, RIVAL) != cold, "its own it does see, else this test would show nothing"


def test_a_start_restores_a_tenants_pins_under_its_own_salt():
    def life(world):
        yield from world.ready()
        assert {node.namespace.tenant_salt for node in world.cache._blocks.tree.nodes()} == {ACME, RIVAL}
        assert world.cache.pinned_blocks == 6

    world = World(recipes=[recipe("acme/system", SYSTEM, salt=ACME), recipe("rival/system", SYSTEM, salt=RIVAL)])
    assert world.run(life(world)) is LoopEnd.DRAINED


def test_what_storage_took_a_recipe_of_is_held_no_more():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "acme/a", SYSTEM, salt=ACME)
        yield from pinned(world, "rival/a", SYSTEM, salt=RIVAL)
        recording = world.pin("rival/b", OTHER, salt=RIVAL)
        yield from world.until(lambda: world.book.pending)
        del world.book.durable["acme/a"]
        world.inbox.put_internal(ForgetDone(b""))  # a forget that had failed was tried again
        yield from world.until(lambda: "acme/a" not in world.cache.pins())
        assert set(world.cache.pins()) == {"rival/a", "rival/b"}
        world.book.settle()
        yield from world.until(lambda: world.store.checkpoints)
        world.store.settle()
        yield from world.answered(recording)
        assert not world.client.answers[recording].result.get("error")

    ends(life)


def test_a_replaced_pin_that_is_being_forgotten_is_not_held_again():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "acme/a", SYSTEM, salt=ACME)
        world.store.unfinished.add(ACME)
        kept = world.book.recipes()
        world.cache.unpin("acme/a")
        assert world.pins.restore(kept) == []
        assert not world.cache.pins()

    ends(life)


def test_more_forgets_than_can_be_kept_are_refused_before_anything_is_forgotten():
    def life(world):
        yield from world.ready()
        yield from pinned(world, "acme/a", SYSTEM, salt=ACME)
        world.store.may_forget = False
        op_id = world.op(ForgetPrefixes, "acme")
        yield from world.answered(op_id)
        assert world.client.answers[op_id].code == "overloaded"
        assert set(world.cache.pins()) == {"acme/a"}

    ends(life)
