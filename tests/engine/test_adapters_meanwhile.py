"""What happens while an adapter is read or waited for: unloads, evictions, failing loads, forgets, drains; and that the wait counts."""

from __future__ import annotations

import hashlib

import adapters_world
import engine_world
import pytest
from adapters_world import PROMPT
from engine_world import recipe

from kvd.cache.tenants import Selection, tenant_salt
from kvd.commands import ForgetPrefixes, LoadAdapter, PinPrefix, Submit, UnloadAdapter
from kvd.engine.loop import LoopEnd, State
from kvd.types import SamplingParams, pack_tokens

ACME = tenant_salt("acme", b"")


def internal(name, *, adapter=b"", salt=b""):
    return Submit(
        request_id=name.rjust(16, b"."),
        token_ids=pack_tokens(PROMPT),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=1,
        tenant_salt=salt,
        adapter=adapter,
    )


# ------------------------------------------------------------------------------------ reads that are overtaken


def test_an_adapter_that_leaves_between_its_second_read_and_the_answer_is_there_again():
    world = adapters_world.World(poet="verse")
    first = world.ask("poet", max_tokens=4)
    world.read()
    world.operate(UnloadAdapter, "poet")
    second = world.ask("poet", max_tokens=4)
    assert len(world.disk.reads) == 1, "the name means nothing any more, and is read while the adapter is still in use"
    while first not in world.ends:
        world.step()
    assert world.loaded() == {}
    world.finish()
    assert world.tokens[first] == world.tokens[second]
    assert world.loaded() == {"poet": 0}


def test_an_adapter_that_makes_room_while_it_is_read_again_comes_back():
    world = adapters_world.World(poet="verse", clerk="prose", judge="law")
    for name in ("poet", "clerk"):
        world.operate(LoadAdapter, name)
        world.read()
    world.operate(LoadAdapter, "judge")
    again = world.operate(LoadAdapter, "poet")
    world.read()
    assert world.loaded() == {"clerk": 0, "judge": 0}
    world.read()
    assert world.answers[again]["digest"] == hashlib.sha256(b"verse").hexdigest()
    assert (world.loaded(), world.disk.found) == ({"judge": 0, "poet": 0}, {})


def test_one_of_two_names_finds_no_room_and_the_other_one_does():
    world = adapters_world.World(a="1", b="2", poet="verse", bard="verse")
    for name in ("a", "b"):
        world.operate(LoadAdapter, name)
        world.read()
    poet, bard = world.operate(LoadAdapter, "poet"), world.operate(LoadAdapter, "bard")
    running = [world.ask(name, max_tokens=length) for name, length in (("a", 2), ("b", 40))]
    world.read()
    assert world.answers[poet] == "adapter_capacity"
    while running[0] not in world.ends:
        world.step()
    world.read()
    assert world.answers[bard]["name"] == "bard"
    assert (world.loaded(), world.disk.found) == ({"b": 1, "bard": 0}, {})


def test_a_failing_load_harms_nobody_who_waits_for_what_is_loaded():
    world = adapters_world.World(max_adapters=3, a="1", c="3")
    world.operate(LoadAdapter, "a")
    world.read()
    world.disk.contents["a"] = "damaged"
    load = world.operate(LoadAdapter, "a")
    slow = world.ask("c")
    world.clock.now_s += 3
    held_up = world.ask("a")
    assert held_up not in world.adapters.uses, "c has waited for long"
    world.read()
    assert world.answers[load] == "adapter_unusable"
    assert held_up not in world.ends
    world.finish()
    assert (world.ends[slow], world.ends[held_up]) == ("done", "done")


# ------------------------------------------------------------------------------------ who waits


def test_the_wait_counts_for_the_queue_and_for_both_times():
    world = adapters_world.World(poet="verse")
    waiting = world.ask("poet")
    impatient, late = world.ask("poet", queue_timeout_s=4.0), world.ask("poet", deadline_s=5.0)
    world.clock.now_s += 3
    world.take(world.adapters.expire())
    world.read()
    assert world.scheduler.due_in_s() == pytest.approx(1.0)
    world.finish()
    assert {world.ends[each] for each in (waiting, impatient, late)} == {"done"}
    assert world.usage[waiting].queue_ms == pytest.approx(3000)


