"""Constraints are compiled on threads of their own, a few at a time, each within limits of time and size, and kept.

The engine asks and never waits: ``begin`` gives a ticket, ``poll`` tells what has become of it. A compile can't be stopped from outside; one that
takes too long is given up by those who wait for it, its thread is left behind and replaced, ``_MAX_LATE`` times at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.config import GrammarConfig
from kvd.grammar.errors import GrammarError
from kvd.grammar.growth import Meter
from kvd.grammar.memory import MAX_HELD_BYTES, MAX_KEPT_BYTES, MAX_USED_BYTES, Holdings
from kvd.grammar.sources import grammar_of
from kvd.grammar.state import CompiledGrammar, MaskWriter, reason
from kvd.grammar.vocabulary import Vocabulary, index
from kvd.types import Constraint, ErrorCode

_MAX_LATE = 3
"""Threads that may be left behind with compiles that take too long."""

_STEP_LEXER_FUEL = 100_000
"""The library's unit of work of one mask: some ten milliseconds at most. It bounds what a grammar that was made for it can cost the others in a step."""
_MAX_LEXER_STATES = 50_000
"""A grammar remembers so many, at one or two KiB."""
_MAX_ROW_ITEMS = 4_000
"""Of the library's parser: a thousand optional properties of one object, at some ten milliseconds a token."""

Refusal = tuple[ErrorCode, str]


