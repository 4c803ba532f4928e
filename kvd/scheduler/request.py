"""All mutable request state: a request, and its sequences (choices), each of which is one row of the executor while it runs."""

from __future__ import annotations

from enum import Enum, auto

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.cache.manager import BlockTable
from kvd.commands import Submit
from kvd.types import TOKEN_BYTES


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
        "arrival",
        "cached_tokens",
        "command",
        "credit",
        "ended_choices",
        "first_run_s",
        "has_failed_load",
        "has_used_cache",
        "is_internal",
        "is_over",
        "is_private",
        "limit_tokens",
        "namespace",
        "num_preemptions",
        "num_prompt_tokens",
        "origin",
        "priority",
        "recomputed_tokens",
        "restored_tokens",
        "sequences",
        "stalled_s",
        "stop_token_ids",
        "submitted_s",
    )

    def __init__(
        self,
        command: Submit,
        namespace: Namespace,
        *,
        arrival: int,
        max_tokens: int,
        submitted_s: float,
        is_internal: bool,
        is_background: bool,
        origin: BlockOrigin,
    ) -> None:
        self.command = command
        self.namespace = namespace
        self.arrival = arrival
        self.priority = int(is_background)
        """0 for users and whatever a user waits for, 1 for work that runs behind them."""
        self.is_internal = is_internal
        """Nobody reads its tokens: no credit, no use of the cache is told."""
        self.origin = origin
        self.num_prompt_tokens = len(command.token_ids) // TOKEN_BYTES
        self.limit_tokens = self.num_prompt_tokens + max_tokens
        """Length at which a choice ends, prompt included."""
        self.stop_token_ids = frozenset(command.stop_token_ids)
        self.credit = command.credit_tokens
        """Tokens that may still be sampled; taken when a step is scheduled, and overdrawn by at most one a choice."""
        self.stalled_s: float | None = None
        """Since when it has lacked credit."""
        self.submitted_s = submitted_s
        self.first_run_s: float | None = None
        self.has_failed_load = False
        """A load that it waited for failed: it does not ask the disk again."""
        self.has_used_cache = False
        self.cached_tokens = 0
        self.restored_tokens = 0
        self.recomputed_tokens = 0
        self.num_preemptions = 0
        self.ended_choices: set[int] = set()
        self.is_over = False
        self.is_private = False
        """What it computes is not to be remembered: it was forgotten while the request lived."""
        self.sequences: list[Sequence] = [Sequence(self, 0, bytearray(command.token_ids), command.num_choices)]

    @property
    def request_id(self) -> bytes:
        return self.command.request_id

    @property
    def has_credit(self) -> bool:
        return self.credit > 0 or self.is_internal

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
        "has_asked_disk",
        "is_over",
        "is_stepwise",
        "last_step",
        "leaving",
        "num_blocks_sent",
        "num_computed",
        "num_known",
        "num_planned",
        "num_samples",
        "num_slots",
        "num_total",
        "queue_ticket",
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
        self.num_total = self.num_known
        self.num_computed = 0
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
        self.is_stepwise = False
        """What it computes next depends on the ids that it sampled: no further step of it is planned before these are known."""
        self.queue_ticket = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Who comes first: users before background work, then by arrival."""
        return (self.request.priority, self.request.arrival, self.choice)

    def rewind(self) -> None:
        """Back to the known tokens, none computed; credit for samples that are thrown away is given back."""
        if self.num_slots > 1:
            self.num_samples = self.num_slots
        num_discarded = self.num_total - self.num_known
        if num_discarded:
            self.request.credit += num_discarded - 1 + self.num_samples
        self.num_total = self.num_known
        self.num_computed = 0
        self.num_blocks_sent = 0
        self.has_asked_disk = False