def test_who_waits_for_an_adapter_rises_in_the_queue_meanwhile():
    world = adapters_world.World(max_running=1, ageing_s=10.0, poet="verse")
    early = world.ask("poet", max_tokens=2, priority=2)
    world.clock.now_s += 25
    urgent = world.ask(max_tokens=2, priority=1)
    world.read()
    world.finish()
    assert list(world.ends) == [early, urgent]


def test_what_was_forgotten_while_its_request_waited_stays_forgotten():
    world = adapters_world.World(poet="verse")
    forgotten = world.ask("poet", tenant_salt=ACME)
    kept = world.ask("poet", max_tokens=2)
    world.take(world.adapters.forget(Selection("acme", ACME, pack_tokens(PROMPT[:32]))))
    world.finish()
    assert (world.ends[forgotten], world.ends[kept]) == ("done", "done")
    again, too = world.ask("poet", tenant_salt=ACME), world.ask("poet")
    world.finish()
    assert (world.usage[again].cached_tokens, world.usage[too].cached_tokens) == (0, 64)


def test_of_what_is_forgotten_no_pin_begins_that_waited_for_its_adapter():
    world = adapters_world.World(poet="verse")
    begun = []
    pins = {}
    for name, salt in (("acme/p", ACME), ("q", b"")):
        command = PinPrefix(world.id(), recipe(name, PROMPT, salt=salt, adapter_name="poet"))
        pins[name] = command.op_id
        world.take(world.adapters.pin(command, lambda command: begun.append(command.recipe.name) or []))
    world.take(world.adapters.forget(Selection("acme")))
    assert world.answers == {pins["acme/p"]: "not_found"}
    world.read()
    assert begun == ["q"]


def test_names_that_no_pin_knows_are_not_kept_for_what_is_gone():
    world = adapters_world.World(poet="verse")
    world.operate(LoadAdapter, "poet")
    world.read()
    command = internal(b"by digest", adapter=hashlib.sha256(b"verse").digest())
    world.take(world.adapters.submit(command, internal=True))
    assert world.ends == {command.request_id: "not_found"}


# ------------------------------------------------------------------------------------ in the loop


class SilentDisk:
    """A disk that never answers."""

    def __init__(self, world):
        self.reads = []

    def read(self, read_id, name):
        self.reads.append(name)


def test_a_start_waits_for_no_adapter_beyond_its_time_and_a_drain_for_none():
    digest = hashlib.sha256(b"verse").digest()
    world = engine_world.World(
        make_adapters=SilentDisk, recipes=[recipe("p", PROMPT, adapter_name="poet", adapter=digest)], drain_timeout_s=30.0
    )
    began_s = world.clock.now_s

    def life(world):
        yield from world.ready()
        assert began_s + 0.5 <= world.clock.now_s < began_s + 1.5
        yield

    recompute = [internal(b"again", adapter=digest)]
    times = {"pins_deadline_s": began_s + 0.5, "recompute_deadline_s": began_s + 0.5}
    assert world.run(life(world), recompute=recompute, **times) is LoopEnd.DRAINED
    assert world.states == [State.READY, State.DRAINING]
    assert world.clock.now_s < began_s + 3


def test_a_forget_reaches_pins_that_wait_for_their_adapter():
    digest = hashlib.sha256(b"verse").digest()
    start = recipe("acme/p", PROMPT, salt=ACME, adapter_name="poet", adapter=digest)
    world = engine_world.World(make_adapters=SilentDisk, recipes=[start])

    def life(world):
        yield from world.ready()
        asked = world.pin("acme/q", PROMPT, salt=ACME, adapter_name="poet")
        yield
        assert world.adapters.report()["waiting"] == 2
        forget = world.op(ForgetPrefixes, "acme")
        yield from world.until(lambda: world.store.forgets)
        world.store.settle_forget()
        yield from world.answered(asked, forget)
        assert world.client.answers[asked].code == "not_found"
        assert not world.adapters.has_waiting

    assert world.run(life(world), pins_deadline_s=world.clock.now_s + 0.5) is LoopEnd.DRAINED
