"""All mutable request state: a request, and its sequences (choices), each of which is one row of the executor while it runs."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.cache.manager import BlockTable
from kvd.commands import Submit
from kvd.scheduler.account import Tenant
from kvd.scheduler.beams import BeamRule
from kvd.scheduler.drafter import Drafter
from kvd.scheduler.held import HeldChoices
from kvd.scheduler.ports import CompiledConstraint, ConstraintState
from kvd.types import TOKEN_BYTES, SamplingParams, Speculation


class Leaving(Enum):
    """Why a sequence gives up its row and blocks as soon as no step in flight touches them."""

    OVER = auto()
    """Its request or choice has ended."""
    PREEMPTED = auto()
    """Others need the blocks; it goes on later with every token that it has."""
    REPLANNED = auto()
    """Blocks that it matched were never filled; what it computed since is worth nothing."""


class Request:
    """One submitted request. Compared by identity."""

    __slots__ = (
        "accepted_tokens",
        "arrival",
        "asks_draft_model",
        "beams",
        "cached_tokens",
        "command",
        "constraint",
        "credit",
        "drafted_tokens",
        "ended_choices",
        "first_run_s",
        "has_been_seated",
        "has_failed_load",
        "has_used_cache",
        "held",
        "is_compiling",
        "is_internal",
        "is_over",
        "is_private",
        "is_stepwise",
        "limit_tokens",
        "namespace",
        "needs_credit",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sampled",
        "num_scored",
        "origin",
        "priority",
        "rank_s",
        "recomputed_tokens",
        "restored_tokens",
        "sampling",
        "sequences",
        "speculation",
        "stalled_s",
        "stop_token_ids",
        "submitted_s",
        "tenant",
    )

    def __init__(
        self,
        command: Submit,
        namespace: Namespace,
        *,
        arrival: int,
        max_tokens: int,
        submitted_s: float,
        tenant: Tenant,
        priority: int,
        rank_s: float,
        is_internal: bool,
        origin: BlockOrigin,
    ) -> None:
        self.command = command
        self.namespace = namespace
        self.arrival = arrival
        self.tenant = tenant
        self.priority = priority
        """Its class, or ``order.BACKGROUND``; that of whoever waits for it, if that is lower."""
        self.rank_s = rank_s
        """By when it is to be over, for the order within its tenant."""
        self.is_internal = is_internal
        """Nobody reads its tokens: no credit, no use of the cache is told."""
        self.origin = origin
        self.num_prompt_tokens = len(command.token_ids) // TOKEN_BYTES
        self.limit_tokens = self.num_prompt_tokens + max_tokens
        """Length at which a choice ends, prompt included."""
        self.stop_token_ids = frozenset(command.stop_token_ids)
        self.credit = command.credit_tokens
        """Tokens that may still be sampled; taken when a step is scheduled, what is drafted and not accepted given back, and overdrawn by at most one a choice."""
        self.stalled_s: float | None = None
        """Since when it has lacked credit."""
        self.submitted_s = submitted_s
        self.first_run_s: float | None = None
        self.has_been_seated = False
        self.has_failed_load = False
        """A load that it waited for failed: it does not ask the disk again."""
        self.has_used_cache = False
        self.cached_tokens = 0
        self.restored_tokens = 0
        self.recomputed_tokens = 0
        self.num_preemptions = 0
        self.num_scored = 0
        """Position of the last prompt token whose log-probability was told; position 0 has none."""
        self.speculation = Speculation("off")
        """How it drafts."""
        self.asks_draft_model = False
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.ended_choices: set[int] = set()
        self.is_over = False
        self.is_private = False
        """What it computes is not to be remembered: it was forgotten while the request lived."""
        self.sampling: SamplingParams = command.sampling
        """What its rows are sampled with."""
        self.num_sampled = 1 if command.beam is not None else max(command.num_choices, command.best_of)
        """Choices that are sampled; more than are told where ``held`` picks the best."""
        self.held: HeldChoices | None = None
        self.beams: Beams | None = None
        if command.beam is not None or self.num_sampled > command.num_choices:
            self.held = HeldChoices(tells_logprobs=command.sampling.num_logprobs is not None)
            if command.sampling.num_logprobs is None:
                self.sampling = msgspec.structs.replace(command.sampling, num_logprobs=0)
        self.needs_credit = not (is_internal or self.held is not None)
        """Whether it stops where its client takes no tokens; one that tells all at its end has nothing to be taken before."""
        self.constraint: CompiledConstraint | None = None
        self.is_stepwise = False
        """Its constraint must know every token before a further step is planned."""
        self.is_compiling = False
        """It waits for its constraint, and for nothing else yet."""
        self.sequences: list[Sequence] = [Sequence(self, 0, bytearray(command.token_ids), self.num_sampled)]

    @property
    def request_id(self) -> bytes:
        return self.command.request_id

    @property
    def has_credit(self) -> bool:
        return self.credit > 0 or not self.needs_credit

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told: positions behind the last that were are computed, whatever is cached."""
        return self.command.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens - 1

    def note_cached(self, table: BlockTable) -> None:
        """Take what ``table``, with which the request first runs or loses its first plan, was given by the cache.

        A request planned anew may have used blocks for the first time in its earlier plan, and match fewer now.
        """
        if self.first_run_s is None:
            cached = self.cached_tokens = table.num_cached_tokens
            self.restored_tokens = min(cached, max(self.restored_tokens, table.num_restored_tokens))
            self.recomputed_tokens = min(cached - self.restored_tokens, max(self.recomputed_tokens, table.num_recomputed_tokens))


