"""What constraints hold while they are used: bounded, told, and given back, with the library itself and the process's own size."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvd.config import GrammarConfig
from kvd.grammar import compiler as compiler_module
from kvd.grammar.compiler import GrammarCompiler
from kvd.grammar.growth import Meter
from kvd.grammar.memory import MAX_USED_BYTES, Holdings, trim
from kvd.grammar.state import CompiledGrammar, GrammarState
from kvd.grammar.vocabulary import Vocabulary
from kvd.types import Constraint

pytestmark = pytest.mark.grammar

EOS = 256
MIB = 1 << 20
NUM_TEXTS, NUM_CHARS = 100, 240
"""A choice among so many random texts makes the library remember 6 to 13 MiB."""

ORDINARY = Constraint("json_schema", (json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}),))


def new_compiler() -> GrammarCompiler:
    token_bytes = [bytes([byte]) for byte in range(256)] + [b""]
    vocabulary = Vocabulary(
        token_bytes=token_bytes, special_texts={}, eos_token_ids=(EOS,), vocab_size=260, encode=lambda text: list(text.encode())
    )
    return GrammarCompiler(GrammarConfig(constraint_timeout_s=60.0), lambda: vocabulary, now_s=lambda: 0.0, on_done=lambda: None)


def compiled(compiler: GrammarCompiler, constraint: Constraint) -> CompiledGrammar:
    ticket = compiler.begin(constraint)
    assert ticket is not None
    while (result := compiler.poll(ticket)) is None:
        time.sleep(0.0005)
    assert isinstance(result, CompiledGrammar), result
    return result


def settled_bytes(resident_bytes: Callable[[], int]) -> int:
    """The process's size without what earlier tests left behind."""
    gc.collect()
    trim()
    return resident_bytes()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)


def growing(number: int) -> Constraint:
    rng = random.Random(number)
    letters = "".join(map(chr, [*range(48, 58), *range(65, 91), *range(97, 123)]))
    return Constraint("choice", tuple("".join(rng.choices(letters, k=NUM_CHARS)) for _ in range(NUM_TEXTS)))


def use(compiler: GrammarCompiler, constraint: Constraint, *, is_drafting: bool = False) -> int:
    """Every text of a choice is generated, eight at a time as of one request. How many came to their ends."""
    grammar, num_done = compiled(compiler, constraint), 0
    for start in range(0, len(constraint.source), 8):
        texts = [text.encode() for text in constraint.source[start : start + 8]]
        states = [grammar.start() for _ in texts]
        for place in range(NUM_CHARS):
            forced = [tuple(state.forced(4)) if is_drafting else () for state in states]
            compiler.masks(states, forced)
            if any(state.problem for state in states):
                break
            for state, text in zip(states, texts, strict=True):
                state.advance(text[place])
        num_done += sum(state.is_over for state in states)
    return num_done


def use_many_at_once(compiler: GrammarCompiler, ordinary: GrammarState) -> list[str]:
    """Twenty that grow and one that doesn't, until eight have failed; why these did."""
    constraints = [growing(number) for number in range(20)]
    grammars = {number: compiled(compiler, constraint) for number, constraint in enumerate(constraints)}
    problems: list[str] = []
    for text in range(NUM_TEXTS):
        states = {number: grammar.start() for number, grammar in grammars.items()}
        for place in range(NUM_CHARS):
            compiler.masks([ordinary, *states.values()], ((),) * (1 + len(states)))
            assert ordinary.problem == ""
            for number, state in list(states.items()):
                if state.problem:
                    problems.append(state.problem)
                    del states[number], grammars[number]
                else:
                    state.advance(constraints[number].source[text].encode()[place])
            ordinary.advance(ord("x"))
        if len(problems) >= 8:
            break
    return problems


def grown_and_charged(is_drafting: bool) -> tuple[int, dict[str, int], dict[str, int]]:
    """Bytes that this process grows by while a constraint is used, and the compiler's figures before and after."""
    compiler, resident_bytes = new_compiler(), Meter().resident_bytes
    compiled(compiler, ORDINARY)
    before_bytes, before = settled_bytes(resident_bytes), compiler.stats()
    assert use(compiler, growing(0), is_drafting=is_drafting) == NUM_TEXTS
    grown_bytes, after = resident_bytes() - before_bytes, compiler.stats()
    compiler.close()
    return grown_bytes, before, after


@pytest.mark.parametrize("is_drafting", [False, True], ids=["masks", "drafts"])
def test_what_a_constraint_makes_the_process_grow_by_in_use_is_what_it_is_charged_with(is_drafting: bool) -> None:
    # In a process of its own: in this one other tests' threads and free memory count as well.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        grown_bytes, before, after = process.submit(grown_and_charged, is_drafting).result(60)
    assert grown_bytes > 2 * MIB, "else this shows nothing"
    assert after["kept_bytes"] - before["kept_bytes"] == pytest.approx(grown_bytes, abs=2 * MIB)
    assert after["held_bytes"] <= after["kept_bytes"]


def test_many_that_grow_in_use_stay_within_the_bound_and_their_memory_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT_BYTES", 48 * MIB)
    compiler, resident_bytes = new_compiler(), Meter().resident_bytes
    compiled(compiler, ORDINARY)
    before_bytes, most_bytes = settled_bytes(resident_bytes), 0
    for number in range(16):
        assert use(compiler, growing(number)) == NUM_TEXTS, "one after the other they need not be given up"
        hits = compiler.num_hits
        compiled(compiler, ORDINARY)
        assert compiler.num_hits == hits + 1, "what is wanted again and again is kept"
        most_bytes = max(most_bytes, resident_bytes() - before_bytes)
    stats = compiler.stats()
    assert 1 < stats["kept"] < 17
    assert stats["kept_bytes"] <= 48 * MIB
    assert stats["outgrown"] == 0
    assert most_bytes < 72 * MIB, "all of them would be more than a hundred"
    until(lambda: resident_bytes() - before_bytes < 68 * MIB)
    compiler.close()


