"""Which sequences draft in a step, what and how much, and what of it stayed.

Whether drafting pays is asked at every step, of each sequence: the tokens that its drafts are expected to bring, against those that the whole step would bring in the time that
they add to it (``speculative.acceptance``, ``speculative.costs``). Where it doesn't, the sequence goes on as all do, a step ahead of its tokens' ids; prompt lookup
goes on looking, at no cost to the model, and comes back when it would have been right. A draft model that doesn't pay is asked again after a while. With many others
in the step further positions cost their share, so that drafting ends by itself; beyond ``_MOST_ROWS`` nobody looks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvd.cache.manager import CacheManager
from kvd.commands import Submit
from kvd.config import SpeculativeConfig
from kvd.scheduler.drafter import NOBODY, Drafter
from kvd.scheduler.ending import Endings
from kvd.scheduler.plan import StepPlan
from kvd.scheduler.ports import Clock
from kvd.scheduler.request import Leaving, Request, Sequence
from kvd.scheduler.roster import Roster
from kvd.speculative.acceptance import ModelAcceptance
from kvd.speculative.costs import Kind, StepCosts
from kvd.step import ExecutorOutput
from kvd.types import TOKEN_BYTES, Speculation

_MOST_ROWS = 32
_INDEX_TOKENS_PER_STEP = 1024
"""So many tokens of all prompts together enter the indices in a step: engine time that nobody should feel."""
_PRICE = 1.2
"""Drafts must bring so many times what the step brings in the time that they add: everybody beside them waits for it, and the estimates are rough."""
_LEAST_GAIN = 0.1
"""Tokens beyond that price, where the sequence has to leave its place a step ahead for its drafts."""
_LEAST_GAIN_GOING_ON = 0.03
"""The same where it waits for its tokens already."""
_LEAST_EXPECTED = 0.1
"""Tokens; of a draft that is thought to bring fewer nobody asks what it costs."""
_IDLE_STEPS_OF_MODEL = 4
"""After so many steps in which its draft model does not pay a sequence goes a step ahead again. By lookup alone it does after one: to come back costs no more than to wait for another."""
_MOST_BETWEEN = 3
"""Times what the executor takes: more than that between two steps is a wait for something else."""
_MOST_PAUSE_TOKENS = 512
"""Output after which a draft model that did not pay is asked again, at most: the pause doubles each time."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a sequence drafts in a step: these ids, or as many as ``num_tokens`` of the draft model's."""

    kind: Kind
    num_tokens: int
    expected: float
    """How many of them are thought to be accepted."""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step in which every row decodes, or one with drafts."""

    kind: Kind
    num_positions: int
    """0: there are prompts in it, so that its time says nothing."""
    drafts: tuple[tuple[Sequence, int, Draft], ...]
    """Sequence, its known tokens, and the draft."""


class Drafting:
    """The drafts of every step."""

    def __init__(
        self,
        config: SpeculativeConfig,
        cache: CacheManager,
        roster: Roster,
        clock: Clock,
        *,
        endings: Endings,
        counters: Counter[str],
        has_model: bool,
    ) -> None:
        self._config = config
        self._cache = cache
        self._roster = roster
        self._clock = clock
        self._endings = endings
        self._counters = counters
        self.has_model = has_model
        """Whether the executor has a draft model."""
        self.costs = StepCosts()
        self._noted_s = 0.0
        self._flights: dict[int, _Flight] = {}
        self._drafting: dict[Sequence, None] = {}
        """Those that wait for their tokens in order to draft."""
        self._planned: list[tuple[Sequence, int, Draft]] = []
        self._is_crowded = False
        self._num_positions = 0
        self._expected = 0.0
        self._kind = Kind.PLAIN
        """Positions of the step that is being planned, the tokens that it is thought to bring, and how they come."""

    def enrol(self, request: Request) -> None:
        """A request is accepted: settle how it drafts."""
        command = request.command
        wish = command.speculation or Speculation()
        if not wish.mode:
            wish = Speculation(self._config.speculation, wish.num_draft, wish.acceptance)
        if wish.mode == "off" or request.is_internal or command.beam is not None:
            wish = Speculation("off")
        request.speculation = wish
        request.asks_draft_model = self.has_model and wish.mode in ("auto", "draft") and command.constraint is None

    # ------------------------------------------------------------------------------------------ before a step

    def prepare(self) -> bool:
        """A step is about to be planned: see who is to wait for its tokens, so that it can draft; whether there is one more who does, and has some in flight."""
        running = self._roster.running
        self._planned = []
        if not self._endings.num_speculating and not self._drafting:
            return False
        self._is_crowded = len(running) > _MOST_ROWS
        in_flight = {sequence for flight in self._flights.values() for sequence, _, _ in flight.drafts}
        for sequence in [each for each in self._drafting if (self._is_crowded or each not in running) and each not in in_flight]:
            self._go_ahead(sequence)  # with drafts in flight it would run ahead of tokens that are perhaps not kept
        if self._is_crowded:
            return False
        self._num_positions = sum(1 for each in running if each.row >= 0 and each.num_computed >= each.num_planned)
        self._expected = float(self._num_positions)
        self._kind = Kind.PLAIN  # so that the first to draft has to pay for it that all wait for their tokens
        left = _INDEX_TOKENS_PER_STEP
        has_new = False
        for sequence in running:
            drafter = sequence.drafter
            if drafter is NOBODY or sequence.row < 0 or sequence.num_computed < sequence.num_planned:
                continue
            if drafter is None:
                drafter = self._take_on(sequence)
            left -= drafter.learn(sequence.tokens, sequence.request.num_prompt_tokens, left)
            if not sequence.is_stepwise and self._pays(sequence, drafter):
                sequence.is_stepwise = True
                self._drafting[sequence] = None
                drafter.num_idle = 0
                has_new = has_new or sequence.num_known < sequence.num_total
        return has_new

    def _pays(self, sequence: Sequence, drafter: Drafter) -> bool:
        """Whether the sequence, which goes a step ahead, is better off waiting for its tokens and drafting."""
        most = self._most(sequence)
        if sequence.constraint is not None and most:
            num_in_flight = sequence.num_total - sequence.num_known
            forced = len(sequence.constraint.forced(most + num_in_flight)) - num_in_flight
            if forced > 0 and self._most_gain(Kind.FORCED, drafter.forced.expected(min(forced, most)), _LEAST_GAIN):
                return True
        return self._best(sequence, drafter, most, least_gain=_LEAST_GAIN) is not None

    def _take_on(self, sequence: Sequence) -> Drafter:
        request = sequence.request
        looks_up = request.speculation.mode in ("auto", "ngram")
        has_model = request.asks_draft_model
        sequence.drafter = Drafter.make(self._config, looks_up=looks_up, has_model=has_model) if looks_up or has_model else NOBODY
        return sequence.drafter

    def _go_ahead(self, sequence: Sequence) -> None:
        """The sequence does not wait for its tokens any more, not for drafts at least."""
        del self._drafting[sequence]
        sequence.is_stepwise = sequence.request.is_stepwise

    # ------------------------------------------------------------------------------------------ the drafts of a step

    def run(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Plan a step with drafts of a sequence that decodes and whose tokens are all known; False: it has none, and runs as ever."""
        drafter, table, request = sequence.drafter, sequence.table, sequence.request
        if self._is_crowded or drafter is None or drafter is NOBODY or table is None or table.waits_for or sequence.row < 0:
            return False
        if sequence.leaving is not None or request.stalled_s is not None or sequence.num_computed != sequence.num_known - 1:
            return False
        best = self._choose(plan, sequence, drafter)
        # nobody's blocks are taken for drafts
        copies = self._cache.extend(table, sequence.num_known + best.num_tokens) if best is not None else None
        if best is None or copies is None:
            self._note_idle(sequence, drafter)
            return False
        drafter.num_idle = 0
        num_tokens = 1 + best.num_tokens
        last = int.from_bytes(sequence.tokens[-TOKEN_BYTES:], "little")
        plan.proceed(sequence, num_tokens, num_draft=best.num_tokens, given=(last, *best.ids) if best.ids else ())
        plan.copy(sequence, copies)
        if sequence.constraint is not None:
            plan.mask(sequence, best.ids)
        self._counters["decode_tokens"] += num_tokens
        self._planned.append((sequence, sequence.num_known, best))
        self._num_positions += best.num_tokens
        self._expected += best.expected
        self._kind = max(self._kind, best.kind)
        sequence.num_computed += num_tokens
        sequence.num_total += num_tokens
        sequence.last_step = plan.step
        request.credit -= num_tokens
        plan.budget -= num_tokens
        plan.awaits_ids = True
        return True

    def _choose(self, plan: StepPlan, sequence: Sequence, drafter: Drafter) -> Draft | None:
        most = min(self._most(sequence), max(0, plan.budget - 1))
        constraint = sequence.constraint
        forced = tuple(constraint.forced(most)[:most]) if constraint is not None and most else ()
        if forced:
            expected = drafter.forced.expected(len(forced))
            num_tokens = self._most_gain(Kind.FORCED, expected, _LEAST_GAIN_GOING_ON)
            return Draft(Kind.FORCED, num_tokens, expected[num_tokens], forced[:num_tokens]) if num_tokens else None
        best = self._best(sequence, drafter, most, least_gain=_LEAST_GAIN_GOING_ON)
        if best is None or constraint is None:
            return best
        num_valid = constraint.num_valid(best.ids)
        return Draft(best.kind, num_valid, min(best.expected, num_valid), best.ids[:num_valid]) if num_valid else None

    def _most_gain(self, kind: Kind, expected: list[float], least_gain: float) -> int:
        """How many of the proposals bring most beyond their price, by how many tokens 0, 1, … of them are expected to bring; 0 if that is not ``least_gain`` tokens."""
        seconds, positions = self.costs.seconds, self._num_positions
        without_s, with_kind = seconds(self._kind, positions), max(self._kind, kind)
        price = _PRICE * self._expected / without_s
        most, best = least_gain, 0
        for count in range(1, len(expected)):
            gain = expected[count] - price * max(0.0, seconds(with_kind, positions + count) - without_s)
            if gain > most:
                most, best = gain, count
        return best

    def _note_idle(self, sequence: Sequence, drafter: Drafter) -> None:
        drafter.num_idle += 1
        asks_model = drafter.model is not None and sequence.num_known >= drafter.pause_until
        if (asks_model and drafter.num_idle < _IDLE_STEPS_OF_MODEL) or sequence not in self._drafting:
            return
        self._go_ahead(sequence)
        if asks_model:
            drafter.model = ModelAcceptance()
            drafter.pause_until = sequence.num_known + drafter.pause_tokens
            drafter.pause_tokens = min(2 * drafter.pause_tokens, _MOST_PAUSE_TOKENS)

    def _most(self, sequence: Sequence) -> int:
        """How many tokens it may draft at most: by what it asked for, its own length, and its credit (each of its choices needs some)."""
        request = sequence.request
        most = min(request.speculation.num_draft or self._config.num_draft, request.limit_tokens - sequence.num_total - 1)
        if request.needs_credit:
            most = min(most, request.credit - (request.num_sampled - len(request.ended_choices)))
        return max(0, most)

    def _best(self, sequence: Sequence, drafter: Drafter, most: int, *, least_gain: float) -> Draft | None:
        """The draft that brings most beyond its price, if that is ``least_gain`` tokens."""
        best = None
        index = drafter.index
        if most and index is not None and index.length and len(index) == sequence.num_known:
            expected = drafter.lookup.expected(index.length, most)
            if expected[most] > _LEAST_EXPECTED and (num_tokens := self._most_gain(Kind.LOOKUP, expected, least_gain)):
                best = Draft(Kind.LOOKUP, num_tokens, expected[num_tokens], tuple(index.propose(num_tokens)))
        if best is None and most and drafter.model is not None and sequence.num_known >= drafter.pause_until:
            expected = drafter.model.expected(most)
            if num_tokens := self._most_gain(Kind.MODEL, expected, least_gain):
                best = Draft(Kind.MODEL, num_tokens, expected[num_tokens])
        return best

    def planned(self, plan: StepPlan, *, has_prompts: bool) -> None:
        """The step is planned."""
        num_positions = 0 if has_prompts else sum(plan.num_tokens)
        if not num_positions and not self._planned:
            return
        kind = max((draft.kind for _, _, draft in self._planned), default=Kind.LOOKUP if self._drafting else Kind.PLAIN)
        self._flights[plan.step] = _Flight(kind, num_positions, tuple(self._planned))

    # ------------------------------------------------------------------------------------------ after a step

    def note_time(self, step: int, seconds: float) -> None:
        """The executor took so long for the step; what counts is the time since the step before, for who waits for tokens has the engine's time between two steps to pay, too."""
        now_s = self._clock.monotonic()
        interval_s, self._noted_s = now_s - self._noted_s, now_s
        flight = self._flights.get(step)
        if flight is not None and flight.num_positions:
            self.costs.note(flight.kind, flight.num_positions, max(seconds, min(interval_s, _MOST_BETWEEN * seconds)))

    def forget(self, step: int) -> None:
        """The step failed."""
        self._flights.pop(step, None)

    def note_kept(self, step: int, out: ExecutorOutput) -> None:
        """Count and learn what of the step's drafts was kept, before anything of it is told."""
        flight = self._flights.get(step)
        if flight is None or not flight.drafts:
            return
        short = dict(out.short_drafts)
        num_kept = Counter(out.rows)
        for sequence, _, draft in flight.drafts:
            num_drafted = short.get(sequence.row, draft.num_tokens)
            self._note_accepted(sequence, draft.kind, num_drafted, min(max(0, num_kept[sequence.row] - 1), num_drafted))

    def settle(self, step: int) -> None:
        """The step's tokens are told: its drafting sequences go back to those that stayed."""
        flight = self._flights.pop(step, None)
        for sequence, num_known, _ in flight.drafts if flight is not None else ():
            if not sequence.request.is_over and sequence.leaving is not Leaving.REPLANNED:
                self._go_back(sequence, num_known)

    def _note_accepted(self, sequence: Sequence, kind: Kind, num_drafted: int, num_accepted: int) -> None:
        request, drafter = sequence.request, sequence.drafter
        request.drafted_tokens += num_drafted
        request.accepted_tokens += num_accepted
        self._counters["drafted_tokens"] += num_drafted
        self._counters["accepted_tokens"] += num_accepted
        assert drafter is not None, "it has drafted"
        if kind is Kind.MODEL and drafter.model is not None:
            drafter.model.learn(num_drafted, num_accepted)
        elif kind is Kind.FORCED:
            drafter.forced.learn(num_drafted, num_accepted)

    def _go_back(self, sequence: Sequence, num_known: int) -> None:
        """What was counted as computed and sampled is what stayed; the blocks stay the sequence's."""
        request, table = sequence.request, sequence.table
        assert table is not None, "it has run"
        request.credit += sequence.num_total - sequence.num_known
        sequence.num_total = sequence.num_known
        sequence.num_computed = sequence.num_known - 1
        self._cache.rewind(table, sequence.num_computed)
        if sequence.num_known == num_known and not sequence.is_over:  # not even the first was finite: without drafts it may be
            sequence.drafter = NOBODY
            if sequence in self._drafting:
                self._go_ahead(sequence)
        if request.stalled_s is not None and request.has_credit:
            self._roster.unstall(request)


def problem_of_drafting(command: Submit, drafting: Drafting | None) -> str:
    """Why a request can't draft as it wants to; empty: it can."""
    wish = command.speculation
    if wish is None or wish.mode == "off":
        return ""
    if wish.mode == "draft":
        if drafting is None or not drafting.has_model:
            return "speculation mode draft: this daemon has no draft model (speculative.draft_model); use ngram, or leave it out"
        if command.constraint is not None:
            return "speculation mode draft: what a draft model proposes can't be held to a constraint; use ngram, or leave it out"
    return ""