class Sequence:
    """One choice. *Seated* while it has a block table. Compared by identity.

    ``num_total`` counts the tokens known and those that steps in flight sample; ``num_computed`` the positions that steps so far compute, those in
    flight included. So the next step computes ``num_total - num_computed`` positions at most, and nobody waits for a token's id.
    """

    __slots__ = (
        "choice",
        "constraint",
        "drafter",
        "given",
        "has_asked_disk",
        "is_over",
        "is_stepwise",
        "last_step",
        "leaving",
        "num_blocks_sent",
        "num_charged",
        "num_computed",
        "num_known",
        "num_lost",
        "num_planned",
        "num_samples",
        "num_slots",
        "num_total",
        "request",
        "row",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, choice: int, tokens: bytearray, num_samples: int) -> None:
        self.request = request
        self.choice = choice
        self.tokens = tokens
        """Known tokens, packed."""
        self.num_known = len(tokens) // TOKEN_BYTES
        self.num_charged = self.num_known
        """Tokens that its tenant's counter covers."""
        self.num_total = self.num_known
        self.num_computed = 0
        self.num_lost = 0
        """Positions that were computed when it was preempted last, until it has a seat again."""
        self.num_planned = 0
        """Tokens that were known when it was seated: they run in chunks, and fill blocks that others may wait for."""
        self.num_samples = num_samples
        """Choices sampled when the last known token is computed: all of the request's at the first time."""
        self.num_slots = num_samples
        """Running places that it takes: its own, and those of the choices to be forked from it."""
        self.table: BlockTable | None = None
        self.has_asked_disk = False
        """The cold tier was asked for this plan."""
        self.row = -1
        self.num_blocks_sent = 0
        self.last_step = 0
        self.leaving: Leaving | None = None
        self.is_over = False
        self.constraint: ConstraintState | None = request.constraint.start() if request.constraint is not None else None
        """How far it is in what its output must match."""
        self.is_stepwise = request.is_stepwise
        """What it computes next depends on the ids that it sampled: no further step of it is planned before these are known."""
        self.drafter: Drafter | None = None
        """None: nobody has asked yet whether it drafts."""
        self.given: tuple[int, ...] = ()
        """Known ids that its row does not know: its next step is given them in the place of what the row sampled."""

    def rewind(self) -> None:
        """Back to the known tokens, none computed; credit for samples that are thrown away is given back."""
        beams = self.request.beams
        if beams is not None:
            beams.answers.pop(self, None)
            self.given = ()
        elif self.num_slots > 1:
            self.num_samples = self.num_slots
        num_discarded = self.num_total - self.num_known
        if num_discarded:
            self.request.credit += num_discarded - 1 + self.num_samples
        self.num_total = self.num_known
        self.num_computed = 0
        self.num_blocks_sent = 0
        self.has_asked_disk = False


class Beams:
    """The search of one request.

    Attributes:
        rule: what is open and what has ended.
        sequences: by the rule's places: first the prompt's one, then one for each open hypothesis.
        answers: those that have computed their last token: their most likely next ones.
        num_begun: sequences so far, which numbers them.
    """

    __slots__ = ("answers", "num_begun", "rule", "sequences")

    def __init__(self, rule: BeamRule, prompt: Sequence) -> None:
        self.rule = rule
        self.sequences = [prompt]
        self.answers: dict[Sequence, tuple[tuple[int, float], ...]] = {}
        self.num_begun = 1
