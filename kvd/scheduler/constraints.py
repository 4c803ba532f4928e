"""Requests whose output must match something: they wait for it to be compiled, and each of their samples gets a mask.

While its constraint is compiled a request holds neither blocks nor a place in the queue; it can be aborted, or run out of time, as everybody can.
A constraint says when its text is complete: the choice ends with ``stop`` as soon as nothing but the end can follow, or when the end is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd.scheduler.choosing import num_sequences
from kvd.scheduler.ending import Endings
from kvd.scheduler.plan import StepPlan
from kvd.scheduler.ports import ConstraintCompiler, ConstraintState
from kvd.scheduler.request import Request, Sequence
from kvd.step import TokenMasks
from kvd.types import ErrorCode, FinishReason


class Constraints:
    """The requests that wait for their constraints, and the masks of a step's samples."""

    def __init__(self, compiler: ConstraintCompiler | None, endings: Endings, enter: Callable[[Request], None]) -> None:
        """Without a compiler every constraint is refused. ``enter`` lets a request wait for its turn, or for credit."""
        self._compiler = compiler
        self._endings = endings
        self._enter = enter
        self._compiling: dict[Request, int] = {}
        self.num_slots = 0
        """Running places that those who wait for their constraints will want."""
        self._num_outgrown = 0
        """Of those that the compiler gave up, how many are no longer in use."""

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their constraints."""
        return len(self._compiling)

    def stats(self) -> dict[str, int]:
        """The compiler's counters, under names of their own."""
        return {} if self._compiler is None else {f"constraints_{name}": count for name, count in self._compiler.stats().items()}

    def begin(self, request: Request) -> None:
        """The request is accepted and has a constraint: it enters at once if that is there, else when it is."""
        constraint = request.command.constraint
        assert constraint is not None, "others enter by themselves"
        if self._compiler is None:
            self._endings.fail(request, ErrorCode.BAD_REQUEST, "this daemon takes no constraints (grammar.constraints is false)")
            return
        ticket = self._compiler.begin(constraint)
        if ticket is None:
            message = "too many constraints wait to be compiled (grammar.max_waiting_constraints)"
            self._endings.fail(request, ErrorCode.OVERLOADED, message, self._endings.retry_after_s(request.priority))
            return
        self._compiling[request] = ticket
        self.num_slots += num_sequences(request.command)
        request.is_compiling = True
        self._look(request, ticket)

    def poll(self) -> None:
        """Let those enter whose constraints are there by now, and end those for whom there are none."""
        for request, ticket in list(self._compiling.items()):
            self._look(request, ticket)

    def end_outgrown(self, requests: Iterable[Request]) -> None:
        """Fail those whose constraint the compiler gave up, wherever they are: what they hold is needed. O(1) while it gives none up."""
        if self._compiler is None or self._num_outgrown == self._compiler.num_outgrown:
            return
        self._num_outgrown = self._compiler.num_outgrown
        for request in list(requests):
            if request.constraint is not None and (problem := request.constraint.problem):
                self._give_up(
                    request, max((sequence.num_known for sequence in request.sequences), default=request.num_prompt_tokens), problem
                )

    def _take(self, request: Request) -> None:
        """The request waits for its constraint no longer."""
        del self._compiling[request]
        self.num_slots -= num_sequences(request.command)

    def _look(self, request: Request, ticket: int) -> None:
        assert self._compiler is not None, "it gave the ticket"
        if request.is_over:
            self._take(request)
            self._compiler.cancel(ticket)
            return
        result = self._compiler.poll(ticket)
        if result is None:
            return
        self._take(request)
        request.is_compiling = False
        if isinstance(result, tuple):
            code, message = result
            retry_after_s = self._endings.retry_after_s(request.priority) if code is ErrorCode.OVERLOADED else 0.0
            self._endings.fail(request, code, message, retry_after_s)
            return
        request.constraint = result
        for sequence in request.sequences:
            sequence.constraint = result.start()
        self._enter(request)

    def end_compiling(self) -> None:
        """Whoever still waits for a constraint is told to go elsewhere: the daemon is shutting down, and a compile can't be stopped."""
        compiler = self._compiler
        compiling, self._compiling, self.num_slots = self._compiling, {}, 0
        for request, ticket in compiling.items():
            assert compiler is not None, "it gave the ticket"
            compiler.cancel(ticket)
            if not request.is_over:
                self._endings.fail(request, ErrorCode.DRAINING, "the daemon is shutting down, and the constraint is not compiled yet")

    # ------------------------------------------------------------------------------------------ samples

    def write_masks(self, plan: StepPlan) -> None:
        """The masks of the plan's constrained samples. A request that can sample nothing ends; its row runs once more, for nothing."""
        compiler = self._compiler
        assert compiler is not None, "a sequence has a constraint"
        states: list[ConstraintState] = []
        for sequence, _ in plan.constrained:
            assert sequence.constraint is not None, "it was planned with one"
            states.append(sequence.constraint)
        words = compiler.masks(states, [draft for _, draft in plan.constrained])
        counts = [1 + len(draft) for _, draft in plan.constrained]
        num_words = len(words) // (4 * sum(counts))
        plan.masks = TokenMasks([sequence.row for sequence, _ in plan.constrained], counts, num_words, words)
        place = 0
        for (sequence, _), count in zip(plan.constrained, counts, strict=True):
            if not (sequence.is_over or sequence.request.is_over):
                self._check(sequence, memoryview(words)[4 * num_words * place :][: 4 * num_words])
            place += count

    def _check(self, sequence: Sequence, mask: memoryview) -> None:
        """End what can't go on: the library gave up, or nothing but the end may follow and ``min_tokens`` forbids it: the constraint is the stronger one.

        What else a request wishes may leave no token either; the executor finds that out.
        """
        request, state = sequence.request, sequence.constraint
        assert state is not None, "it has a mask"
        command, num_out = request.command, sequence.num_known - request.num_prompt_tokens
        if problem := state.problem:
            self._give_up(request, sequence.num_known, problem)
        elif num_out < command.min_tokens and state.is_complete and not int.from_bytes(mask, "little") & ~_bits(command.stop_token_ids):
            if num_out:
                self._endings.end_choice(sequence, FinishReason.STOP)
            else:
                message = f"the constraint is met by nothing but the empty text, and min_tokens is {command.min_tokens}"
                self._endings.fail(request, ErrorCode.BAD_REQUEST, message)

    def _give_up(self, request: Request, num_known: int, problem: str) -> None:
        """A limit is exceeded: the request fails, and the next one with this constraint has it compiled afresh."""
        assert self._compiler is not None, "it has a constraint"
        assert request.command.constraint is not None, "it has a constraint"
        assert request.constraint is not None, "it has a constraint"
        self._compiler.forget(request.command.constraint, request.constraint)
        num_out = num_known - request.num_prompt_tokens
        self._endings.fail(request, ErrorCode.BAD_REQUEST, f"the constraint became too complex after {num_out} tokens: {problem}")

    def end_if_over(self, sequence: Sequence, token_id: int) -> bool:
        """The sequence sampled a token; whether that ended its choice, or its request."""
        state = sequence.constraint
        assert state is not None, "asked of those that have one"
        state.advance(token_id)
        if problem := state.problem:
            if state.has_strayed:
                message = f"token {token_id} was sampled, which the constraint forbids: {problem}"
                self._endings.fail(sequence.request, ErrorCode.INTERNAL, message)
            else:
                self._give_up(sequence.request, sequence.num_known, problem)
            return True
        if state.is_over:
            self._endings.end_choice(sequence, FinishReason.STOP)
            return True
        return False

    def check_invariants(self, requests: list[Request]) -> None:
        """Whoever waits for a constraint has a ticket."""
        assert self.num_slots == sum(num_sequences(request.command) for request in self._compiling), "the places they want are miscounted"
        waiting = {request for request in requests if request.is_compiling}
        assert waiting == {request for request in self._compiling if not request.is_over}, (
            "a request waits for a constraint that nobody compiles"
        )
        for request in requests:
            if request.constraint is not None:
                assert all(sequence.constraint is not None for sequence in request.sequences), "a choice runs without its constraint"


def _bits(token_ids: tuple[int, ...]) -> int:
    """A set of tokens as a number: bit j for token j."""
    if not token_ids:
        return 0
    octets = bytearray(max(token_ids) // 8 + 1)
    for token_id in token_ids:
        octets[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(octets, "little")
