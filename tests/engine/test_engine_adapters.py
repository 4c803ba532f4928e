"""Adapters before the scheduler: read on demand, at most so many at once, every request answered once, and no block of one adapter used by another."""

from __future__ import annotations

import hashlib

from adapters_world import PROMPT, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd.commands import AdapterNames, ListAdapters, LoadAdapter, PinPrefix, Recipe, Submit, UnloadAdapter
from kvd.engine.adapters import Adapters
from kvd.types import SamplingParams, pack_tokens


def test_a_request_waits_for_its_adapter_and_others_do_not():
    world = World(poet="verse")
    base, poet = world.ask(), world.ask("poet")
    while world.step():
        pass
    assert (world.ends, world.tokens[poet]) == ({base: "done"}, b"")
    world.finish()
    assert world.ends[poet] == "done"
    assert len(world.tokens[poet]) == len(world.tokens[base])
    assert world.tokens[poet] != world.tokens[base]
    assert world.loaded() == {"poet": 0}


def test_the_same_adapter_again_finds_its_own_blocks_and_another_one_nobodys():
    world = World(poet="verse", clerk="prose")
    asked = []
    for name in ("poet", "clerk", "poet", "", ""):
        asked.append(world.ask(name))
        world.finish()
    assert [world.usage[each].cached_tokens > 0 for each in asked] == [False, False, True, False, True]
    assert world.tokens[asked[0]] == world.tokens[asked[2]]
    assert len({world.tokens[each] for each in asked}) == 3


def test_what_was_trained_anew_under_the_name_uses_nothing_of_the_old():
    world = World(poet="verse")
    old = world.ask("poet")
    world.finish()
    world.disk.contents["poet"] = "better verse"
    same = world.ask("poet")
    world.finish()
    op_id = world.operate(LoadAdapter, "poet")
    running = world.ask("poet", max_tokens=40)
    world.finish()
    new = world.ask("poet")
    world.finish()
    assert world.answers[op_id]["digest"] == hashlib.sha256(b"better verse").hexdigest()
    assert world.tokens[old] == world.tokens[same] == world.tokens[running][: len(world.tokens[old])] != world.tokens[new]
    assert world.usage[same].cached_tokens
    assert not world.usage[new].cached_tokens
    assert world.loaded() == {"poet": 0}
    assert len(world.disk.packed) == 1


def test_who_runs_keeps_the_old_one_while_the_name_means_the_new_one():
    world = World(poet="verse")
    world.finish()
    old = world.ask("poet", max_tokens=30)
    world.read()
    world.step()
    world.disk.contents["poet"] = "better verse"
    world.operate(LoadAdapter, "poet")
    world.read()
    assert world.loaded() == {"poet": 0}
    (unloading,) = world.adapters.report()["unloading"]
    assert unloading == {"digest": hashlib.sha256(b"verse").hexdigest(), "rank": 8, "bytes": 1000, "requests": 1}
    assert (world.listed("poet"), world.adapters.stats()["loaded"]) == ({"poet": "loaded"}, 2)
    new = world.ask("poet", max_tokens=30)
    world.finish()
    assert world.tokens[old] != world.tokens[new]
    assert (world.loaded(), world.adapters.report()["unloading"]) == ({"poet": 0}, [])


def test_the_longest_idle_makes_room_and_the_used_ones_stay():
    world = World(a="1", b="2", c="3")
    for name in ("a", "b", "a"):
        world.ask(name)
        world.finish()
    world.ask("c")
    world.finish()
    assert world.loaded() == {"a": 0, "c": 0}
    busy = [world.ask(name, max_tokens=50) for name in ("a", "c")]
    world.step()
    third = world.ask("b")
    assert not world.disk.reads
    world.finish()
    assert {world.ends[each] for each in (*busy, third)} == {"done"}
    assert "b" in world.loaded()
    assert world.adapters.stats() == {"loaded": 2, "loads": 4, "evictions": 2, "requests": 7, "waiting": 0}


