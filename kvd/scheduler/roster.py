"""Who is where: waiting, seated (running or stalled), leaving; and the rows, running places and blocks that go with it.

A sequence is *seated* while it has a block table. It leaves its seat only when no step in flight touches it, so that a row number, and the
content of a block, mean the same thing from a step's scheduling to its update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvd.cache.manager import BlockTable, CacheManager, Node, Retention
from kvd.config import SchedulerConfig
from kvd.scheduler.account import Tenant
from kvd.scheduler.ports import Clock
from kvd.scheduler.queue import WaitingQueue
from kvd.scheduler.request import Leaving, Request, Sequence
from kvd.scheduler.shared_runs import RunTree
from kvd.scheduler.tenants import Tenants
from kvd.step import SharedRuns


class Roster:
    """The places and the transitions between them. Knows neither steps' contents nor events."""

    def __init__(self, cache: CacheManager, clock: Clock, config: SchedulerConfig, shared_tile_tokens: int) -> None:
        max_running = config.max_running
        self._cache = cache
        self._clock = clock
        self.max_running = max_running
        self.queue = WaitingQueue(clock, config.ageing_s)
        self.tenants = Tenants(config.output_token_weight)
        self.running: dict[Sequence, None] = {}
        """Seated, with credit, staying: in the order in which they were seated."""
        self.stalled: dict[Request, None] = {}
        """Requests without credit, the longest stalled first."""
        self.rows: list[Sequence | None] = [None] * max_running
        self.released_rows: list[int] = []
        """Rows whose end the executor has not been told of."""
        self.num_slots = 0
        """Running places taken."""
        self.computing: set[Node] = set()
        """Filling nodes that steps in flight, or the one being made, complete."""
        self.collected_step = 0
        self.num_preemptions = 0
        """Requests that lost their blocks to others."""
        self.num_resumed_tokens = 0
        """Positions that were computed when their sequences were preempted, of those that have seats again; of these ``num_recomputed_tokens`` were no longer in the cache."""
        self.num_recomputed_tokens = 0
        self.num_replanned = 0
        """Sequences that waited for blocks which were never filled."""
        self._seats: dict[BlockTable, Sequence] = {}
        self._leaving: dict[Sequence, None] = {}
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._runs = RunTree(max(1, shared_tile_tokens // cache.block_size_tokens))
        self._followers: dict[Sequence, None] = {}
        """Sequences with rows whose table waited for blocks when the row began: what they share ends before these, until they are computed."""

    @property
    def num_seated(self) -> int:
        return len(self._seats)

    def seated(self) -> Iterable[Sequence]:
        """Everyone who holds blocks."""
        return self._seats.values()

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    # --------------------------------------------------------------------------------------------- into a seat

    def seat(self, sequence: Sequence, table: BlockTable) -> None:
        """A waiting sequence gets its blocks. Whoever fills what it waits for is from now on as urgent as it is."""
        self.queue.remove(sequence)
        sequence.table = table
        sequence.num_computed = table.num_cached_tokens
        sequence.num_planned = sequence.num_known
        self._seats[table] = sequence
        self.num_slots += sequence.num_slots
        self.running[sequence] = None
        self._book(sequence, table.num_cached_tokens)
        for awaited in self._cache.awaited(table):
            owner = self._seats[awaited].request
            owner.priority = min(owner.priority, sequence.request.priority)

    def lift(self, tenant: Tenant) -> None:
        """The tenant has a new request."""
        if self.tenants.num_live > 1 and not tenant.num_waiting:
            self.tenants.charge_outputs(self.running)
        self.queue.lift(tenant)

    def _book(self, sequence: Sequence, num_cached: int) -> None:
        """What the sequence costs its tenant, and what its preemption has cost."""
        request = sequence.request
        if not request.has_been_seated:
            request.has_been_seated = True
            request.tenant.counter += request.num_prompt_tokens - num_cached
        if sequence.num_lost:
            self.num_resumed_tokens += sequence.num_lost
            self.num_recomputed_tokens += max(0, sequence.num_lost - num_cached)
            sequence.num_lost = 0

    def fork(self, parent: Sequence, choice: int, tokens: bytearray) -> Sequence:
        """A further choice takes one of the places that its parent kept; it shares the prompt's blocks, or waits if the parent is about to lose them."""
        request = parent.request
        sequence = Sequence(request, choice, tokens, 1)
        request.sequences.append(sequence)
        parent.num_slots -= 1
        if parent.leaving is Leaving.PREEMPTED:
            self.num_slots -= 1
            self._wait(sequence)
            return sequence
        assert parent.table is not None, "a parent leaves only after its update"
        table = self._cache.fork(parent.table)
        if table.num_tokens > request.num_prompt_tokens:
            self._cache.truncate(table, request.num_prompt_tokens)
        sequence.table = table
        sequence.num_computed = sequence.num_planned = request.num_prompt_tokens
        self._seats[table] = sequence
        if request.stalled_s is None:
            self.running[sequence] = None
        return sequence

    def branch(self, parent: Sequence, choice: int) -> Sequence:
        """A second sequence that has the parent's known tokens and shares all of its blocks, or waits if the parent has none or is about to lose them.

        It takes a running place that the parent keeps, or that of a sequence which leaves before the next step is planned.
        """
        request = parent.request
        sequence = Sequence(request, choice, parent.tokens[:], 1)
        sequence.is_stepwise = parent.is_stepwise
        request.sequences.append(sequence)
        is_kept = parent.num_slots > 1
        parent.num_slots -= is_kept
        if parent.table is None or parent.leaving is not None:
            self.num_slots -= is_kept and parent.table is not None
            self._wait(sequence)
            return sequence
        self.num_slots += not is_kept
        sequence.table = self._cache.fork(parent.table)
        sequence.num_computed = sequence.num_planned = parent.num_known
        self._seats[sequence.table] = sequence
        self.running[sequence] = None
        return sequence

    def take_row(self, sequence: Sequence) -> int:
        row = self._free_rows.pop()
        self.rows[row] = sequence
        sequence.row = row
        assert sequence.table is not None, "a row begins with blocks"
        num_tokens, awaited = sequence.num_computed, sequence.table.waits_for
        if awaited:  # another row computes these in the step that is being made, or in one in flight
            num_tokens = awaited[0].depth * self._cache.block_size_tokens
            self._followers[sequence] = None
        self._add_to_runs(sequence, num_tokens)
        return row

    def shared_runs(self) -> SharedRuns:
        """What the rows share in the step that is being made."""
        return self._runs.current()

    def update_shares(self) -> None:
        """A step begins to be made: rows whose awaited blocks are computed by now share these, too. Before any row is taken, for it would not find them."""
        ready = [each for each in self._followers if each.table is not None and not each.table.waits_for]
        for sequence in ready:  # all leave before the first comes back, in the order in which they began
            del self._followers[sequence]
            self._runs.remove(sequence.row)
        for sequence in ready:
            assert sequence.table is not None, "it was there a moment ago"
            self._add_to_runs(sequence, 0 if sequence.table.is_broken else sequence.table.num_cached_tokens)

    def _add_to_runs(self, sequence: Sequence, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens of the sequence that has a row were computed before the step that is being made."""
        assert sequence.table is not None, "a row has blocks"
        self._runs.add(sequence.row, sequence.table.block_ids, num_tokens // self._cache.block_size_tokens)

    # ------------------------------------------------------------------------------------------- out of a seat

    def retire(self, sequence: Sequence, why: Leaving) -> None:
        """The sequence is to leave; ``settle`` lets it go once it is idle. What it will not fill now is withdrawn, and the followers with it."""
        if why is Leaving.OVER:
            self.tenants.charge_outputs((sequence,))
            sequence.is_over = True
        if sequence.table is None:
            if why is Leaving.OVER:
                self.queue.remove(sequence)
                self._part(sequence)
            return
        if sequence.leaving is None:
            self.running.pop(sequence, None)
            self._leaving[sequence] = None
            sequence.leaving = why
        elif why is Leaving.OVER or (why is Leaving.REPLANNED and sequence.leaving is Leaving.PREEMPTED):
            sequence.leaving = why
        self.withdraw([node for node in sequence.table.fills if node not in self.computing])

    def withdraw(self, nodes: list[Node]) -> list[Sequence]:
        """These nodes will not be filled; those who waited for them are planned anew, and are returned."""
        return self.replan(self._cache.fail_fill(nodes))

    def replan(self, tables: Iterable[BlockTable]) -> list[Sequence]:
        """What these tables waited for will not come: their sequences are planned anew, and are returned."""
        followers = [self._seats[table] for table in tables]
        for sequence in followers:
            self.num_replanned += 1
            self.retire(sequence, Leaving.REPLANNED)
        return followers

    def preempt(self, request: Request) -> None:
        """All of a request's sequences give up their blocks."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        for sequence in request.sequences:
            if not sequence.is_over:
                self.retire(sequence, Leaving.PREEMPTED)
        self.settle()

    def settle(self) -> None:
        """Those who are leaving and idle leave."""
        for sequence in [each for each in self._leaving if each.last_step <= self.collected_step]:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        table, why = sequence.table, sequence.leaving
        assert table is not None, "only a seated sequence leaves"
        del self._leaving[sequence]
        del self._seats[table]
        sequence.request.note_cached(table)
        if sequence.row >= 0:
            self._runs.remove(sequence.row)
            self._followers.pop(sequence, None)
        self._cache.release(table, self.retention(sequence.request))
        sequence.table = None
        sequence.leaving = None
        self.num_slots -= sequence.num_slots
        if sequence.row >= 0:
            self.rows[sequence.row] = None
            self._free_rows.append(sequence.row)
            self.released_rows.append(sequence.row)
            sequence.row = -1
        if why is Leaving.OVER:
            self._part(sequence)
        else:
            if why is Leaving.PREEMPTED:
                sequence.num_lost = min(sequence.num_computed, sequence.num_known)
            sequence.rewind()
            self._wait(sequence)

    def _part(self, sequence: Sequence) -> None:
        """It is over and nobody asks it any more. It and its request refer to each other until the collector comes: what is large goes at once."""
        sequence.request.sequences.remove(sequence)
        sequence.constraint = None

    def retention(self, request: Request) -> Retention:
        """How the request wants its blocks kept from now on; ends fall on whole seconds, so that there are few of them."""
        command = request.command
        expires_s = math.ceil(self._clock.monotonic() + command.cache_ttl_s) if command.cache_ttl_s else math.inf
        return Retention(command.cache_priority, expires_s)

    def _wait(self, sequence: Sequence) -> None:
        if sequence.request.stalled_s is None:
            self.queue.push(sequence)

    # --------------------------------------------------------------------------------------------------- stalls

    def stall(self, request: Request, now_s: float) -> None:
        """The request lacks credit: it keeps its blocks until others need them, but nobody waits for it to fill any."""
        request.stalled_s = now_s
        self.stalled[request] = None
        for sequence in request.sequences:
            self.running.pop(sequence, None)
            self.queue.remove(sequence)
            if sequence.table is not None and any(node not in self.computing for node in sequence.table.fills):
                self.retire(sequence, Leaving.PREEMPTED)
        self.settle()

    def unstall(self, request: Request) -> None:
        request.stalled_s = None
        del self.stalled[request]
        for sequence in request.sequences:
            if sequence.is_over or sequence.leaving is not None:
                continue
            if sequence.table is not None:
                self.running[sequence] = None
            else:
                self.queue.push(sequence)

    def forget(self, request: Request) -> None:
        """The request is over."""
        if request.stalled_s is not None:
            request.stalled_s = None
            del self.stalled[request]
        for sequence in list(request.sequences):
            self.retire(sequence, Leaving.OVER)
        self.tenants.close(request.tenant)

    # --------------------------------------------------------------------------------------------------- audits

    def check_invariants(self, requests: list[Request]) -> None:
        """Everybody is in exactly one place, and every place is counted."""
        seated = set(self._seats.values())
        waiting = set(self.queue.sequences())
        self.queue.check_invariants()
        self.tenants.check_invariants()
        assert len(seated) == len(self._seats), "a sequence sits twice"
        assert set(self.running) <= seated, "a running sequence has no blocks"
        assert set(self._leaving) <= seated, "a leaving sequence has no blocks"
        assert not set(self.running) & set(self._leaving), "a sequence runs and leaves"
        assert not seated & waiting, "a sequence waits with blocks"
        assert self.num_slots == sum(sequence.num_slots for sequence in seated) <= self.max_running, "running places are miscounted"
        for sequence in seated:
            assert sequence.table is not None, "a seat without blocks"
            assert self._seats[sequence.table] is sequence, "a seat is another's"
            assert (sequence in self._leaving) == (sequence.leaving is not None), "a sequence leaves without being told, or the reverse"
        taken = {sequence.row for sequence in seated if sequence.row >= 0}
        for row, holder in enumerate(self.rows):
            assert (holder is not None) == (row in taken), f"row {row} is lost or taken twice"
            assert holder is None or holder.row == row, f"row {row} is another's"
        assert sorted(self._free_rows) == [row for row, holder in enumerate(self.rows) if holder is None], "free rows are miscounted"
        for request in requests:
            is_stalled = request.stalled_s is not None
            assert is_stalled == (request in self.stalled), "a stall is not on the list, or the reverse"
            for sequence in request.sequences:
                if sequence.leaving is None and not sequence.is_over:
                    places = (sequence in self.running, sequence in waiting, is_stalled, request.is_compiling)
                    assert sum(places) == 1, f"a sequence is in {sum(places)} places"
                assert sequence.num_known <= sequence.num_total, "a sampled token is lost"
                assert sequence.num_computed <= sequence.num_total, "more is computed than there is"
                assert sequence.table is not None or sequence.num_computed == 0, "computed without blocks"
        rows = {row: holder for row, holder in enumerate(self.rows) if holder is not None}
        self._runs.check_invariants(
            {
                row: (holder.table.block_ids, holder.num_computed // self._cache.block_size_tokens)
                for row, holder in rows.items()
                if holder.table is not None
            },
            followers={row for row, each in rows.items() if each in self._followers or (each.table is not None and each.table.is_broken)},
        )
        live = {sequence for request in requests for sequence in request.sequences}
        assert waiting <= live, "somebody waits whose request is over"
        assert {sequence for sequence in seated if not sequence.is_over} <= live, "somebody sits whose request is over"
