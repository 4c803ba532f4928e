"""Requests whose output must match something: they wait for it to be compiled, and each of their samples gets a mask.

While its constraint is compiled a request holds neither blocks nor a place in the queue; it can be aborted, or run out of time, as everybody can.
A constraint says when its text is complete: the choice ends with ``stop`` as soon as nothing but the end can follow, or when the end is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate

from kvd.scheduler.choosing import num_sequences
from kvd.scheduler.ending import Endings
from kvd.scheduler.plan import StepPlan
from kvd.scheduler.ports import ConstraintCompiler, ConstraintState
from kvd.scheduler.request import Leaving, Request, Sequence
from kvd.step import LateMasks, TokenMasks
from kvd.types import ErrorCode, FinishReason


@dataclass(frozen=True, slots=True)
class _Late:
    """A step in flight that waits for its masks."""

    step: int
    masks: LateMasks
    constrained: list[tuple[Sequence, Collection[int]]]


class Constraints:
    """The requests that wait for their constraints, and the masks of a step's samples."""

    def __init__(
        self, compiler: ConstraintCompiler | None, endings: Endings, enter: Callable[[Request], None], *, may_be_late: bool
    ) -> None:
        """Without a compiler every constraint is refused. ``enter`` lets a request wait for its turn, or for credit. ``may_be_late``: masks may be told while
        their step runs.
        """
        self._compiler = compiler
        self._may_be_late = may_be_late
        self._late: _Late | None = None
        self._mask_bytes = 0
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
        request.is_stepwise = not self._may_be_late
        for sequence in request.sequences:
            sequence.constraint = result.start()
            sequence.is_stepwise = sequence.is_stepwise or request.is_stepwise
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

    @property
    def are_late(self) -> bool:
        """Whether a step in flight waits for its masks."""
        return self._late is not None

    def write_masks(self, plan: StepPlan) -> None:
        """The masks of the plan's constrained samples, or word that they will come: what one of them depends on is in flight."""
        rows, counts = [sequence.row for sequence, _ in plan.constrained], [1 + len(draft) for _, draft in plan.constrained]
        if plan.masks_are_late:
            plan.late_masks = LateMasks(rows, counts)
            self._late = _Late(plan.step, plan.late_masks, plan.constrained)
        else:
            plan.masks = self._written(rows, counts, plan.constrained, [True] * len(rows))

    def tell_late(self, oldest_step: int) -> None:
        """All steps before ``oldest_step`` have been collected: if it is the one that waits for its masks, here they are."""
        late = self._late
        if late is not None and late.step == oldest_step:
            are_wanted = [not (each.is_over or each.request.is_over or each.leaving is Leaving.REPLANNED) for each, _ in late.constrained]
            late.masks.tell(self._written(late.masks.rows, late.masks.counts, late.constrained, are_wanted))
            self._late = None  # not before: were the masks not to be had, the step must still be given up

    def give_up_late(self) -> None:
        """The executor or the engine failed: nothing of the step that waits for its masks counts, but it must end."""
        late, self._late = self._late, None
        if late is not None:
            late.masks.tell(self._all_allowed(late.masks.rows, late.masks.counts))

    def _all_allowed(self, rows: list[int], counts: list[int]) -> TokenMasks:
        return TokenMasks(rows, counts, self._mask_bytes // 4, bytearray(b"\xff") * (self._mask_bytes * sum(counts)))

    def _written(
        self, rows: list[int], counts: list[int], constrained: list[tuple[Sequence, Collection[int]]], are_wanted: list[bool]
    ) -> TokenMasks:
        """The masks of the rows of these sequences; everything for those that are not wanted. A request that can sample nothing ends; its row runs once more,
        for nothing.
        """
        compiler = self._compiler
        assert compiler is not None, "a sequence has a constraint"
        states: list[ConstraintState] = []
        drafts: list[Collection[int]] = []
        for (sequence, draft), is_wanted in zip(constrained, are_wanted, strict=True):
            assert sequence.constraint is not None, "it was planned with one"
            if is_wanted:
                states.append(sequence.constraint)
                drafts.append(draft)
        words = compiler.masks(states, drafts)
        num_written = sum(1 + len(draft) for draft in drafts)
        if num_written:
            self._mask_bytes = len(words) // num_written
        size, place = self._mask_bytes, 0
        masks = TokenMasks(rows, counts, size // 4, words) if all(are_wanted) else self._all_allowed(rows, counts)
        for (sequence, _), count, is_wanted, first in zip(constrained, counts, are_wanted, accumulate(counts, initial=0), strict=False):
            if is_wanted:
                mask = memoryview(words)[size * place : size * (place + count)]
                place += count
                if masks.words is not words:
                    memoryview(masks.words)[size * first : size * (first + count)] = mask
                if not (sequence.is_over or sequence.request.is_over):
                    self._check(sequence, mask[:size])
        return masks

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
