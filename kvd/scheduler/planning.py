"""What a step runs: decodes first, then chunks of prompts, then newcomers, then background work, within the step's token budget.

A plain sequence that decodes is planned without its last token's id, so that a further step can be in flight; a *stepwise* one waits until it is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvd.cache.manager import BlockTable, CacheManager, CopyOnWrite
from kvd.config import SchedulerConfig
from kvd.scheduler.admission import lack_of_blocks
from kvd.scheduler.beam_rows import waiting_beams
from kvd.scheduler.drafting import Drafting
from kvd.scheduler.ending import Endings
from kvd.scheduler.loads import Loads
from kvd.scheduler.order import BACKGROUND, Order
from kvd.scheduler.pace import Pace
from kvd.scheduler.plan import StepPlan
from kvd.scheduler.ports import Clock
from kvd.scheduler.preemption import choose_victim
from kvd.scheduler.request import Request, Sequence
from kvd.scheduler.roster import Roster
from kvd.scheduler.shortage import Shortage
from kvd.types import ErrorCode


class Planner:
    """Makes the scheduler's steps."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        clock: Clock,
        roster: Roster,
        loads: Loads,
        *,
        drafting: Drafting | None,
        endings: Endings,
        counters: Counter[str],
    ) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        self._roster = roster
        self._loads = loads
        self._endings = endings
        self._counters = counters
        self._drafting = drafting
        self._shortage = Shortage(cache, roster)
        self._has_preempted = False
        self._copying: list[BlockTable] = []
        """Tables whose first step was planned last: what their beginning is copied from is held until that step is with the executor, lest a load write to it before."""
        self.pace = Pace(config.max_inter_token_ms / 1000)

    def plan(self, step: int) -> StepPlan:
        """Step number ``step``; perhaps an empty one. What is planned counts as computed, its samples as taken. The step before it has been submitted."""
        for table in self._copying:
            self._cache.end_copy(table)
        plan = StepPlan(step, self._config.max_tokens_per_step)
        self._has_preempted = False
        drafting = self._drafting
        forks, stepwise, chunks, background = self._run_decodes(plan)
        for sequence in forks:
            self._run_chunk(plan, sequence)
        for sequence in stepwise:
            self._run_stepwise(plan, sequence)
        num_streams = len(plan.rows) + len(plan.started)
        budget = plan.budget = self.pace.limit(plan.budget, max(num_streams, len(stepwise)))
        self._run_prompts(plan, chunks)
        self._admit(plan, lambda request: request.priority < BACKGROUND)
        for sequence in background:
            self._run_chunk(plan, sequence)
        self._admit(plan, lambda _: True)
        self._copying = plan.copying
        if not plan.is_empty:
            self.pace.begin(step, budget - plan.budget, num_streams)
            if drafting is not None:
                drafting.planned(plan, has_prompts=len(plan.rows) + len(plan.started) > num_streams or bool(forks))
        return plan

    def _run_prompts(self, plan: StepPlan, chunks: list[Sequence]) -> None:
        """What is left of the step goes to the prompts in their order. Whoever waits and comes before all of those that have begun is seated first.

        The counters are brought up to date for the others who wait, too.
        """
        roster = self._roster
        num_waiting = len(roster.queue)
        if roster.tenants.num_live > 1 and (chunks or num_waiting > 1):
            roster.tenants.charge_outputs(roster.running)
        if len(chunks) > 1 or (chunks and num_waiting):
            first = roster.queue.first()
            requests = [sequence.request for sequence in chunks]
            order = Order(requests if first is None else [*requests, first.request], self._clock.monotonic(), self._config.ageing_s)
            chunks.sort(key=lambda sequence: order.key(sequence.request))
            before = order.key(chunks[0].request)
            self._admit(plan, lambda request: order.key(request) < before)
        for sequence in chunks:
            self._run_chunk(plan, sequence)

    def _run_decodes(self, plan: StepPlan) -> tuple[list[Sequence], list[Sequence], list[Sequence], list[Sequence]]:
        """Every row that only has its last token to compute; the others by what they are: choices to fork, stepwise rows, prompts, background prompts."""
        forks: list[Sequence] = []
        stepwise: list[Sequence] = []
        chunks: list[Sequence] = []
        background: list[Sequence] = []
        rows, num_tokens, offsets, new_blocks = plan.rows, plan.num_tokens, plan.block_offsets, plan.block_ids
        step, extend, num_before = plan.step, self._cache.extend, len(plan.rows)
        for sequence in list(self._roster.running):
            computed = sequence.num_computed
            request = sequence.request
            if sequence.row < 0 or computed < sequence.num_planned:
                (forks if computed >= sequence.num_planned else background if request.priority >= BACKGROUND else chunks).append(sequence)
                continue
            if sequence.leaving is not None or sequence.num_total >= request.limit_tokens:
                continue
            if sequence.is_stepwise:
                stepwise.append(sequence)
                continue
            if plan.budget <= 0:
                break
            if request.credit <= 0 and request.needs_credit:
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
            if sequence.constraint is not None:
                plan.mask(sequence)
            sequence.num_computed = computed + 1
            sequence.num_total += 1
            sequence.last_step = step
            request.credit -= 1
            plan.budget -= 1
        self._counters["decode_tokens"] += len(rows) - num_before
        return forks, stepwise, chunks, background

    def _run_stepwise(self, plan: StepPlan, sequence: Sequence) -> None:
        """The next position of a sequence that decodes, once the id of what it sampled last is known; and those of what it drafts."""
        if sequence.num_known == sequence.num_total and (self._drafting is None or not self._drafting.run(plan, sequence)):
            self._run_chunk(plan, sequence)

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
            plan.proceed(sequence, num_tokens, given=sequence.given)
            sequence.given = ()
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
            if sequence.is_stepwise:
                plan.awaits_ids = True
            if sequence.constraint is not None:
                plan.mask(sequence)
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

    def _admit(self, plan: StepPlan, comes_now: Callable[[Request], bool]) -> None:
        """Seat those who wait and may come now, in their order, while there are budget, places and blocks; nobody passes the first of them."""
        roster, cache = self._roster, self._cache
        while plan.budget > 0 and not self._has_preempted:
            sequence = roster.queue.first()
            if sequence is None or not comes_now(sequence.request):
                return
            request = sequence.request
            group = [sequence] if request.beams is None else waiting_beams(request)
            if not group:
                return
            if roster.num_slots + sum(each.num_slots for each in group) > roster.max_running:
                if self._preempt_stalled() or self._preempt_siblings(request):
                    continue
                return
            if self._shortage.lasts(sequence):
                return
            tables = self._allocate(group)
            if not tables:
                if self._preempt_stalled() or self._preempt_siblings(request):
                    continue
                if roster.num_seated == 0 and cache.num_transient == 0:
                    self._fail_for_lack_of_blocks(sequence, sequence.num_known)
                    continue
                self._shortage.note(sequence)
                return
            request.has_used_cache = True
            for each, table in zip(group, tables, strict=True):
                roster.seat(each, table)
            for each in group:
                self._run_chunk(plan, each)

    def _allocate(self, group: list[Sequence]) -> list[BlockTable]:
        """Tables for all of ``group``, sequences of one request, or for none."""
        roster, cache = self._roster, self._cache
        tables: list[BlockTable] = []
        for sequence in group:
            request = sequence.request
            match = cache.match(bytes(sequence.tokens), request.namespace)
            if request.wants_scores:
                match = match.cut(request.num_scored, cache.block_size_tokens)
            else:
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
                for other in reversed(tables):
                    cache.fail_fill(list(other.fills))
                    cache.release(other)
                return []
            tables.append(table)
        return tables

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
            victim = self._choose_victim()
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

    def _choose_victim(self, *, stalled_only: bool = False) -> Request | None:
        roster = self._roster
        roster.tenants.charge_outputs(roster.running)
        running = () if stalled_only else roster.running
        return choose_victim(roster.stalled, running, self._clock.monotonic(), self._config.ageing_s)

    def _preempt_stalled(self) -> bool:
        """Take the blocks and the place of a stalled request for one that can run; whether they are to be had at once."""
        victim = self._choose_victim(stalled_only=True)
        if victim is None or self._roster.num_leaving:
            return False
        self._roster.preempt(victim)
        return not self._roster.num_leaving

    def _preempt_siblings(self, request: Request) -> bool:
        """Beams step together: if one of them finds no seat, the others give up theirs, rather than wait for it on blocks that it may need."""
        if request.beams is None or all(each.table is None for each in request.sequences):
            return False
        self._roster.preempt(request)
        return not self._roster.num_leaving

    def _fail_for_lack_of_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        self._endings.fail(sequence.request, ErrorCode.KV_CAPACITY, lack_of_blocks(num_tokens, self._cache))

    def _stall(self, request: Request) -> None:
        if request.stalled_s is None:
            self._roster.stall(request, self._clock.monotonic())
