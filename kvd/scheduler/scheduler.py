"""The scheduler: which request computes how many tokens in the next step, and what the step's outcome means for each.

No prefill and decode phases: a sequence has ``num_total`` tokens and ``num_computed`` of them are computed; the rest is what it may
run. A step first gives every decoding sequence its one token, then chunks of prompts what is left of the token budget, then admits those who wait,
first come, first served; background work comes last of all. The ids of sampled tokens are learnt at ``update``; until then they are only
counted, so that a further step can be scheduled while one is in flight.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.cache.manager import BlockTable, CacheManager, CopyOnWrite, Node
from kvd.cache.tenants import Selection
from kvd.commands import Event, RequestFailed, Submit
from kvd.config import SchedulerConfig
from kvd.scheduler.admission import clamp_max_tokens, lack_of_blocks, refuse
from kvd.scheduler.ending import Endings
from kvd.scheduler.loads import Loads
from kvd.scheduler.plan import StepPlan
from kvd.scheduler.ports import Clock, ColdTier
from kvd.scheduler.preemption import choose_victim
from kvd.scheduler.request import Leaving, Request, Sequence
from kvd.scheduler.roster import Roster
from kvd.scheduler.shortage import Shortage
from kvd.step import ExecutorOutput, SchedulerOutput
from kvd.types import TOKEN_BYTES, ErrorCode, FinishReason, TokenLogprobs

_BACKGROUND = 1


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
    ) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        self._namespace_of = namespace_of
        self._max_model_len = max_model_len
        self._roster = Roster(cache, clock, config.max_running, shared_tile_tokens)
        self._loads = Loads(cache, self._roster, cold_tier, int(cache.num_blocks * config.max_loading_fraction))
        self._shortage = Shortage(cache, self._roster)
        self._counters: Counter[str] = Counter()
        self._endings = Endings(self._roster, clock, self._counters)
        self._requests = self._endings.requests
        self._in_flight: deque[tuple[SchedulerOutput, list[Node]]] = deque()
        self._step = 0
        self._arrival = 0
        self._has_preempted = False

    # ------------------------------------------------------------------------------------------------ numbers

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and have credit."""
        return len({sequence.request for sequence in self._roster.running})

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks or a place: one a request, or after a preemption one a choice."""
        return len(self._roster.queue)

    @property
    def num_stalled(self) -> int:
        """Requests without stream credit."""
        return len(self._roster.stalled)

    def has_work(self) -> bool:
        """Whether a request is unfinished or an event untold."""
        return bool(self._requests or self._in_flight or self._endings.has_events)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the present queue depths."""
        names = ("steps", "prefill_tokens", "decode_tokens", "accepted", "finished", "failed", "refused")
        counts = {name: self._counters[name] for name in names}
        return counts | {
            "preemptions": self._roster.num_preemptions,
            "replanned": self._roster.num_replanned,
            "loads": self._loads.num_loads,
            "failed_loads": self._loads.num_failed,
            "loading_blocks": self._loads.num_blocks,
            "running": self.num_running,
            "waiting": self.num_waiting,
            "stalled": self.num_stalled,
        }

    # ----------------------------------------------------------------------------------------------- commands

    def submit(
        self, command: Submit, *, internal: bool = False, background: bool = False, origin: BlockOrigin = BlockOrigin.COMPUTED
    ) -> list[Event]:
        """Accept a request, or refuse it at once. An id that is live already is ignored: the edge has deduplicated.

        ``internal``: nobody reads its tokens, so only its terminal event is told, it needs no credit, is always let wait, and does not count as a use of the
        cache. ``background``: it runs behind everyone else. ``origin``: what the blocks that it computes are marked with.
        """
        if command.request_id in self._requests:
            return []
        namespace = self._namespace_of(command.tenant_salt, command.adapter)
        refusal = refuse(command, namespace, self._config, self._cache, self._max_model_len)
        if refusal is None and not internal and self.num_waiting >= self._config.max_waiting:
            message = f"{self.num_waiting} requests wait, the limit is {self._config.max_waiting} (max_waiting)"
            retry_after_s = self._endings.retry_after_s(self.num_waiting)
            refusal = RequestFailed(command.request_id, ErrorCode.OVERLOADED, message, retry_after_s)
        if refusal is not None:
            self._counters["refused"] += 1
            return [refusal]
        self._arrival += 1
        self._counters["accepted"] += 1
        request = Request(
            command,
            namespace,
            arrival=self._arrival,
            max_tokens=clamp_max_tokens(command, namespace, self._cache, self._max_model_len),
            submitted_s=self._clock.monotonic(),
            is_internal=internal,
            is_background=background,
            origin=origin,
        )
        self._requests[command.request_id] = request
        if request.has_credit:
            self._roster.queue.push(request.sequences[0])
        else:
            self._roster.stall(request, request.submitted_s)
        return []

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
        """The edge wants no more of this choice; nothing if it is unknown, over, or without a token yet."""
        request = self._requests.get(request_id)
        if request is not None:
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
        """What is due without a step: requests stalled for too long or too many of them, and what ``schedule`` had to end."""
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

    # ----------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can run now. It is in flight until ``update`` or ``fail_step``."""
        roster = self._roster
        roster.update_shares()
        plan = StepPlan(self._step + 1, self._config.max_tokens_per_step)
        self._has_preempted = False
        forks, chunks, background = self._run_decodes(plan)
        for sequence in forks + chunks:
            self._run_chunk(plan, sequence)
        self._admit(plan, below_priority=_BACKGROUND)
        for sequence in background:
            self._run_chunk(plan, sequence)
        self._admit(plan, below_priority=_BACKGROUND + 1)
        if plan.is_empty:
            return None
        self._step += 1
        self._counters["steps"] += 1
        step = plan.output(roster.released_rows, roster.shared_runs())
        roster.released_rows.clear()
        self._in_flight.append((step, plan.fills))
        return step

    def _run_decodes(self, plan: StepPlan) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Every row that only has its last token to compute; the others by what they are: choices to fork, prompts, background prompts."""
        forks: list[Sequence] = []
        chunks: list[Sequence] = []
        background: list[Sequence] = []
        rows, num_tokens, offsets, new_blocks = plan.rows, plan.num_tokens, plan.block_offsets, plan.block_ids
        step, extend, num_before = plan.step, self._cache.extend, len(plan.rows)
        for sequence in list(self._roster.running):
            computed = sequence.num_computed
            request = sequence.request
            if sequence.row < 0 or computed < sequence.num_planned:
                (forks if computed >= sequence.num_planned else background if request.priority else chunks).append(sequence)
                continue
            if sequence.leaving is not None or sequence.num_total >= request.limit_tokens:
                continue
            if plan.budget <= 0:
                break
            if request.credit <= 0 and not request.is_internal:
                self._stall(request)
                continue
            table = sequence.table
            assert table is not None, "a running sequence has blocks"
            copies = extend(table, computed + 1)
            if copies is None:
                copies = self._extend_by_force(sequence, computed + 1)
            if copies is None:
                continue
            if copies:
                plan.copy(sequence, copies)
            rows.append(sequence.row)
            num_tokens.append(1)
            if len(table.block_ids) > sequence.num_blocks_sent:
                new_blocks += table.block_ids[sequence.num_blocks_sent :]
                sequence.num_blocks_sent = len(table.block_ids)
            offsets.append(len(new_blocks))
            sequence.num_computed = computed + 1
            sequence.num_total += 1
            sequence.last_step = step
            request.credit -= 1
            plan.budget -= 1
        self._counters["decode_tokens"] += len(rows) - num_before
        return forks, chunks, background

    def _run_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """As many of the sequence's tokens as the budget allows, if it can run at all."""
        table, request = sequence.table, sequence.request
        if table is None or sequence.leaving is not None or plan.budget <= 0 or request.stalled_s is not None:
            return
        if table.waits_for and table.waits_for[-1] not in self._roster.computing:
            return
        if sequence.num_total >= request.limit_tokens:
            return
        num_tokens = min(sequence.num_total - sequence.num_computed, plan.budget)
        target = sequence.num_computed + num_tokens
        samples = target == sequence.num_total
        if samples and not request.has_credit:
            self._stall(request)
            return
        if target > table.num_tokens:
            copies = self._extend_by_force(sequence, target)
            if copies is None:
                return
        else:
            copies = ()
        if sequence.row < 0:
            self._roster.take_row(sequence)
            plan.start(sequence, num_tokens)
        else:
            plan.proceed(sequence, num_tokens)
        plan.copy(sequence, copies)
        self._note_fills(plan, sequence, target)
        if request.first_run_s is None:
            request.note_cached(table)
            request.first_run_s = self._clock.monotonic()
        self._counters["prefill_tokens" if sequence.num_computed < request.num_prompt_tokens else "decode_tokens"] += num_tokens
        sequence.num_computed = target
        sequence.last_step = plan.step
        plan.budget -= num_tokens
        if samples:
            sequence.num_total += 1
            request.credit -= sequence.num_samples
            sequence.num_samples = 1

    def _note_fills(self, plan: StepPlan, sequence: Sequence, target: int) -> None:
        table, computing = sequence.table, self._roster.computing
        assert table is not None, "a running sequence has blocks"
        for node in table.fills:
            if (node.depth + 1) * self._cache.block_size_tokens > target:
                break
            if node not in computing:
                computing.add(node)
                plan.fills.append(node)

    def _admit(self, plan: StepPlan, *, below_priority: int) -> None:
        """Seat those who wait, first come, first served, while there are budget, places and blocks."""
        roster, cache = self._roster, self._cache
        while plan.budget > 0 and not self._has_preempted:
            sequence = roster.queue.first()
            if sequence is None or sequence.request.priority >= below_priority:
                return
            if roster.num_slots + sequence.num_slots > roster.max_running:
                if self._preempt_stalled():
                    continue
                return
            if self._shortage.lasts(sequence):
                return
            request = sequence.request
            match = cache.match(bytes(sequence.tokens), request.namespace)
            self._loads.begin(sequence, match)
            table = cache.allocate(
                match,  # walked again if a load has put nodes behind it
                sequence.num_known,
                origin=request.origin,
                counts_use=not (request.is_internal or request.has_used_cache),
                reserve_blocks=len(roster.running),  # one for the next block of each who runs, lest it preempt the newcomer at once
                is_private=request.is_private,
            )
            if table is None:
                if self._preempt_stalled():
                    continue
                if roster.num_seated == 0 and cache.num_transient == 0:
                    self._fail_for_lack_of_blocks(sequence, sequence.num_known)
                    continue
                self._shortage.note(sequence)
                return
            request.has_used_cache = True
            roster.seat(sequence, table)
            self._run_chunk(plan, sequence)

    def _extend_by_force(self, sequence: Sequence, num_tokens: int) -> tuple[CopyOnWrite, ...] | None:
        """Blocks for positions up to ``num_tokens``, taken from others if need be. None: not now (or the sequence itself had to go)."""
        roster, cache = self._roster, self._cache
        assert sequence.table is not None, "a running sequence has blocks"
        while True:
            copies = cache.extend(sequence.table, num_tokens)
            if copies is not None:
                return copies
            if roster.num_leaving:
                return None  # blocks come back with the steps in flight
            victim = choose_victim(roster.stalled, roster.running)
            assert victim is not None, "the sequence itself is running"
            is_alone = all(each.request is victim for each in roster.seated())
            if victim is sequence.request and is_alone:
                if cache.num_transient == 0:
                    self._fail_for_lack_of_blocks(sequence, num_tokens)
                    roster.settle()
                return None
            self._has_preempted = True
            roster.preempt(victim)
            if sequence.table is None or sequence.leaving is not None:
                return None

    def _preempt_stalled(self) -> bool:
        """Take the blocks and the place of a stalled request for one that can run; whether they are to be had at once."""
        victim = choose_victim(self._roster.stalled, ())
        if victim is None or self._roster.num_leaving:
            return False
        self._roster.preempt(victim)
        return not self._roster.num_leaving

    def _fail_for_lack_of_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        self._endings.fail(sequence.request, ErrorCode.KV_CAPACITY, lack_of_blocks(num_tokens, self._cache))

    def _stall(self, request: Request) -> None:
        if request.stalled_s is None:
            self._roster.stall(request, self._clock.monotonic())

    # ------------------------------------------------------------------------------------------------- update

    def update(self, step: SchedulerOutput, out: ExecutorOutput) -> list[Event]:
        """Apply what a step, the oldest in flight, has computed and sampled."""
        roster = self._roster
        fills = self._collect(step)
        self._fail_rows(out.failed_rows)
        self._cache.complete_fill(fills)
        roster.computing.difference_update(fills)
        logprobs = out.logprobs if out.logprobs is not None else [None] * len(out.rows)
        for row, choice, token_id, logprob in zip(out.rows, out.choices, out.token_ids, logprobs, strict=True):
            sequence = roster.rows[row]
            assert sequence is not None, "a row outlives its steps"
            if sequence.request.is_over or sequence.leaving is Leaving.REPLANNED:
                continue
            if choice != sequence.choice:
                prompt = sequence.tokens[: sequence.request.num_prompt_tokens * TOKEN_BYTES]
                sequence = roster.fork(sequence, choice, prompt)
                sequence.num_total += 1
            elif sequence.is_over:
                continue
            self._append(sequence, token_id, logprob)
        return self._settle()

    def fail_step(self, step: SchedulerOutput, message: str) -> list[Event]:
        """The executor failed in this step: its requests fail, and every block that it was filling leaves the tree."""
        roster = self._roster
        fills = self._collect(step)
        roster.withdraw(fills)
        roster.computing.difference_update(fills)
        for row in (*(started.row for started in step.started), *step.continued.rows):
            sequence = roster.rows[row]
            if sequence is not None and not sequence.request.is_over:
                self._endings.fail(sequence.request, ErrorCode.ENGINE_ERROR, message)
        return self._settle()

    def on_load_done(self, load_id: int, num_loaded: int) -> list[Event]:
        """A load that the scheduler started is over; the first ``num_loaded`` of its blocks are in the pool."""
        self._loads.end(load_id, num_loaded)
        return self._settle()

    def _collect(self, step: SchedulerOutput) -> list[Node]:
        """The step is no longer in flight; what it was filling."""
        oldest, fills = self._in_flight.popleft()
        assert oldest is step, "steps are collected in order"
        self._roster.collected_step = step.step
        return fills

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprobs | None) -> None:
        """A sampled token of a choice: told, recorded, and perhaps its last."""
        request = sequence.request
        num_known = sequence.num_known
        if num_known % self._cache.block_size_tokens == 0 and sequence.table is not None:
            self._cache.record(sequence.table, sequence.tokens, num_known)
        packed = token_id.to_bytes(TOKEN_BYTES, "little")
        sequence.tokens += packed
        sequence.num_known = num_known + 1
        first_index = num_known - request.num_prompt_tokens
        self._endings.tell_token(sequence, first_index, packed, logprob)
        if token_id in request.stop_token_ids and first_index >= request.command.min_tokens:
            self._endings.end_choice(sequence, FinishReason.STOP)
        elif num_known + 1 >= request.limit_tokens:
            self._endings.end_choice(sequence, FinishReason.LENGTH)

    def _fail_rows(self, rows: tuple[int, ...]) -> None:
        """Non-finite logits: the requests of these rows fail alone; nothing that the rows were filling is kept, nor what others computed over it.

        A row that read blocks of another failed row, in this step or the one before, is none of them: it is planned anew.
        """
        failed: dict[BlockTable, Sequence] = {}
        for row in rows:
            sequence = self._roster.rows[row]
            assert sequence is not None, "a row outlives its steps"
            assert sequence.table is not None, "a row has blocks"
            if sequence.leaving is not Leaving.REPLANNED:
                failed[sequence.table] = sequence
        own = [sequence for table, sequence in failed.items() if failed.keys().isdisjoint(self._cache.awaited(table))]
        for sequence in own:
            assert sequence.table is not None, "it was there a moment ago"
            self._roster.withdraw(list(sequence.table.fills))
            if not sequence.request.is_over:
                message = "the model computed logits that are not finite for this request"
                self._endings.fail(sequence.request, ErrorCode.NONFINITE_LOGITS, message)

    def _settle(self) -> list[Event]:
        """Let those leave who can; the events since the last call."""
        self._roster.settle()
        return self._endings.take_events()

    def check_invariants(self) -> None:
        """Audit every place and count, the cache's besides."""
        self._roster.check_invariants(list(self._requests.values()))
        self._loads.check_invariants()
        self._cache.check_invariants()
        assert self._roster.num_seated == self._cache.num_tables, "a block table belongs to nobody"
        in_flight = {node for _, fills in self._in_flight for node in fills}
        assert self._roster.computing == in_flight, "a step in flight fills what nobody computes, or the reverse"