def test_who_has_waited_long_is_not_passed_any_more():
    world = World(max_adapters=1, a="1", b="2")
    first = world.ask("a", max_tokens=60)
    world.read()
    world.step()
    waiting = world.ask("b")
    passing = world.ask("a")
    world.step()
    assert world.loaded() == {"a": 2}
    world.clock.now_s += 3
    late = world.ask("a")
    assert world.loaded() == {"a": 2}
    order = []
    for _ in range(300):
        order += [each for each in world.ends if each not in order]
        if world.disk.reads:
            world.read()
        else:
            world.step()
    assert order.index(waiting) < order.index(late)
    assert set(order) == {first, waiting, passing, late}
    assert set(world.ends.values()) == {"done"}


def test_what_is_not_there_or_can_not_be_used_fails_those_who_wait_for_it_alone():
    world = World(max_adapters=4, broken="damaged", poet="verse")
    missing, broken, poet = world.ask("missing"), world.ask("broken"), world.ask("poet")
    op_id = world.operate(LoadAdapter, "missing")
    world.finish()
    assert (world.ends[missing], world.ends[broken], world.ends[poet]) == ("not_found", "adapter_unusable", "done")
    assert world.answers[op_id] == "not_found"
    assert world.loaded() == {"poet": 0}


def test_a_failed_load_leaves_what_is_loaded():
    world = World(poet="verse")
    world.operate(LoadAdapter, "poet")
    world.finish()
    world.disk.contents["poet"] = "damaged"
    op_id = world.operate(LoadAdapter, "poet")
    world.finish()
    assert world.answers[op_id] == "adapter_unusable"
    request_id = world.ask("poet")
    world.finish()
    assert world.ends[request_id] == "done"


def test_two_names_of_the_same_contents_are_one_adapter():
    world = World(max_adapters=1, poet="verse", bard="verse")
    first, second = world.ask("poet"), world.ask("bard")
    world.finish()
    assert world.tokens[first] == world.tokens[second]
    assert (world.loaded(), world.disk.found) == ({"poet": 0, "bard": 0}, {})
    world.operate(UnloadAdapter, "poet")
    assert world.loaded() == {"bard": 0}


def test_load_and_unload_say_what_they_did():
    world = World(max_adapters=1, a="1", b="2")
    loading = world.operate(LoadAdapter, "a")
    world.read()
    assert world.answers[loading] == {
        "name": "a",
        "state": "loaded",
        "digest": hashlib.sha256(b"1").hexdigest(),
        "rank": 8,
        "bytes": 1000,
        "requests": 0,
    }
    request_id = world.ask("a", max_tokens=30)
    world.step()
    assert world.answers[world.operate(LoadAdapter, "b")] == "adapter_capacity"
    unloading = world.operate(UnloadAdapter, "a")
    assert (world.answers[unloading]["state"], world.answers[unloading]["requests"]) == ("in use", 1)
    assert (world.listed("a", "b"), len(world.adapters.report()["unloading"])) == ({"a": "on disk", "b": "on disk"}, 1)
    assert world.listed("b") == {"b": "on disk"}, "nobody may name what has no directory and was unloaded"
    assert world.answers[world.operate(UnloadAdapter, "a")] == "not_found"
    world.finish()
    assert (world.ends[request_id], world.loaded(), world.disk.packed) == ("done", {}, set())


def test_the_list_holds_what_is_loaded_and_what_is_on_disk():
    world = World(a="1")
    world.operate(LoadAdapter, "a")
    world.read()
    assert list(world.listed("a", "b").items()) == [("a", "loaded"), ("b", "on disk")]
    op_id = world.operate(ListAdapters)
    world.take(world.adapters.handle(AdapterNames(world.disk.lists.pop(), error="it is gone")))
    assert world.answers[op_id] == "adapter_unusable"


