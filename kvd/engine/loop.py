"""The engine loop. It owns time and order: drain the inbox, schedule, submit, and between submit and collect emit, observe, evict.

    drain ─ schedule ─ submit ─┬─ emit the last step's events
                               ├─ observer.on_step(step, cache.take_events())
                               └─ background eviction
            collect ─ update ──┘

Up to ``max_steps_in_flight`` steps are submitted before the oldest is collected. The loop runs on the thread that called ``run``, from
the end of the store's rehydration to the end of the process; until the pins that rehydration did not bring back are computed (or the time for it
is over) its state is ``rehydrating``, and clients are answered ``starting``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from kvd.cache.events import BlockOrigin
from kvd.cache.manager import CacheManager
from kvd.commands import (
    Abort,
    AdapterNames,
    AdapterRead,
    CheckpointDone,
    CheckpointNow,
    Command,
    ConstraintCompiled,
    Drain,
    Event,
    FinishChoice,
    ForgetDone,
    ForgetPrefixes,
    Grant,
    ListAdapters,
    LoadAdapter,
    LoadDone,
    OpDone,
    OpFailed,
    PinPrefix,
    Query,
    Recipe,
    RecipeDurable,
    RequestDone,
    RequestFailed,
    Snapshot,
    Submit,
    TokensOut,
    UnloadAdapter,
    Unpin,
)
from kvd.engine.adapters import Adapters
from kvd.engine.forgetting import Forgetting
from kvd.engine.pins import Pins
from kvd.engine.ports import CacheObserver, Clock, Executor, Inbox, Outbox, Ticket
from kvd.engine.reports import Reports
from kvd.scheduler.scheduler import Scheduler
from kvd.step import SchedulerOutput
from kvd.types import ErrorCode

_IDLE_WAIT_S = 0.25
_DRAIN_COMPILES_S = 1.0
"""A drain waits no longer for constraints to be compiled."""
_EVICT_BLOCKS_PER_STEP = 64
_EXPIRE_BLOCKS_PER_ROUND = 256
_SNAPSHOT_INTERVAL_S = 0.5
_SAMPLE_INTERVAL_S = 1.0
_LONG_STEP_S = 0.05
"""Behind a step that takes longer none is queued: the time between steps is nothing beside it, and a request that comes meanwhile would wait for both."""


class State(StrEnum):
    STARTING = "starting"
    REHYDRATING = "rehydrating"
    READY = "ready"
    DRAINING = "draining"


class LoopEnd(StrEnum):
    """Why ``run`` returned."""

    DRAINED = "drained"
    ENGINE_ERROR = "engine_error"


@dataclass(slots=True, kw_only=True)
class StartWork:
    """What is left of the start when the loop begins: pins to hold, prefixes to compute again, and how long READY may wait."""

    recipes: dict[str, Recipe] = field(default_factory=dict)
    recompute: Sequence[Submit] = ()
    """Logged prefixes whose bytes are gone, the most valuable first."""
    pins_not_computed: Mapping[str, str] = field(default_factory=dict)
    """Recipes that are kept as they are, by name, and why."""
    pins_deadline_s: float = 0.0
    """Monotonic time at which READY comes even with pins pending."""
    recompute_deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Flight:
    step: SchedulerOutput
    ticket: Ticket
    submitted_s: float


class EngineLoop:
    """Single use: construct, ``run``, done. ``request_drain`` may be called from a signal handler; all else belongs to the loop's thread."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        outbox: Outbox,
        scheduler: Scheduler,
        cache: CacheManager,
        executor: Executor,
        observer: CacheObserver,
        pins: Pins,
        adapters: Adapters,
        reports: Reports,
        clock: Clock,
        max_steps_in_flight: int,
        drain_timeout_s: float,
        log_steps: bool,
        on_progress: Callable[[State], None],
        on_state: Callable[[State], None],
        on_served: Callable[[], None],
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self._observer = observer
        self._pins = pins
        self._adapters = adapters
        self._reports = reports
        self._clock = clock
        self._max_steps_in_flight = max_steps_in_flight
        self._drain_timeout_s = drain_timeout_s
        self._log_steps = log_steps
        self._on_progress = on_progress
        self._on_state = on_state
        self._on_served = on_served
        self._has_served = False
        self._state = State.REHYDRATING
        self._in_flight: deque[_Flight] = deque()
        self._collected_s = 0.0
        self._chunk_token_s = 0.0
        """Seconds of the last step that had prompt tokens, by each of them."""
        self._unsent: list[Event] = []
        self._step = 0
        self._work = StartWork()
        self._recomputing: set[bytes] = set()
        self._checkpoints: set[bytes] = set()
        self._forgetting = Forgetting(
            scheduler=scheduler,
            pins=pins,
            adapters=adapters,
            observer=observer,
            observe=self._observe,
            block_size_tokens=cache.block_size_tokens,
        )
        self._drain_requested = False
        self._drain_deadline_s = 0.0
        self._compiles_deadline_s = math.inf
        self._next_snapshot_s = 0.0
        self._next_sample_s = 0.0
        self._log = structlog.get_logger("engine")

    @property
    def drain_left_s(self) -> float:
        """What is left of the time that a drain gave the running requests; 0 without a drain."""
        return max(0.0, self._drain_deadline_s - self._clock.monotonic())

    def request_drain(self) -> None:
        """Ask for a drain; safe in a signal handler (it only sets a flag, which an idle loop sees within a quarter of a second)."""
        self._drain_requested = True

    def run(self, work: StartWork) -> LoopEnd:
        """Serve until drained or until the executor fails. Every request has had its terminal event when this returns."""
        try:
            return self._serve(work)
        finally:
            self._scheduler.give_up_late()  # whatever was raised here: the executor must be able to end

    def _serve(self, work: StartWork) -> LoopEnd:
        self._begin(work)
        while True:
            for command in self._inbox.drain():
                self._handle(command)
            self._keep_time()
            step = self._scheduler.schedule() if self._has_room() else None
            if step is not None and not self._start_step(step):
                return LoopEnd.ENGINE_ERROR
            self._between_steps()
            if self._in_flight and (step is None or not self._has_room()):
                if not self._collect():
                    return LoopEnd.ENGINE_ERROR
            elif step is None:
                if self._is_drained():
                    return LoopEnd.DRAINED
                self._rest()

    def _has_room(self) -> bool:
        """Whether another step may be submitted now."""
        num_chunk_tokens = sum(flight.step.num_chunk_tokens for flight in self._in_flight)
        return len(self._in_flight) < self._max_steps_in_flight and num_chunk_tokens * self._chunk_token_s <= _LONG_STEP_S

    def _rest(self) -> None:
        """Nothing runs: sleep. But what the scheduler had to end instead of running it is told at once, and may have made room."""
        ended = [*self._scheduler.expire(), *self._adapters.expire()]
        self._take(ended)
        if not ended:
            self._inbox.wait(min(_IDLE_WAIT_S, self._observer.idle_delay_s(), self._scheduler.due_in_s()))

    def _is_drained(self) -> bool:
        if self._state is not State.DRAINING or self._scheduler.has_work() or self._adapters.has_waiting or self._unsent:
            return False
        return (
            not (self._pins.has_open_operations or self._checkpoints or self._forgetting.has_open_operations)
            or self._clock.monotonic() >= self._drain_deadline_s
        )

    # -------------------------------------------------------------------------------- one round

    def _start_step(self, step: SchedulerOutput) -> bool:
        self._step = step.step
        try:
            ticket = self._executor.submit(step)
        except Exception as error:  # a copy that storage asked for has failed before it
            self._fail_everything((*(each.step for each in self._in_flight), step), error)
            return False
        self._in_flight.append(_Flight(step, ticket, self._clock.monotonic()))
        return True

    def _between_steps(self) -> None:
        """What happens while the executor works: the last step's tokens leave, storage looks and copies, eviction catches up."""
        self._flush()
        self._observer.set_queue_depth(self._scheduler.num_waiting)
        self._observe()
        self._cache.evict_to_watermark(_EVICT_BLOCKS_PER_STEP)
        self._on_progress(self._state)

    def _observe(self) -> None:
        self._observer.on_step(self._step, self._cache.take_events())

    def _collect(self) -> bool:
        flight = self._in_flight.popleft()
        step = flight.step
        try:
            output = self._executor.collect(flight.ticket)
        except Exception as error:  # whatever the executor raised: its state is unknown from here on
            self._fail_everything((step, *(each.step for each in self._in_flight)), error)
            return False
        began_s, self._collected_s = max(flight.submitted_s, self._collected_s), self._clock.monotonic()
        self._observer.note_prefill(step.num_chunk_tokens, self._collected_s - began_s)
        if step.num_chunk_tokens:
            self._chunk_token_s = (self._collected_s - began_s) / step.num_chunk_tokens
        self._scheduler.note_step_time(step, self._collected_s - began_s)
        self._take(self._scheduler.update(step, output))
        if self._log_steps:
            self._log_step(step)
        return True

    def _log_step(self, step: SchedulerOutput) -> None:
        cache = self._cache
        self._log.info(
            "step",
            step=step.step,
            running=len(step.started) + len(step.continued.rows),
            num_tokens=sum(row.num_tokens for row in step.started) + sum(step.continued.num_tokens),
            blocks_used=cache.num_used,
            blocks_shared=cache.num_shared,
            blocks_cached=cache.num_cached,
            blocks_free=cache.num_free,
        )

    def _fail_everything(self, steps: Sequence[SchedulerOutput], error: Exception) -> None:
        """``steps`` are all that are in flight, the oldest first."""
        self._log.error("engine_error", step=steps[0].step, error=repr(error), exc_info=error)
        message = f"the executor failed: {type(error).__name__}; the daemon restarts"
        for step in steps:
            self._take(self._scheduler.fail_step(step, message))
        self._in_flight.clear()
        message = "the daemon restarts after an executor failure"
        self._take(self._adapters.end_waiting(ErrorCode.DRAINING, message))
        self._take(self._scheduler.fail_all(ErrorCode.DRAINING, message))
        self._observe()
        self._flush()

    def _take(self, events: Sequence[Event]) -> None:
        """Keep the scheduler's events for the next flush; those of internal requests end here."""
        for event in events:
            request_id = getattr(event, "request_id", b"")
            if self._pins.owns(request_id):
                if isinstance(event, RequestDone | RequestFailed):
                    self._take(self._pins.on_request_event(event))
            elif request_id in self._recomputing:
                if isinstance(event, RequestDone | RequestFailed):
                    self._recomputing.discard(request_id)
            else:
                self._unsent.append(event)
            if request_id in self._adapters.uses and isinstance(event, RequestDone | RequestFailed):
                self._take(self._adapters.release(request_id))

    def _flush(self) -> None:
        if self._unsent:
            if not self._has_served and any(isinstance(event, TokensOut) for event in self._unsent):
                self._note_served()
            self._outbox.put(self._unsent)
            self._unsent = []

    def _note_served(self) -> None:
        if not self._has_served:
            self._has_served = True
            self._on_served()

    # -------------------------------------------------------------------------------- commands

    def _handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._take(self._submit(command))
            case Grant():
                if not self._adapters.grant(command.request_id, command.num_tokens):
                    self._take(self._scheduler.grant(command.request_id, command.num_tokens))
            case FinishChoice():
                self._take(self._scheduler.finish_choice(command.request_id, command.choice))
            case Abort():
                self._abort((command.request_id,))
            case Query():
                self._unsent.append(self._answer(command))
            case PinPrefix() | Unpin() | ForgetPrefixes() | LoadAdapter() | UnloadAdapter() if self._state is not State.READY:
                self._unsent.append(OpFailed(command.op_id, *self._not_ready()))
            case PinPrefix():
                refusal = self._forgetting.refuse_pin(command.op_id, command.recipe)
                self._take([refusal] if refusal is not None else self._adapters.pin(command, self._pins.pin))
            case LoadAdapter() | UnloadAdapter() | ListAdapters() | AdapterRead() | AdapterNames():
                self._take(self._adapters.handle(command))
            case ForgetPrefixes():
                events, own = self._forgetting.begin(command)
                self._take(events)
                self._unsent += own
            case ForgetDone():
                self._unsent += self._forgetting.on_done(command)
            case Unpin():
                self._unsent += self._pins.unpin(command)
            case CheckpointNow():
                self._observe()  # a checkpoint covers everything that happened before it was asked for
                self._checkpoints.add(command.op_id)
                self._observer.checkpoint_now(command.op_id)
            case RecipeDurable():
                self._observe()  # a pin's bytes are awaited by a checkpoint, which must know of them
                self._take(self._pins.on_recipe_durable(command))
            case CheckpointDone():
                self._checkpoint_done(command)
            case ConstraintCompiled():
                pass  # it ends the sleep; the round looks for what is compiled by now
            case LoadDone():
                self._take(self._scheduler.on_load_done(command.load_id, command.num_loaded))
            case Drain():
                self._drain(command.timeout_s)
                if command.op_id:
                    self._unsent.append(OpDone(command.op_id, {"state": State.DRAINING.value}))

    def _submit(self, command: Submit) -> Sequence[Event]:
        if self._state is not State.READY:
            code, message, retry_after_s = self._not_ready()
            return [RequestFailed(command.request_id, code, message, retry_after_s)]
        return self._adapters.submit(command)

    def _not_ready(self) -> tuple[str, str, float]:
        if self._state is State.DRAINING:
            return ErrorCode.DRAINING, "the daemon is shutting down", 1.0
        return ErrorCode.STARTING, "the daemon is starting", 0.5

    def _answer(self, query: Query) -> Event:
        if query.what == "status":
            return OpDone(query.op_id, self._reports.status(self._state))
        if query.what == "stats":
            return OpDone(query.op_id, self._reports.stats())
        if query.what == "prefixes":
            return OpDone(query.op_id, self._reports.prefixes(query.tenant))
        return OpFailed(query.op_id, ErrorCode.BAD_REQUEST, f"no report is named {query.what!r}")

    def _checkpoint_done(self, command: CheckpointDone) -> None:
        pin_events = self._pins.on_checkpoint_done(command)
        if pin_events is not None:
            self._note_served()
            self._unsent += pin_events
            return
        self._checkpoints.discard(command.op_id)
        if command.error:
            self._unsent.append(OpFailed(command.op_id, ErrorCode.STORAGE_ERROR, command.error))
        else:
            self._unsent.append(OpDone(command.op_id, {"blocks": command.num_blocks, "bytes": command.num_bytes}))

    # -------------------------------------------------------------------------------- time and state

    def _begin(self, work: StartWork) -> None:
        self._work = work
        self._pins.expire(self._clock.unix())
        self._adapters.preload(sorted(work.recipes.values(), key=lambda recipe: -recipe.priority))
        self._take(self._pins.restore(work.recipes, work.pins_not_computed))
        for command in work.recompute:
            self._recomputing.add(command.request_id)
            self._take(self._adapters.submit(command, internal=True, background=True, origin=BlockOrigin.RECOMPUTED))
        self._snapshot()

    def _keep_time(self) -> None:
        now = self._clock.monotonic()
        self._take([*self._scheduler.expire(), *self._adapters.expire()])
        if self._drain_requested:
            self._drain_requested = False
            self._drain(self._drain_timeout_s)
        if self._state is State.REHYDRATING:
            self._rehydrate(now)
        if now >= self._compiles_deadline_s:
            self._compiles_deadline_s = math.inf  # once: nobody comes any more
            self._take(self._scheduler.end_compiling())
        if self._state is State.DRAINING and now >= self._drain_deadline_s:
            self._take(self._adapters.end_waiting(ErrorCode.DRAINING, "the daemon is shutting down"))
            self._take(self._scheduler.abort_all())
        self._cache.expire_retention(now, _EXPIRE_BLOCKS_PER_ROUND)
        if now >= self._next_sample_s:
            self._next_sample_s = now + _SAMPLE_INTERVAL_S
            self._reports.sample()
            if self._state is not State.DRAINING:
                self._pins.expire(self._clock.unix())

    def _rehydrate(self, now: float) -> None:
        if self._recomputing and now >= self._work.recompute_deadline_s:
            self._abort(tuple(self._recomputing))
        pins_left = self._pins.num_pending if now < self._work.pins_deadline_s else 0
        is_reading = self._adapters.is_reading and now < self._work.pins_deadline_s
        if not pins_left and not self._recomputing and not is_reading:
            self._enter(State.READY)
        elif now >= self._next_snapshot_s:
            self._snapshot()

    def _drain(self, timeout_s: float) -> None:
        deadline_s = self._clock.monotonic() + timeout_s
        if self._state is State.DRAINING:
            self._drain_deadline_s = min(self._drain_deadline_s, deadline_s)
            return
        self._drain_deadline_s = deadline_s
        self._compiles_deadline_s = self._clock.monotonic() + _DRAIN_COMPILES_S
        self._enter(State.DRAINING)
        self._abort((*self._recomputing, *self._pins.drain()))  # the start's own work, which nobody waits for

    def _abort(self, request_ids: Sequence[bytes]) -> None:
        for request_id in request_ids:
            self._take(self._adapters.abort(request_id) or self._scheduler.abort(request_id))

    def _enter(self, state: State) -> None:
        self._state = state
        self._snapshot()
        self._flush()
        self._on_state(state)

    def _snapshot(self) -> None:
        now = self._clock.monotonic()
        self._next_snapshot_s = now + _SNAPSHOT_INTERVAL_S
        ready_in_s = max(0.0, self._work.pins_deadline_s - now) if self._state is State.REHYDRATING else 0.0
        self._unsent.append(Snapshot(self._state, self._reports.status(self._state), self._reports.stats(), min(ready_in_s, 2.0)))
