"""The compiling threads: order, bounds, time limits and memory, with compiles that the test holds up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvd.config import GrammarConfig
from kvd.grammar.compiler import GrammarCompiler
from kvd.grammar.errors import GrammarError
from kvd.grammar.growth import Mark, Meter
from kvd.grammar.state import CompiledGrammar
from kvd.grammar.vocabulary import Vocabulary
from kvd.types import Constraint, ErrorCode


class Bench:
    """A compiler whose compiles end when they are told to, on a clock that the test moves."""

    def __init__(self, **config: float) -> None:
        self.now_s = 0.0
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.num_done = 0
        self.growth: dict[str, int] = {}
        self.resident_bytes = 1 << 30
        self.compiler = GrammarCompiler(
            GrammarConfig(**{"constraint_timeout_s": 10.0, **config}),
            no_vocabulary,
            now_s=lambda: self.now_s,
            on_done=self._on_done,
            compile_constraint=self._compile,
            meter=_Meter(self),
        )

    def _on_done(self) -> None:
        self.num_done += 1

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        source = constraint.source[0]
        self.begun.append(source)
        self.resident_bytes += self.growth.get(source, 0)
        if source in self.gates:
            assert self.gates[source].wait(30)
        if source.startswith("bad"):
            raise GrammarError("it is bad")
        if source.startswith("panic"):
            raise _Panic
        return CompiledGrammar(source)

    def hold(self, source: str) -> threading.Event:
        return self.gates.setdefault(source, threading.Event())

    def begin(self, source: str) -> int:
        ticket = self.compiler.begin(Constraint("regex", (source,)))
        assert ticket is not None
        return ticket

    def result(self, ticket: int) -> object:
        return until(lambda: self.compiler.poll(ticket))

    def compiled(self, source: str) -> object:
        return self.result(self.begin(source))


class _Meter(Meter):
    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def begin(self) -> Mark:
        return 0, self._bench.resident_bytes

    def grown_bytes(self, mark: Mark, *, is_spread: bool = False) -> int:
        return self._bench.resident_bytes - mark[1]


class _Panic(BaseException):
    """As the library raises for its own faults."""


def no_vocabulary() -> Vocabulary:
    raise AssertionError("nothing here is the library's")


def until(condition: Callable[[], object]) -> object:
    for _ in range(20_000):
        if (value := condition()) is not None and value is not False:
            return value
        time.sleep(0.001)
    raise AssertionError("it never came")


def test_a_constraint_is_compiled_once_and_kept() -> None:
    bench = Bench()
    first = bench.compiled("a")
    assert isinstance(first, CompiledGrammar)
    assert bench.compiled("a") is first
    assert bench.begun == ["a"]
    assert bench.compiler.stats()["hits"] == 1
    until(lambda: bench.num_done == 1)


def test_what_is_compiled_is_counted_before_anybody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    gate = bench.hold("a")
    job = bench.compiler._tickets[bench.begin("a")]
    results: list[object] = []

    def looked_at(*_: object) -> int:
        results.append(job.result)
        return 1 << 20

    monkeypatch.setattr(bench.compiler._meter, "grown_bytes", looked_at)
    gate.set()
    until(lambda: bench.num_done == 1)
    assert results == [None], "in use it may grow, which nobody is charged with who is not counted"
    assert isinstance(job.result, CompiledGrammar)
    assert job.result.holding.is_counted


def test_those_who_want_the_same_wait_for_one_compile() -> None:
    bench = Bench()
    gate = bench.hold("a")
    tickets = [bench.begin("a") for _ in range(3)]
    assert all(bench.compiler.poll(ticket) is None for ticket in tickets)
    gate.set()
    results = {bench.result(ticket) for ticket in tickets}
    assert len(results) == 1
    assert bench.begun == ["a"]


def test_a_refusal_is_kept_too_and_says_why() -> None:
    bench = Bench()
    assert bench.compiled("bad") == (ErrorCode.BAD_REQUEST, "the constraint can't be compiled: it is bad")
    assert bench.compiled("bad") == bench.compiled("bad")
    assert bench.begun == ["bad"]


def test_a_fault_of_the_library_ends_no_thread() -> None:
    bench = Bench()
    code, message = bench.compiled("panic")
    assert code is ErrorCode.BAD_REQUEST
    assert "_Panic" in message
    assert isinstance(bench.compiled("a"), CompiledGrammar)


def test_too_long_a_source_is_not_even_tried() -> None:
    bench = Bench(max_constraint_bytes=8)
    code, message = bench.compiled("x" * 9)
    assert (code, "max_constraint_bytes" in message) == (ErrorCode.BAD_REQUEST, True)
    code, message = bench.compiled("é" * 5)
    assert code is ErrorCode.BAD_REQUEST
    assert bench.begun == []


def test_the_queue_has_a_bound() -> None:
    bench = Bench(max_waiting_constraints=2)
    gate = bench.hold("slow")
    slow = bench.begin("slow")
    until(lambda: bool(bench.begun))
    waiting = [bench.begin("b"), bench.begin("c")]
    assert bench.compiler.begin(Constraint("regex", ("d",))) is None
    assert bench.begin("b") is not None, "who joins one that waits takes no place"
    gate.set()
    assert all(isinstance(bench.result(ticket), CompiledGrammar) for ticket in (slow, *waiting))
    assert isinstance(bench.compiled("d"), CompiledGrammar)


def test_a_cancelled_constraint_is_not_compiled_unless_another_wants_it() -> None:
    bench = Bench()
    gate = bench.hold("slow")
    slow = bench.begin("slow")
    until(lambda: bool(bench.begun))
    alone, first, second = bench.begin("alone"), bench.begin("shared"), bench.begin("shared")
    bench.compiler.cancel(alone)
    bench.compiler.cancel(first)
    bench.compiler.cancel(slow)
    gate.set()
    assert isinstance(bench.result(second), CompiledGrammar)
    assert bench.begun == ["slow", "shared"]
    assert isinstance(bench.compiled("alone"), CompiledGrammar)


def test_the_longest_unused_is_forgotten() -> None:
    bench = Bench(max_constraints_kept=2)
    for source in ("a", "b", "a", "c", "a", "b"):
        bench.compiled(source)
    assert bench.begun == ["a", "b", "c", "b"]


def test_what_is_kept_has_a_bound_of_bytes() -> None:
    bench = Bench()
    bench.growth = dict.fromkeys(("a", "b", "c", "bad"), 100 << 20) | {"huge": 300 << 20}
    for source in ("a", "bad", "b", "a", "c"):
        bench.compiled(source)
    assert bench.begun == ["a", "bad", "b", "c"]
    bench.compiled("a")
    bench.compiled("bad")
    assert bench.begun == ["a", "bad", "b", "c", "bad"], "b was the longest unused, and of a refusal nothing is left but its words"
    assert isinstance(bench.compiled("huge"), CompiledGrammar)
    assert bench.compiler.stats()["kept"] == bench.compiler.stats()["kept_bytes"] == 0


def test_what_failed_a_sequence_is_compiled_afresh() -> None:
    bench = Bench()
    first = bench.compiled("a")
    bench.compiler.forget(Constraint("regex", ("unknown",)), first)
    assert bench.compiled("a") is first
    bench.compiler.forget(Constraint("regex", ("a",)), first)
    second = bench.compiled("a")
    assert second is not first
    bench.compiler.forget(Constraint("regex", ("a",)), first)
    assert bench.compiled("a") is second, "another sequence of the first one has no say about its successor"
    assert bench.begun == ["a", "a"]


def test_a_compile_that_takes_too_long_stops_nobody_else() -> None:
    bench = Bench()
    gate = bench.hold("slow")
    slow, other = bench.begin("slow"), bench.begin("other")
    until(lambda: bool(bench.begun))
    bench.now_s = 9.9
    assert bench.compiler.poll(slow) is None
    bench.now_s = 10.0
    code, message = bench.result(slow)
    assert (code, "constraint_timeout_s" in message) == (ErrorCode.BAD_REQUEST, True)
    assert isinstance(bench.result(other), CompiledGrammar)
    assert bench.compiled("slow") == (code, message), "remembered, lest it take another thread"
    assert bench.compiler.stats()["late"] == 1
    assert bench.compiler.is_running
    gate.set()
    until(lambda: not bench.compiler.is_running)
    assert isinstance(bench.compiled("slow"), CompiledGrammar), "it was only slow"
    assert isinstance(bench.compiled("next"), CompiledGrammar)


def test_a_compile_whose_request_is_gone_is_given_up_all_the_same() -> None:
    bench = Bench()
    gate = bench.hold("slow")
    slow = bench.begin("slow")
    until(lambda: bool(bench.begun))
    bench.compiler.cancel(slow)
    bench.now_s = 11.0
    assert isinstance(bench.compiled("other"), CompiledGrammar)
    gate.set()


def test_with_every_thread_late_the_others_are_told_to_come_again() -> None:
    bench = Bench()
    gates = [bench.hold(f"slow{number}") for number in range(3)]
    for number in range(3):
        ticket = bench.begin(f"slow{number}")
        until(lambda number=number: len(bench.begun) == number + 1)
        bench.now_s += 10.0
        assert bench.result(ticket)[0] is ErrorCode.BAD_REQUEST
    waiting = bench.begin("other")
    assert bench.compiler.poll(waiting) is None
    bench.now_s += 40.0
    assert bench.result(waiting)[0] is ErrorCode.OVERLOADED
    assert "other" not in bench.begun
    for gate in gates:
        gate.set()
    assert isinstance(bench.compiled("other"), CompiledGrammar)
    until(lambda: not bench.compiler.is_running)
    assert bench.compiler.stats()["late"] == 0


@pytest.mark.parametrize("number", range(5))
def test_many_at_once_from_a_cold_start(number: int) -> None:
    bench = Bench(max_constraints_kept=3)
    tickets = [bench.begin(f"{'bad' if index % 7 == 0 else 'r'}{index % 11}") for index in range(60)]
    results = [bench.result(ticket) for ticket in tickets]
    assert all(isinstance(result, CompiledGrammar | tuple) for result in results)
    stats = bench.compiler.stats()
    assert stats["waiting"] == stats["late"] == 0
    assert stats["kept"] == 3


def test_closed_its_threads_end() -> None:
    bench = Bench()
    bench.compiled("a")
    gate = bench.hold("slow")
    bench.begin("slow")
    until(lambda: "slow" in bench.begun)
    threads = [thread for thread in threading.enumerate() if thread.name == "kvd-grammar" and is_of(thread, bench.compiler)]
    assert len(threads) == 1
    bench.compiler.close()
    gate.set()
    threads[0].join(30)
    assert not threads[0].is_alive()
    unused = Bench()
    unused.compiler.close()


def is_of(thread: threading.Thread, compiler: GrammarCompiler) -> bool:
    return getattr(thread._target, "__self__", None) is compiler