@dataclass(frozen=True, slots=True)
class _Kept:
    result: CompiledGrammar | Refusal
    source_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of a refusal nothing is left but the words."""
        return self.source_bytes + (self.result.holding.num_bytes if isinstance(self.result, CompiledGrammar) else 0)


class _Job:
    """A constraint that is wanted; ``result`` when it is over."""

    __slots__ = ("began_s", "constraint", "num_waiting", "result", "submitted_s")

    def __init__(self, constraint: Constraint, submitted_s: float) -> None:
        self.constraint = constraint
        self.submitted_s = submitted_s
        self.began_s = 0.0
        self.num_waiting = 0
        self.result: CompiledGrammar | Refusal | None = None


class GrammarCompiler:
    """Compiles for one vocabulary. ``begin``, ``poll``, ``cancel`` and ``masks`` are for one thread, the engine's; ``prepare`` may be called from any.

    ``load_vocabulary`` is called once, by ``prepare`` or the first compile. ``on_done`` is called on a compiling thread after each compile.
    """

    def __init__(
        self,
        config: GrammarConfig,
        load_vocabulary: Callable[[], Vocabulary],
        *,
        now_s: Callable[[], float],
        on_done: Callable[[], None],
        num_threads: int = 1,
        compile_constraint: Callable[[Constraint], CompiledGrammar] | None = None,
        meter: Meter | None = None,
    ) -> None:
        """``num_threads`` write masks. ``compile_constraint`` stands in for the library's work, which is the same code for all callers, and
        ``meter`` for the process's size.
        """
        self._config = config
        self._load_vocabulary = load_vocabulary
        self._now_s = now_s
        self._on_done = on_done
        self._num_threads = num_threads
        self._compile = compile_constraint or self._compile_here
        self._meter = meter or Meter()
        self._prepared = threading.Lock()
        self._tokenizer: Any = None
        self._writer: MaskWriter | None = None
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._late: set[_Job] = set()
        self._by_constraint: dict[Constraint, _Job] = {}
        self._kept: OrderedDict[Constraint, _Kept] = OrderedDict()
        self._memory = Holdings()
        self._tickets: dict[int, _Job] = {}
        self._last_ticket = 0
        self._num_threads_idle = 0
        self._is_closed = False
        self.num_compiled = 0
        self.num_refused = 0
        self.num_hits = 0
        """Requests whose constraint was there already."""
        self.num_outgrown = 0
        """Constraints that were given up because too much memory was held, and this one's was the most."""

    @property
    def is_running(self) -> bool:
        """Whether a thread is inside the library: then the process must not end in the interpreter's own way."""
        return bool(self._running)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and how much waits."""
        return {
            "compiled": self.num_compiled,
            "refused": self.num_refused,
            "hits": self.num_hits,
            "kept": len(self._kept),
            "kept_bytes": self._kept_bytes(),
            "held_bytes": self._memory.held_bytes,
            "outgrown": self.num_outgrown,
            "waiting": len(self._queue),
            "late": len(self._late),
        }

    def prepare(self) -> None:
        """Index the vocabulary, if that is not done yet.

        Raises:
            GrammarError: there can be no constraints; each that is wanted is refused with the same words.
        """
        with self._prepared:
            if self._tokenizer is None:
                vocabulary = self._load_vocabulary()
                self._tokenizer = index(vocabulary)
                self._writer = MaskWriter(vocabulary.num_words, self._num_threads, meter=self._meter, charge=self._charge)

    def close(self) -> None:
        """Threads end, those inside the library as soon as it lets them; nothing is asked of the compiler any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._memory.close()

    # ------------------------------------------------------------------------------------------ the engine's side

    def begin(self, constraint: Constraint) -> int | None:
        """A ticket for the compiled constraint; None: too many wait."""
        num_bytes = sum(len(part.encode()) for part in constraint.source)
        job = self._by_constraint.get(constraint)
        if job is None:
            job = _Job(constraint, self._now_s())
            if num_bytes > self._config.max_constraint_bytes:
                message = (
                    f"the constraint has {num_bytes} bytes; at most {self._config.max_constraint_bytes} are allowed (max_constraint_bytes)"
                )
                job.result = ErrorCode.BAD_REQUEST, message
            elif (kept := self._take_kept(constraint)) is not None:
                self.num_hits += 1
                job.result = kept
            elif not self._enqueue(job):
                return None
        else:
            self.num_hits += 1
        job.num_waiting += 1
        self._last_ticket += 1
        self._tickets[self._last_ticket] = job
        return self._last_ticket

    def poll(self, ticket: int) -> CompiledGrammar | Refusal | None:
        """The compiled constraint, or why there is none, and the ticket is used up; None: it is under way."""
        job = self._tickets[ticket]
        if job.result is None:
            self._look_at_time(job)
        if job.result is not None:
            del self._tickets[ticket]
        return job.result

    def cancel(self, ticket: int) -> None:
        """Nobody waits with this ticket any more."""
        job = self._tickets.pop(ticket)
        job.num_waiting -= 1
        if job.num_waiting == 0 and job.result is None:
            with self._changed:
                if job in self._queue:
                    self._queue.remove(job)
                    del self._by_constraint[job.constraint]

    def masks(self, states: Sequence[object], drafts: Sequence[Collection[int]]) -> bytearray:
        """The masks of a batch, see ``MaskWriter.write``."""
        assert self._writer is not None, "a state comes from a compiled grammar"
        return self._writer.write(states, drafts)

    def forget(self, constraint: Constraint, compiled: object) -> None:
        """A sequence failed in ``compiled``: what the library remembers of it may be used up, and the next one begins afresh, if it doesn't already."""
        with self._changed:
            if (kept := self._kept.get(constraint)) is not None and kept.result is compiled:
                self._drop_kept(constraint)

    # ------------------------------------------------------------------------------------------ queue and threads

    def _take_kept(self, constraint: Constraint) -> CompiledGrammar | Refusal | None:
        with self._changed:
            kept = self._kept.get(constraint)
            if kept is None:
                return None
            self._kept.move_to_end(constraint)
            return kept.result

    def _enqueue(self, job: _Job) -> bool:
        with self._changed:
            if len(self._queue) >= self._config.max_waiting_constraints:
                return False
            self._queue.append(job)
            self._by_constraint[job.constraint] = job
            self._staff()
            self._changed.notify()
        return True

    def _staff(self) -> None:
        """One thread that is not late, as long as not too many are."""
        if not self._num_threads_idle and len(self._running) == len(self._late) < _MAX_LATE:
            self._num_threads_idle += 1
            threading.Thread(target=self._work, name="kvd-grammar", daemon=True).start()

    def _look_at_time(self, job: _Job) -> None:
        """Give up what has been compiled for too long, and ``job`` if it has waited for its turn for too long."""
        now_s, limit_s = self._now_s(), self._config.constraint_timeout_s
        with self._changed:
            for each in self._running:
                if each not in self._late and now_s - each.began_s >= limit_s:
                    self._late.add(each)
                    message = f"the constraint is too complex: it was not compiled within {limit_s:g} s (constraint_timeout_s)"
                    self._give_up(each, ErrorCode.BAD_REQUEST, message)
                    self._keep(each.constraint, (ErrorCode.BAD_REQUEST, message), 0)
                    if self._queue:
                        self._staff()
            if job in self._queue and now_s - job.submitted_s >= (_MAX_LATE + 1) * limit_s:
                self._queue.remove(job)
                self._give_up(
                    job, ErrorCode.OVERLOADED, f"the constraint waited for others to be compiled for {now_s - job.submitted_s:.0f} s"
                )

    def _give_up(self, job: _Job, code: ErrorCode, message: str) -> None:
        job.result = code, message
        self.num_refused += 1
        del self._by_constraint[job.constraint]

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._queue.popleft()
                self._num_threads_idle -= 1
                self._running.append(job)
                job.began_s = self._now_s()
            mark = self._meter.begin()
            try:
                result: CompiledGrammar | Refusal = self._compile(job.constraint)
            except GrammarError as error:
                result = ErrorCode.BAD_REQUEST, f"the constraint can't be compiled: {error}"
            except BaseException as error:  # the library's panics are no Exceptions, and this thread serves everybody
                result = ErrorCode.BAD_REQUEST, f"the constraint can't be compiled: {type(error).__name__}: {error}"
            with self._changed:
                self._running.remove(job)
                is_late = job in self._late
                self._late.discard(job)
                self._keep(job.constraint, result, self._meter.grown_bytes(mark))
                self._note_end(job, result)  # last: from here on the engine has it, and what it grows by is charged
                ends = is_late and (self._num_threads_idle > 0 or len(self._running) > len(self._late))
                if not ends:
                    self._num_threads_idle += 1
            del job, result  # nothing lives because a thread waits
            self._on_done()
            if ends:
                return

    def _note_end(self, job: _Job, result: CompiledGrammar | Refusal) -> None:
        if isinstance(result, CompiledGrammar):
            self.num_compiled += 1
        elif job.result is None:
            self.num_refused += 1
        if job.result is None:
            job.result = result
            del self._by_constraint[job.constraint]

    def _keep(self, constraint: Constraint, result: CompiledGrammar | Refusal, grown_bytes: int) -> None:
        """Remember it as the one used last."""
        self._drop_kept(constraint)
        if isinstance(result, CompiledGrammar):
            self._memory.add(result, grown_bytes)
        self._kept[constraint] = _Kept(result, sum(map(len, constraint.source)))
        self._bound()

    def _drop_kept(self, constraint: Constraint) -> None:
        self._kept.pop(constraint, None)

    # ------------------------------------------------------------------------------------------ memory

    def _kept_bytes(self) -> int:
        with self._changed:
            return sum(kept.num_bytes for kept in self._kept.values())

    def _charge(self, grammars: Collection[CompiledGrammar], grown_bytes: int) -> None:
        """Their masks made the process grow. Those charged with much in use are kept no longer; who uses them goes on."""
        self._memory.charge(grammars, grown_bytes)
        with self._changed:
            for grammar in grammars:
                if grammar.holding.used_bytes > MAX_USED_BYTES:
                    self._drop_grammar(grammar)
            self._bound()

    def _drop_grammar(self, grammar: CompiledGrammar) -> None:
        for constraint in [each for each, kept in self._kept.items() if kept.result is grammar]:
            self._drop_kept(constraint)

    def _bound(self) -> None:
        """Forget what has long been unused, beyond the bounds of what is kept; beyond that of all that lives give up the largest, kept or in use."""
        kept_bytes = self._kept_bytes()
        while self._kept and (len(self._kept) > self._config.max_constraints_kept or kept_bytes > MAX_KEPT_BYTES):
            kept_bytes -= self._kept.popitem(last=False)[1].num_bytes
        if self._memory.held_bytes <= MAX_HELD_BYTES:
            return
        living = self._memory.largest_first()  # those that died just now may still be in the sum
        held_bytes = sum(grammar.holding.num_bytes for reference in living if (grammar := reference()) is not None and not grammar.problem)
        for reference in living:
            if held_bytes <= MAX_HELD_BYTES:
                break
            grammar = reference()
            if grammar is None or grammar.problem:
                continue
            held_bytes -= grammar.holding.num_bytes
            self._drop_grammar(grammar)
            del grammar
            if (used := reference()) is not None:
                used.problem = f"constraints in use hold more than {MAX_HELD_BYTES >> 20} MiB of memory, this one the most of them"
                self.num_outgrown += 1

    # ------------------------------------------------------------------------------------------ the library's part

    def _compile_here(self, constraint: Constraint) -> CompiledGrammar:
        self.prepare()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS, step_lexer_fuel=_STEP_LEXER_FUEL, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )
        matcher = LLMatcher(self._tokenizer, grammar_of(constraint), log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(reason(matcher))
        grammar = CompiledGrammar(matcher)
        assert self._writer is not None, "prepare made it"
        first = grammar.start()  # the first mask is the dearest, and finds out that there is nothing to match
        mask = self._writer.write([first], [()])
        if first.problem:
            raise GrammarError("it matches nothing" if "NoExtension" in first.problem else first.problem)
        if token_ids := int.from_bytes(mask, "little"):  # what can't take one token would hold its memory until somebody tried
            first.advance((token_ids & -token_ids).bit_length() - 1)
            if first.problem:
                raise GrammarError(f"it is too complex: {first.problem}")
        return grammar
