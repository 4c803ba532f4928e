"""The scheduler: which request computes how many tokens in the next step, and what the step's outcome means for each.

No prefill and decode phases: a sequence has ``num_total`` tokens and ``num_computed`` of them are computed; the rest is what it may
run. What a step runs is decided in ``planning``, what its outcome means in ``outcome``. The ids of sampled tokens are learnt at ``update``; until then they are only
counted, so that a further step can be scheduled while one is in flight.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager, Node
from kvd.cache.tenants import Selection
from kvd.commands import Event, RequestFailed, Submit
from kvd.config import SchedulerConfig, SpeculativeConfig
from kvd.scheduler.admission import clamp_max_tokens, refuse
from kvd.scheduler.beam_rows import begin_search
from kvd.scheduler.constraints import Constraints
from kvd.scheduler.deadlines import Deadlines
from kvd.scheduler.drafting import Drafting, problem_of_drafting
from kvd.scheduler.ending import Endings
from kvd.scheduler.loads import Loads
from kvd.scheduler.order import BACKGROUND
from kvd.scheduler.outcome import Outcomes
from kvd.scheduler.planning import Planner
from kvd.scheduler.ports import Clock, ColdTier, ConstraintCompiler
from kvd.scheduler.request import Request
from kvd.scheduler.roster import Roster
from kvd.step import ExecutorOutput, SchedulerOutput
from kvd.types import ErrorCode, FinishReason


class Scheduler:
    """All requests of the daemon. Used by the engine thread alone.

    Every accepted request ends in exactly one ``RequestDone`` or ``RequestFailed``. Methods return the events that they cause, in order; what
    ``schedule`` causes comes with the next ``update`` or ``expire``, so call ``expire`` once a round.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        clock: Clock,
        *,
        namespace_of: Callable[[bytes, bytes], Namespace],
        max_model_len: int,
        shared_tile_tokens: int,
        cold_tier: ColdTier | None = None,
        constraint_compiler: ConstraintCompiler | None = None,
        speculative: SpeculativeConfig | None = None,
        has_draft_model: bool = False,
        masks_may_be_late: bool = False,
    ) -> None:
        """Without ``speculative`` nobody drafts."""
        self._config = config
        self._cache = cache
        self._clock = clock
        self._namespace_of = namespace_of
        self._max_model_len = max_model_len
        self._roster = Roster(cache, clock, config, shared_tile_tokens)
        self._loads = Loads(cache, self._roster, cold_tier, int(cache.num_blocks * config.max_loading_fraction))
        self._counters: Counter[str] = Counter()
        self._endings = Endings(self._roster, clock, self._counters)
        self._requests = self._endings.requests
        self._deadlines = Deadlines()
        self._drafting: Drafting | None = None
        if speculative is not None:
            self._drafting = Drafting(
                speculative, cache, self._roster, clock, endings=self._endings, counters=self._counters, has_model=has_draft_model
            )
        self._planner = Planner(
            config, cache, clock, self._roster, self._loads, drafting=self._drafting, endings=self._endings, counters=self._counters
        )
        self._constraints = Constraints(constraint_compiler, self._endings, self._enter, may_be_late=masks_may_be_late)
        self._outcomes = Outcomes(cache, self._roster, self._endings, self._constraints, self._counters)
        self._in_flight: deque[tuple[SchedulerOutput, list[Node]]] = deque()
        self._awaits_ids = False
        """Whether nothing more is planned until the newest step in flight is collected."""
        self._step = 0
        self._arrival = 0

    # ------------------------------------------------------------------------------------------------ numbers

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and have credit."""
        return len({sequence.request for sequence in self._roster.running})

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks or a place, one a request, or after a preemption one a choice; and requests that wait for their constraints."""
        return len(self._roster.queue) + self._constraints.num_compiling

    @property
    def num_stalled(self) -> int:
        """Requests without stream credit."""
        return len(self._roster.stalled)

    def has_work(self) -> bool:
        """Whether a request is unfinished or an event untold."""
        return bool(self._requests or self._in_flight or self._endings.has_events)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the present queue depths."""
        names = (
            "steps", "prefill_tokens", "decode_tokens", "accepted", "finished", "failed", "refused", "beam_blocks", "beam_blocks_saved",
            "drafted_tokens", "accepted_tokens",
        )  # fmt: skip
        counts = {name: self._counters[name] for name in names}
        return counts | {
            "preemptions": self._roster.num_preemptions,
            "resumed_tokens": self._roster.num_resumed_tokens,
            "resume_recomputed_tokens": self._roster.num_recomputed_tokens,
            "replanned": self._roster.num_replanned,
            "loads": self._loads.num_loads,
            "failed_loads": self._loads.num_failed,
            "loading_blocks": self._loads.num_blocks,
            "running": self.num_running,
            "waiting": self.num_waiting,
            "compiling": self._constraints.num_compiling,
            **self._constraints.stats(),
            "stalled": self.num_stalled,
        }

    # ----------------------------------------------------------------------------------------------- commands

    def submit(
        self,
        command: Submit,
        *,
        internal: bool = False,
        background: bool = False,
        origin: BlockOrigin = BlockOrigin.COMPUTED,
        is_private: bool = False,
        waited_s: float = 0.0,
    ) -> list[Event]:
        """Accept a request, or refuse it at once. An id that is live already is ignored: the edge has deduplicated.

        ``internal``: nobody reads its tokens, so only its terminal event is told, it needs no credit, is always let wait, and does not count as a use of the
        cache. ``background``: it runs behind everyone else. ``origin``: what the blocks that it computes are marked with. ``is_private``: it leaves nothing in the
        cache. ``waited_s``: how long it has waited before, which counts for its rank, its times and its ``queue_ms``.
        """
        if command.request_id in self._requests:
            return []
        namespace = self._namespace_of(command.tenant_salt, command.adapter)
        refusal = refuse(command, namespace, self._config, self._cache, self._max_model_len)
        if refusal is None and (problem := problem_of_drafting(command, self._drafting)):
            refusal = RequestFailed(command.request_id, ErrorCode.BAD_REQUEST, problem)
        if refusal is None and not internal and self._num_without_place() >= self._config.max_waiting:
            refusal = self._make_room(command)
        if refusal is not None:
            self._counters["refused"] += 1
            return [refusal]
        self._arrival += 1
        self._counters["accepted"] += 1
        submitted_s, roster = self._clock.monotonic() - waited_s, self._roster
        request = Request(
            command,
            namespace,
            arrival=self._arrival,
            max_tokens=clamp_max_tokens(command, namespace, self._cache, self._max_model_len),
            submitted_s=submitted_s,
            tenant=roster.tenants.open(command.tenant),
            priority=BACKGROUND if background else command.priority,
            rank_s=submitted_s + min(command.deadline_s or self._config.ageing_s, self._config.ageing_s),
            is_internal=internal,
            origin=origin,
        )
        request.is_private = is_private
        begin_search(request)
        if self._drafting is not None:
            self._drafting.enrol(request)
        self._endings.add(request)
        self._deadlines.add(request)
        if command.constraint is None:
            self._enter(request)
            return []
        self._constraints.begin(request)
        return self._settle()

    def _num_without_place(self) -> int:
        """Of those who wait, how many the free running places are not for; the others are seated with the next steps, if there are blocks.

        Several choices take several places: what fits is reckoned by the mean of what those who wait want, so that nobody has to be looked at.
        """
        num_waiting, roster = self.num_waiting, self._roster
        if not num_waiting:
            return 0
        num_free = roster.max_running - roster.num_slots
        return num_waiting - min(num_waiting, num_free * num_waiting // (roster.queue.num_slots + self._constraints.num_slots))

    def _make_room(self, command: Submit) -> RequestFailed | None:
        """In a full queue: one that waits gives up its place, or else the refusal."""
        message = f"{self._num_without_place()} requests wait for a place, the limit is {self._config.max_waiting} (max_waiting)"
        roster = self._roster
        displaced = roster.queue.displaced(command.priority, roster.tenants.num_waiting(command.tenant))
        if displaced is None:
            return RequestFailed(command.request_id, ErrorCode.OVERLOADED, message, self._endings.retry_after_s(command.priority))
        self._endings.fail(displaced, ErrorCode.OVERLOADED, message, self._endings.retry_after_s(displaced.priority))
        return None

    def _enter(self, request: Request) -> None:
        """The request has all that it needs but blocks, and perhaps credit."""
        self._roster.lift(request.tenant)
        if request.has_credit:
            self._roster.queue.push(request.sequences[0])
        else:
            self._roster.stall(request, self._clock.monotonic())

    def abort(self, request_id: bytes) -> list[Event]:
        """End a request now; nothing if it is unknown or over."""
        request = self._requests.get(request_id)
        if request is not None:
            self._endings.abort(request)
        return self._settle()

    def abort_all(self) -> list[Event]:
        """End every request."""
        for request in list(self._requests.values()):
            self._endings.abort(request)
        return self._settle()

    def end_compiling(self) -> list[Event]:
        """Fail, for the daemon is shutting down, every request that still waits for its constraint."""
        self._constraints.end_compiling()
        return self._settle()

    def fail_all(self, code: ErrorCode, message: str, retry_after_s: float = 0.0) -> list[Event]:
        """Fail every request."""
        for request in list(self._requests.values()):
            self._endings.fail(request, code, message, retry_after_s)
        return self._settle()

    def forget(self, selection: Selection) -> tuple[int, list[Event]]:
        """Everything of a selection leaves the cache at once; the requests that are in it, or may grow into it, go on and leave nothing behind.

        Returns how many blocks left, and the events.
        """
        for request in self._requests.values():
            salt = request.namespace.tenant_salt
            if any(selection.may_hold(salt, sequence.tokens) for sequence in request.sequences):
                request.is_private = True
                for sequence in request.sequences:
                    if sequence.table is not None:
                        sequence.table.is_private = True
        num_blocks, affected = self._cache.forget(selection)
        self._roster.replan(affected)
        return num_blocks, self._settle()

    def finish_choice(self, request_id: bytes, choice: int) -> list[Event]:
        """The edge wants no more of this choice; nothing if it is unknown, over, or without a token told yet."""
        request = self._requests.get(request_id)
        if request is not None and request.held is None:
            for sequence in request.sequences:
                if sequence.choice == choice and not sequence.is_over and sequence.num_known > request.num_prompt_tokens:
                    self._endings.end_choice(sequence, FinishReason.STOP)
                    break
        return self._settle()

    def grant(self, request_id: bytes, num_tokens: int) -> list[Event]:
        """More stream credit."""
        request = self._requests.get(request_id)
        if request is not None:
            request.credit += num_tokens
            if request.stalled_s is not None and request.has_credit:
                self._roster.unstall(request)
        return self._settle()

    def expire(self) -> list[Event]:
        """What is due without a step: constraints that are compiled by now or were given up, requests whose time is over, stalled ones for too long or too many of them, and what ``schedule`` had to end."""
        if self._deadlines.next_s is not None:
            for request, code, message in self._deadlines.due(self._clock.monotonic()):
                retry_after_s = self._endings.retry_after_s(request.priority) if code is ErrorCode.QUEUE_TIMEOUT else 0.0
                self._endings.fail(request, code, message, retry_after_s)
        if self._constraints.num_compiling:
            self._constraints.poll()
        self._constraints.end_outgrown(self._requests.values())
        stalled = self._roster.stalled
        if stalled:
            limit_s = self._clock.monotonic() - self._config.stall_timeout_s
            for request in list(stalled):
                assert request.stalled_s is not None, "on the list of the stalled"
                if len(stalled) <= self._config.max_stalled and request.stalled_s > limit_s:
                    break
                self._endings.fail(
                    request, ErrorCode.CLIENT_TOO_SLOW, "the stream got no credit for too long, or too many streams have none"
                )
        return self._settle()

    def due_in_s(self) -> float:
        """Seconds until ``expire`` may have to end a request that named a time; infinite without one."""
        next_s = self._deadlines.next_s
        return math.inf if next_s is None else max(0.0, next_s - self._clock.monotonic())

    # ----------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can run now. It is in flight until ``update`` or ``fail_step``.

        Where a stepwise sequence waits for ids in flight, all wait with it: a step without it would take as long for fewer rows, and it would be in every other one only.
        """
        if self._awaits_ids or self._constraints.are_late or (self._drafting is not None and self._drafting.prepare() and self._in_flight):
            return None
        roster = self._roster
        roster.update_shares()
        plan = self._planner.plan(self._step + 1)
        if plan.is_empty:
            return None
        if plan.constrained:
            self._constraints.write_masks(plan)
        self._step += 1
        self._counters["steps"] += 1
        step = plan.output(roster.released_rows, roster.shared_runs())
        roster.released_rows.clear()
        self._in_flight.append((step, plan.fills))
        self._awaits_ids = plan.awaits_ids
        return step

    # ------------------------------------------------------------------------------------------------- update

    def update(self, step: SchedulerOutput, out: ExecutorOutput) -> list[Event]:
        """Apply what a step, the oldest in flight, has computed and sampled."""
        drafting = self._drafting
        if drafting is not None:
            drafting.note_kept(step.step, out)
        self._outcomes.apply(out, self._collect(step))
        if drafting is not None:
            drafting.settle(step.step)
        if self._in_flight:
            self._constraints.tell_late(self._in_flight[0][0].step)
        return self._settle()

    def fail_step(self, step: SchedulerOutput, message: str) -> list[Event]:
        """The executor failed in this step: its requests fail, and every block that it was filling leaves the tree."""
        self._planner.pace.forget(step.step)
        if self._drafting is not None:
            self._drafting.forget(step.step)
        self._constraints.give_up_late()
        self._outcomes.fail(step, self._collect(step), message)
        return self._settle()

    def give_up_late(self) -> None:
        """Nothing is collected any more: let a step end that waits for its masks, lest the executor never does."""
        self._constraints.give_up_late()

    def note_step_time(self, step: SchedulerOutput, seconds: float) -> None:
        """The executor took so long for a step, not counting what that waited for another one."""
        self._planner.pace.end(step.step, seconds)
        if self._drafting is not None:
            self._drafting.note_time(step.step, seconds)

    def on_load_done(self, load_id: int, num_loaded: int) -> list[Event]:
        """A load that the scheduler started is over; the first ``num_loaded`` of its blocks are in the pool."""
        self._loads.end(load_id, num_loaded)
        return self._settle()

    def _collect(self, step: SchedulerOutput) -> list[Node]:
        """The step is no longer in flight; what it was filling."""
        oldest, fills = self._in_flight.popleft()
        assert oldest is step, "steps are collected in order"
        self._roster.collected_step = step.step
        self._awaits_ids = self._awaits_ids and bool(self._in_flight)
        return fills

    def _settle(self) -> list[Event]:
        """Let those leave who can; the events since the last call."""
        self._roster.settle()
        return self._endings.take_events()

    def check_invariants(self) -> None:
        """Audit every place and count, the cache's besides."""
        self._roster.check_invariants(list(self._requests.values()))
        self._loads.check_invariants()
        self._constraints.check_invariants(list(self._requests.values()))
        self._cache.check_invariants()
        assert self._roster.num_seated == self._cache.num_tables, "a block table belongs to nobody"
        in_flight = {node for _, fills in self._in_flight for node in fills}
        assert self._roster.computing == in_flight, "a step in flight fills what nobody computes, or the reverse"
