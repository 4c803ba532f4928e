"""The engine thread's part of a checkpoint: lease what the planner wants, copy it to staging between two steps, end the leases when the copy is done.

Nothing here waits: without a free buffer, with too many requests waiting, or above the governor's rate, the step is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.storage.governor import Governor, HeldBy
from kvd.storage.ports import BlockIO, Leases, Ticket
from kvd.storage.staging import StagingBuffer, StagingPool
from kvd.storage.store_thread import StagedBatch
from kvd.types import BlockHash, BlockId, KvGroup

POLL_S = 0.002
IDLE_S = 1.0
_MAX_COPIES_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block whose bytes the planner wants on disk."""

    block_hash: BlockHash
    block_id: BlockId
    root: BlockHash


class CopyRequests:
    """What the planner asks of the engine thread. A deque's append and popleft are atomic."""

    def __init__(self) -> None:
        self.wanted: deque[Wanted] = deque()
        self.ungoverned = False
        """Somebody waits for durability: neither rate nor pause apply."""


@dataclass(frozen=True, slots=True)
class _Copy:
    wanted: list[Wanted]
    buffer: StagingBuffer
    tickets: list[Ticket]


class CopyOut:
    """Engine thread only.

    ``on_staged`` gets each copied batch, ``on_returned`` the blocks that were not copied (``failed``: by an error, not because they left memory).
    """

    def __init__(
        self,
        requests: CopyRequests,
        *,
        leases: Leases,
        block_io: BlockIO,
        groups: Sequence[KvGroup],
        staging: StagingPool,
        governor: Governor,
        on_staged: Callable[[StagedBatch], None],
        on_returned: Callable[[list[BlockHash], bool], None],
    ) -> None:
        self._requests = requests
        self._leases = leases
        self._block_io = block_io
        self._groups = tuple(groups)
        self._staging = staging
        self._governor = governor
        self._on_staged = on_staged
        self._on_returned = on_returned
        self._block_bytes = sum(group.row_bytes for group in groups)
        self._copies: deque[_Copy] = deque()
        self._is_dead = False
        self.num_copied_bytes = 0

    def idle_delay_s(self) -> float:
        """Seconds after which ``poll`` has something to do."""
        if self._copies:
            return POLL_S
        if not self._requests.wanted:
            return IDLE_S
        if self._requests.ungoverned:
            return POLL_S
        if self._governor.is_paused:
            return IDLE_S
        count = min(len(self._requests.wanted), self._staging.max_blocks)
        return max(POLL_S, min(IDLE_S, self._governor.delay_s(count * self._block_bytes)))

    def poll(self) -> None:
        """Take up finished copies and start at most one new one."""
        while self._copies and all(ticket.done() for ticket in self._copies[0].tickets):
            self._finish(self._copies.popleft())
        if not self._requests.wanted:
            self._governor.let_go()
        elif len(self._copies) < _MAX_COPIES_IN_FLIGHT:
            self._begin()
        else:
            self._governor.hold(HeldBy.IN_FLIGHT)

    def _begin(self) -> None:
        if self._is_dead:
            self._return_all()
            return
        count = min(len(self._requests.wanted), self._staging.max_blocks)
        if not self._requests.ungoverned and not self._governor.take(count * self._block_bytes):
            return
        buffer = self._staging.take()
        if buffer is None:
            self._governor.hold(HeldBy.STAGING)
            return
        leased: list[Wanted] = []
        gone: list[BlockHash] = []
        while self._requests.wanted and len(leased) < count:
            each = self._next()
            if each is None:
                break
            if self._leases.lease(each.block_id, each.block_hash):
                leased.append(each)
            else:
                gone.append(each.block_hash)
        if self._requests.wanted:
            self._governor.hold(HeldBy.IN_FLIGHT)  # a step's share
        else:
            self._governor.let_go()
        if gone:
            self._on_returned(gone, False)
        if not leased:
            self._staging.give_back(buffer)
            return
        tickets: list[Ticket] = []
        ids = [each.block_id for each in leased]
        try:
            for group in self._groups:
                tickets.append(self._block_io.copy_out(group.name, ids, buffer.rows(group.name, len(ids))))  # noqa: PERF401 (those begun must be known)
        except Exception:
            # The executor has failed or is closed; the loop learns so by itself. A copy that is under way still writes to the buffer: it is not used again.
            self._is_dead = True
            self._end_leases(leased)
            self._on_returned([each.block_hash for each in leased], True)
            return
        self._copies.append(_Copy(leased, buffer, tickets))

    def _finish(self, copy: _Copy) -> None:
        self._end_leases(copy.wanted)
        hashes = tuple(each.block_hash for each in copy.wanted)
        if any(ticket.error is not None for ticket in copy.tickets):
            self._is_dead = True
            self._staging.give_back(copy.buffer)
            self._on_returned(list(hashes), True)
            return
        self.num_copied_bytes += len(hashes) * self._block_bytes
        self._on_staged(StagedBatch(hashes, tuple(each.root for each in copy.wanted), copy.buffer))

    def _end_leases(self, wanted: list[Wanted]) -> None:
        for each in wanted:
            self._leases.end_lease(each.block_id)

    def _next(self) -> Wanted | None:
        try:
            return self._requests.wanted.popleft()
        except IndexError:  # the planner took everything back
            return None

    def _return_all(self) -> None:
        hashes = []
        while (each := self._next()) is not None:
            hashes.append(each.block_hash)
        self._on_returned(hashes, True)