def test_the_list_says_why_one_can_not_be_used_until_it_could_be():
    def listed(*names):
        op_id = world.operate(ListAdapters)
        world.take(world.adapters.handle(AdapterNames(world.disk.lists.pop(), names)))
        return {each["name"]: (each["state"], each.get("error", "")) for each in world.answers[op_id]["adapters"]}

    world = World(poet="damaged", clerk="1")
    assert listed("poet", "clerk") == {"poet": ("on disk", ""), "clerk": ("on disk", "")}
    world.ask("poet")
    world.ask("missing")
    world.finish()
    assert listed("poet", "clerk") == {"poet": ("unusable", "adapter poet: damaged"), "clerk": ("on disk", "")}
    world.disk.contents["poet"] = "verse"
    request_id = world.ask("poet")
    world.finish()
    assert world.ends[request_id] == "done", "it is tried again"
    assert listed("poet")["poet"] == ("loaded", "")
    world.disk.contents["poet"] = "damaged"
    world.operate(LoadAdapter, "poet")
    world.finish()
    assert listed("poet")["poet"] == ("loaded", "")
    world.operate(UnloadAdapter, "poet")
    assert listed("poet")["poet"] == ("unusable", "adapter poet: damaged")
    listed("clerk")
    assert listed("poet")["poet"] == ("on disk", ""), "it was away meanwhile"


def test_without_a_directory_there_are_none():
    world = World()
    world.adapters = Adapters(scheduler=world.scheduler, source=None, clock=world.clock, max_adapters=2, max_waiting=8)
    request_id, op_id = world.ask("poet"), world.operate(LoadAdapter, "poet")
    assert (world.ends[request_id], world.answers[op_id]) == ("not_found", "not_found")
    assert world.answers[world.operate(ListAdapters)] == {"adapters": [], "max_adapters": 0}
    base = world.ask()
    world.finish()
    assert world.ends[base] == "done"
    assert world.adapters.report() == {"max_adapters": 0, "loaded": [], "unloading": [], "waiting": 0}


def test_times_bounds_and_aborts_count_while_a_request_waits():
    world = World(max_waiting=3, poet="verse")
    late, impatient, aborted, refused = (
        world.ask("poet", deadline_s=5.0),
        world.ask("poet", queue_timeout_s=1.0),
        world.ask("poet", num_choices=2),
        world.ask("poet"),
    )
    assert world.ends == {refused: "overloaded"}
    world.clock.now_s += 1.5
    world.take(world.adapters.expire())
    world.take(world.adapters.abort(aborted))
    assert world.ends == {refused: "overloaded", impatient: "queue_timeout", aborted: "done"}
    assert world.adapters.abort(aborted) == []
    world.clock.now_s += 4
    world.take(world.adapters.expire())
    assert world.ends[late] == "deadline_exceeded"
    internal = Submit(request_id=world.id(), token_ids=pack_tokens(PROMPT), sampling=SamplingParams(), max_tokens=1, adapter_name="poet")
    world.take(world.adapters.submit(internal, internal=True))
    world.take(world.adapters.abort(internal.request_id))
    assert world.ends[internal.request_id] == "done"
    ended = world.ask("poet")
    world.take(world.adapters.end_waiting("draining", "it ends"))
    assert world.ends[ended] == "draining"
    assert not world.adapters.has_waiting


def test_credit_that_comes_while_a_request_waits_is_not_lost():
    world = World(poet="verse")
    request_id = world.ask("poet", credit_tokens=1, max_tokens=6)
    assert world.adapters.grant(request_id, 100)
    assert not world.adapters.grant(b"another" + bytes(9), 100)
    world.finish()
    assert world.ends[request_id] == "done"
    assert len(world.tokens[request_id]) == 6 * 4