def test_beyond_the_bound_of_all_in_use_the_largest_is_given_up_and_ordinary_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_HELD_BYTES", 24 * MIB)
    compiler, resident_bytes = new_compiler(), Meter().resident_bytes
    ordinary = compiled(compiler, ORDINARY).start()
    for byte in b'{"name":"':
        ordinary.advance(byte)
    before_bytes = settled_bytes(resident_bytes)
    problems = use_many_at_once(compiler, ordinary)
    assert len(problems) >= 8, "else they would have held more than the bound"
    assert all("hold more than" in problem for problem in problems)
    assert compiler.stats()["outgrown"] == len(problems)
    assert resident_bytes() - before_bytes < 60 * MIB
    hits = compiler.num_hits
    compiled(compiler, ORDINARY)
    assert compiler.num_hits == hits + 1
    until(lambda: compiler.stats()["held_bytes"] <= 24 * MIB)
    compiler.close()


def test_what_one_took_between_its_masks_is_charged_to_no_other() -> None:
    compiler = new_compiler()
    growing_one, innocent = compiled(compiler, growing(0)), compiled(compiler, ORDINARY)
    states = [grammar.start() for grammar in (growing_one, innocent) for _ in range(8)]
    for _ in range(3):
        compiler.masks(states, ((),) * 16)
    charged = growing_one.holding.num_bytes, innocent.holding.num_bytes
    growing_one.holding.pending_bytes += MIB
    compiler.masks(states, ((),) * 16)
    slack = 64 << 10  # what the library's threads may take
    assert growing_one.holding.num_bytes - charged[0] == pytest.approx(MIB, abs=slack)
    assert innocent.holding.num_bytes - charged[1] <= slack
    compiler.close()


def test_what_was_charged_with_much_in_use_is_compiled_afresh_and_whoever_uses_it_goes_on() -> None:
    compiler = new_compiler()
    first = compiled(compiler, ORDINARY)
    state = first.start()
    first.holding.pending_bytes += MAX_USED_BYTES // 2
    compiler.masks([state], [()])
    assert compiled(compiler, ORDINARY) is first
    first.holding.pending_bytes += MAX_USED_BYTES // 2 + 1
    compiler.masks([state], [()])
    second = compiled(compiler, ORDINARY)
    assert second is not first
    assert second.holding.num_bytes < MIB
    first.holding.pending_bytes += 1
    compiler.masks([state], [()])
    assert state.problem == ""
    assert compiled(compiler, ORDINARY) is second
    assert compiler.stats()["outgrown"] == 0
    del first, state
    until(lambda: compiler.stats()["held_bytes"] == second.holding.num_bytes)
    compiler.close()


def walk(compiler: GrammarCompiler, constraint: Constraint, rng: random.Random) -> int:
    """One request, with random tokens among those allowed. How many masks it had."""
    state, num_masks = compiled(compiler, constraint).start(), 0
    while not state.is_over:
        draft = state.forced(4)
        mask = int.from_bytes(compiler.masks([state], [draft])[:36], "little")
        assert state.problem == ""
        letters = [byte for byte in range(32, 127) if mask >> byte & 1 and byte != ord("\\")]
        state.advance(rng.choice(letters or [EOS]))
        num_masks += 1
    return num_masks


def test_what_is_always_in_use_never_seems_to_grow_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that masks need only meanwhile is charged each time that it comes back after a trim."""
    limit_bytes = MIB // 2
    monkeypatch.setattr(compiler_module, "MAX_USED_BYTES", limit_bytes)
    fields = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}
    schema = {"type": "object", "properties": fields, "required": ["name", "age"], "additionalProperties": False}
    compiler, rng, constraint = new_compiler(), random.Random(0), Constraint("json_schema", (json.dumps(schema),))
    compiled(compiler, constraint)
    first_bytes, num_masks, most_bytes = compiler.stats()["held_bytes"], 0, 0
    while num_masks < 20_000:
        num_masks += walk(compiler, constraint, rng)
        trim()
        most_bytes = max(most_bytes, compiler.stats()["held_bytes"])
    assert most_bytes <= first_bytes + 4 * limit_bytes
    stats = compiler.stats()
    assert stats["kept"] == 1
    assert stats["outgrown"] == 0
    assert stats["compiled"] < stats["hits"] / 4, "afresh now and then, and not each time"
    compiler.close()


def test_a_new_grammar_at_a_dead_ones_address_is_counted_by_itself() -> None:
    trimmed: list[int] = []
    holdings = Holdings(trim=lambda: trimmed.append(1))
    for _ in range(50):
        grammar = CompiledGrammar("no matcher")
        holdings.add(grammar, MIB)
        holdings.charge([grammar, CompiledGrammar("never added")], 2 * MIB)
        assert grammar.holding.num_bytes == 3 * MIB
    assert [reference() for reference in holdings.largest_first()] == [grammar]
    until(lambda: holdings.held_bytes == 3 * MIB)
    until(lambda: len(trimmed) == 49 // 2)
    holdings.close()
