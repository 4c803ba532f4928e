"""What the scheduler needs of the world besides the cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kvd.cache.hashing import Namespace
from kvd.cache.manager import LoadTarget
from kvd.types import BlockHash, Constraint, ErrorCode, PackedTokens


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, never going back."""


class ColdTier(Protocol):
    """Blocks that are on disk and not in memory. Called on the engine thread; never waits."""

    def lookup(self, namespace: Namespace, parent_hash: BlockHash, blocks: Sequence[PackedTokens]) -> Sequence[int]:
        """How often each of those blocks was used that are on disk, from the first on, and quicker loaded than computed; nothing: compute.

        The blocks follow each other below ``parent_hash`` (the namespace's root for a prompt's first). Tokens are compared, not only hashes. O(blocks).
        """

    def start_load(self, load_id: int, namespace: Namespace, targets: Sequence[LoadTarget]) -> None:
        """Read these blocks, parents first, into the pool. Each load ends with one ``LoadDone`` through the inbox, in the order of the starts.

        A target that is no longer wanted is not written: its block may be another's by then.
        """


class ConstraintState(Protocol):
    """How far one sequence is in its constraint. Every call takes microseconds."""

    @property
    def problem(self) -> str:
        """Why it can't go on; empty while it can."""

    @property
    def has_strayed(self) -> bool:
        """Whether the problem is that a token was not allowed, not that the constraint became too complex."""

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end can follow."""

    @property
    def is_complete(self) -> bool:
        """Whether the end may follow."""

    def advance(self, token_id: int) -> None:
        """A token was sampled; one that is not allowed is a ``problem``."""

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow."""

    def forced(self, max_tokens: int) -> Sequence[int]:
        """Tokens that spell what must follow, as far as it is known; perhaps none."""


class CompiledConstraint(Protocol):
    """A constraint that something matches."""

    @property
    def problem(self) -> str:
        """Why nobody may go on with it; empty while they may."""

    def start(self) -> ConstraintState:
        """A sequence before its first token."""


class ConstraintCompiler(Protocol):
    """Compiles constraints elsewhere. Called on the engine thread; never waits."""

    @property
    def num_outgrown(self) -> int:
        """How many compiled ones got a ``problem`` so far."""

    def begin(self, constraint: Constraint) -> int | None:
        """A ticket for the compiled constraint, perhaps there already; None: too many wait."""

    def poll(self, ticket: int) -> CompiledConstraint | tuple[ErrorCode, str] | None:
        """The compiled constraint, or why there will be none: then the ticket is used up. None: not yet. A ``ConstraintCompiled`` comes through the inbox."""

    def cancel(self, ticket: int) -> None:
        """Nobody waits with this ticket any more."""

    def forget(self, constraint: Constraint, compiled: CompiledConstraint) -> None:
        """A sequence failed in ``compiled``: unless it has been replaced, compile the constraint afresh next time."""

    def stats(self) -> Mapping[str, int]:
        """Counters since the start, and how much waits."""

    def masks(self, states: Sequence[ConstraintState], drafts: Sequence[Collection[int]]) -> bytearray:
        """For each state the mask of its next token and one after each of its drafted tokens, which are valid, as in ``TokenMasks.words``."""