def test_a_pin_gets_the_digest_of_its_adapter():
    world = World(poet="verse")
    pinned = []
    recipe = Recipe(name="p", token_ids=pack_tokens(PROMPT), tokenizer_digest=b"", adapter_name="poet")
    world.take(world.adapters.pin(PinPrefix(world.id(), recipe), lambda command: pinned.append(command.recipe) or []))
    assert not pinned
    world.read()
    assert [each.adapter for each in pinned] == [hashlib.sha256(b"verse").digest()]
    op_id = world.id()
    missing = Recipe(name="q", token_ids=b"", tokenizer_digest=b"", adapter_name="missing")
    world.take(world.adapters.pin(PinPrefix(op_id, missing), lambda _: []))
    world.read()
    assert world.answers[op_id] == "not_found"


def test_a_start_reads_what_pins_use_and_computes_nothing_with_what_has_changed():
    world = World(max_adapters=2, a="1", b="2", c="3")
    recipes = [
        Recipe(name=name, token_ids=b"", tokenizer_digest=b"", adapter_name=name, adapter=hashlib.sha256(content).digest())
        for name, content in (("a", b"1"), ("b", b"old"), ("c", b"3"))
    ]
    world.adapters.preload(recipes)
    assert [name for name, _ in world.disk.reads] == ["a", "b"]
    assert world.adapters.is_reading
    known, changed, unknown = (
        Submit(
            request_id=world.id(),
            token_ids=pack_tokens(PROMPT),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=1,
            adapter=hashlib.sha256(content).digest(),
        )
        for content in (b"1", b"old", b"never seen")
    )
    for command in (known, changed, unknown):
        world.take(world.adapters.submit(command, internal=True, background=True))
    world.finish()
    assert [world.ends[each.request_id] for each in (known, changed, unknown)] == ["done", "not_found", "not_found"]


class AdaptersMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: one end for each request, never too many adapters, outputs of the adapter that was meant."""

    names = st.sampled_from("abcd")

    @initialize(max_adapters=st.integers(1, 3))
    def begin(self, max_adapters):
        self.max_adapters = max_adapters
        self.world = World(max_adapters, a="1", b="2", c="3")
        self.asked = set()

    @rule(name=names | st.just(""), max_tokens=st.integers(1, 20))
    def ask(self, name, max_tokens):
        self.asked.add(self.world.ask(name, max_tokens=max_tokens))

    @rule(name=names)
    def load(self, name):
        self.world.operate(LoadAdapter, name)

    @rule(name=names)
    def unload(self, name):
        self.world.operate(UnloadAdapter, name)

    @rule(name=names, content=st.sampled_from(["1", "2", "new", "damaged", None]))
    def train(self, name, content):
        self.world.disk.contents[name] = content

    @rule()
    def read(self):
        if self.world.disk.reads:
            self.world.read()

    @rule(num_steps=st.integers(1, 10))
    def run_steps(self, num_steps):
        for _ in range(num_steps):
            self.world.step()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds):
        self.world.clock.now_s += seconds

    @rule(choice=st.integers(0, 100))
    def abort(self, choice):
        if self.asked:
            request_id = sorted(self.asked)[choice % len(self.asked)]
            self.world.take(self.world.adapters.abort(request_id) or self.world.scheduler.abort(request_id))

    @invariant()
    def books(self):
        report = self.world.adapters.report()
        digests = {each["digest"]: each["requests"] for each in (*report["loaded"], *report["unloading"])}
        assert {each["name"] for each in report["loaded"]} == set(self.world.listed())
        assert len(digests) <= self.max_adapters
        assert sum(digests.values()) == len(self.world.adapters.uses)
        assert {bytes.fromhex(each) for each in digests} == self.world.disk.packed
        assert len(self.world.disk.found) <= len(self.world.disk.reads), "what a read has brought stays for good"
        self.world.cache.check_invariants()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()
            assert self.world.ends.keys() == self.asked
            assert not self.world.adapters.uses
            assert not self.world.adapters.has_waiting


TestAdaptersMachine = AdaptersMachine.TestCase
TestAdaptersMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
