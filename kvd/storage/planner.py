"""The planner: one thread that knows what storage knows, and decides what is logged, copied, committed and expired.

It takes the engine's events in order, keeps the node index, appends inserts to the log, asks the engine thread for the bytes of hot blocks (pinned, or
used twice or more) and the storage thread for commits. It never touches the disk and never makes the engine thread wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.cache.events import BlockOrigin, BlockRemoved, BlocksPinned, BlockStored, BlocksUnpinned, BlocksUsed, CacheEvent
from kvd.commands import CheckpointDone
from kvd.storage.budget import PlannerLimits
from kvd.storage.codec import Codec
from kvd.storage.copy_out import CopyRequests, Wanted
from kvd.storage.counters import Counters
from kvd.storage.disk_bounds import DiskBounds
from kvd.storage.fault_episode import FaultEpisode
from kvd.storage.governor import Governor, HeldBy
from kvd.storage.handover import Handover
from kvd.storage.hot_blocks import HotBlocks
from kvd.storage.node_forgetting import ForgetNodes, NodeForgetting
from kvd.storage.node_index import IndexNode, NodeIndex
from kvd.storage.operations import OnDone, Operations
from kvd.storage.ports import Clock, Log, StorageInbox
from kvd.storage.recovery import absorb
from kvd.storage.store_thread import Committed, Degraded, Discarded, Result, Resumed, StoreThread
from kvd.types import BlockHash, BlockId
from kvd.wal.record import Insert, Pin, Unpin
from kvd.wal.writer import WalWriter

MAX_WAITING_EVENTS = 65536
"""Events that the planner has not taken yet; those of blocks are dropped and counted beyond."""

_WAKE_S = 0.25
_GATHER_S = 0.02


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    op_id: bytes


@dataclass(frozen=True, slots=True)
class _Returned:
    block_hashes: list[BlockHash]
    failed: bool


@dataclass(frozen=True, slots=True)
class _Final:
    """The last checkpoint: everything ready in memory, and then the clean mark."""


class Planner:
    """``observe``, ``request_*`` and ``returned`` may be called from the engine thread, ``on_result`` from the storage thread; all return at once."""

    def __init__(
        self,
        *,
        index: NodeIndex,
        wal: WalWriter,
        requests: CopyRequests,
        governor: Governor,
        codec: Codec,
        inbox: StorageInbox,
        limits: PlannerLimits,
        clock: Clock,
        log: Log,
    ) -> None:
        self._index = index
        self._wal = wal
        self._requests = requests
        self._governor = governor
        self._codec = codec
        self._inbox = inbox
        self._limits = limits
        self._clock = clock
        self._log = log
        self._store: StoreThread | None = None
        self._mail: deque[Any] = deque()
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._refusals: dict[type, Callable[[Any], None]] = {}
        self._wake = threading.Event()
        self._hurry = threading.Event()
        """Something waits that is not just a block's event."""
        self._stopping = False
        self.is_broken = False
        """Nothing is handled any more: what the index says may be wrong, and stays as it is."""
        self._logged_roots: set[BlockHash] = set()
        self._trimmed_lsn: int | None = None
        """The newest record when the index was last trimmed, until nobody can learn any more of the namespaces that went."""
        self._hot = HotBlocks(limits.write_policy, limits.max_wanted, dwell_s=limits.write_dwell_s)
        self._unknown_pin = ""
        self._fault = FaultEpisode(log)
        self._wants_room = False
        self._operations = Operations()
        self._handover = Handover(index, wal)
        self._now_s, self._now_unix_s = clock.monotonic(), int(clock.unix())
        self._next_checkpoint_s = self._now_s + limits.checkpoint_interval_s
        self.final_done = threading.Event()
        self.degraded_reason = ""
        self.last_checkpoint_s: float | None = None
        self.counters = Counters()
        self._bounds = DiskBounds(index, self._hot, limits, self.counters)
        self._forgetting = NodeForgetting(
            index, self._hot, self._operations, self._handover, wal, clock=clock, fault=lambda: self.degraded_reason, begun=self._set_eager
        )
        self._handle_own()
        self._thread = threading.Thread(target=self._run, name="kvd-planner", daemon=True)

    def start(self, store: StoreThread, *, degraded_reason: str, generation_lost: bool) -> None:
        """``degraded_reason``: why the store can't be written; ``generation_lost``: nothing of it could be read either."""
        self._store = store
        self._handover.store = store
        self.degraded_reason = degraded_reason
        if degraded_reason:
            self._fault.refused(degraded_reason, generation_lost=generation_lost)
        if generation_lost:
            self._index.forget_stored()
        self._thread.start()

    @property
    def fault(self) -> str:
        """Why blocks do not reach the disk; empty when they do. It outlasts ``degraded_reason``: a disk that takes a row may not take a block."""
        return self.degraded_reason or self._fault.reason

    def stop(self, timeout_s: float) -> bool:
        self._stopping = True
        self._hurry.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        """Counters since the start; readable from any thread."""
        return {
            **self.counters.as_dict(),
            "hot_blocks_waiting": self.num_waiting,
            "blocks_under_way": self._hot.num_under_way,
            "dwelling_blocks": self._hot.num_dwelling,
        }

    @property
    def num_waiting(self) -> int:
        """Blocks that are to be written and that no copy has been begun of."""
        return self._hot.num_waiting + len(self._requests.wanted)

    @property
    def num_refused(self) -> int:
        """Hot blocks in memory that found no room on disk."""
        return self._hot.num_refused

    # -------------------------------------------------------------------------------- engine thread

    def observe(self, events: Sequence[CacheEvent]) -> None:
        if len(self._mail) > MAX_WAITING_EVENTS:
            kept = [event for event in events if isinstance(event, BlocksPinned | BlocksUnpinned)]
            self.counters.num_lost_events += len(events) - len(kept)
            events = kept
        self._mail.extend(events)
        self._wake.set()

    def request_checkpoint(self, op_id: bytes) -> None:
        self.post(_Checkpoint(op_id))

    def request_final(self) -> None:
        self.post(_Final())

    def returned(self, block_hashes: list[BlockHash], failed: bool) -> None:
        self.post(_Returned(block_hashes, failed))

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for a checkpoint, or may be about to."""
        return bool(self._operations) or bool(self._mail)

    @property
    def is_alive(self) -> bool:
        """Whether it will answer."""
        return self._thread.is_alive()

    # -------------------------------------------------------------------------------- storage thread

    def on_result(self, result: Result) -> None:
        self.post(result)

    def post(self, message: Any) -> None:
        """From any thread; a message of a kind that somebody handles."""
        self._mail.append(message)
        self._hurry.set()
        self._wake.set()

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._stopping:
            if self._wake.wait(_WAKE_S):
                self._hurry.wait(_GATHER_S)  # a round for the events of several steps: each one interrupts the engine's Python
            self._wake.clear()
            self._hurry.clear()
            self._now_s, self._now_unix_s = self._clock.monotonic(), int(self._clock.unix())
            try:
                while self._mail:
                    message = self._mail[0]
                    self._handlers[type(message)](message)
                    self._mail.popleft()  # only now: who sent one that can't be taken is still to be answered
                self._advance()
            except Exception as error:
                # A fault of ours must not end the daemon nor go on writing from a wrong picture: persistence stays off from here.
                self._log.error("storage.planner_failed", error=repr(error))
                self.counters.num_degradations += 1
                self.degraded_reason = f"the planner failed: {error!r}"
                self._refuse_from_now_on()

    def _refuse_from_now_on(self) -> None:
        """Answer whoever waits, and comes to wait, with the reason; until the end."""
        self.is_broken = True
        self._requests.wanted.clear()
        self._operations.fail(self.degraded_reason)
        self._requests.ungoverned = False
        while not self._stopping:
            while self._mail:
                message = self._mail.popleft()
                if refuse := self._refusals.get(type(message)):
                    refuse(message)
            self._wake.wait(_WAKE_S)
            self._wake.clear()

    def handle(self, kind: type, take: Callable[[Any], None], refuse: Callable[[Any], None] | None = None) -> None:
        """Have each ``post`` of ``kind`` given to ``take``, on the planner's thread and in the order in which they came; once, before ``start``.

        ``refuse`` answers those that come after persistence has stopped, for a reason that ``degraded_reason`` gives by then.
        """
        self._handlers[kind] = take
        if refuse is not None:
            self._refusals[kind] = refuse

    def _handle_own(self) -> None:
        self.handle(BlockStored, self._stored)
        self.handle(BlocksUsed, self._used)
        self.handle(BlockRemoved, self._removed)
        self.handle(BlocksPinned, self._pinned)
        self.handle(BlocksUnpinned, self._unpinned)
        self.handle(Committed, self._committed)
        self.handle(Discarded, self._discarded)
        self.handle(Degraded, self._degraded)
        self.handle(Resumed, self._resumed)
        self.handle(ForgetNodes, self._forgetting.take, self._forgetting.refuse)
        self.handle(_Returned, self._returned)
        self.handle(_Checkpoint, self._begin_operation, self._refuse_operation)
        self.handle(_Final, self._begin_final, lambda _: self.final_done.set())

    # -------------------------------------------------------------------------------- events of the cache

    def _stored(self, event: BlockStored) -> None:
        index = self._index
        self.counters.num_computed_blocks += event.origin is not BlockOrigin.RESTORED
        is_new_namespace = index.add_namespace(event.namespace)
        is_new = event.block_hash not in index.nodes
        node = index.insert(event.namespace.root, event.parent_hash, event.token_ids)
        if node is None:
            self.counters.num_lost_events += 1
            return
        if is_new:
            root = event.namespace.root
            namespace = event.namespace
            parts = None
            if is_new_namespace or root not in self._logged_roots:
                parts = (namespace.fingerprint, namespace.tenant_salt, namespace.adapter_digest)
            if self._wal.append(Insert(root, event.parent_hash, event.token_ids, parts)) and parts:
                self._logged_roots.add(root)
        elif event.origin is BlockOrigin.COMPUTED:
            node.uses += 1
        if node.is_suspect and event.origin is not BlockOrigin.RESTORED:
            node.is_suspect = False
            index.drop_bytes(node)
        index.set_block(node, event.block_id)
        node.origin = event.origin.value
        self._touch(node)

    def _used(self, event: BlocksUsed) -> None:
        for block_hash in event.block_hashes:
            node = self._index.nodes.get(block_hash)
            if node is not None:
                node.uses += 1
                self._touch(node)

    def _touch(self, node: IndexNode) -> None:
        node.last_use_unix_s = self._now_unix_s
        self._index.dirty[node.block_hash] = node
        self._hot.consider(node, self._now_s)

    def _removed(self, event: BlockRemoved) -> None:
        node = self._index.nodes.get(event.block_hash)
        if node is not None and node.block_id == event.block_id:
            self._index.set_block(node, BlockId(-1))
            if self._hot.discard(node):
                self._operations.settle(node.block_hash)
                self.counters.num_evicted_unwritten += 1

    def _pinned(self, event: BlocksPinned) -> None:
        if not event.block_hashes or not self._index.pin(event.name, event.block_hashes[-1]):
            self.counters.num_lost_events += 1
            self._unknown_pin = event.name
            return
        self._wal.append(Pin(event.name, event.block_hashes[-1]))
        for node in self._index.nodes[event.block_hashes[-1]].chain():
            self._hot.consider(node, self._now_s)

    def _unpinned(self, event: BlocksUnpinned) -> None:
        self._index.unpin(event.name)
        self._wal.append(Unpin(event.name))

    # -------------------------------------------------------------------------------- results of the store

    def _release(self, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            self._hot.release(block_hash, self._index.nodes.get(block_hash))
            self._operations.settle(block_hash)

    def _discarded(self, result: Discarded) -> None:
        self._release(result.block_hashes)

    def _returned(self, message: _Returned) -> None:
        self._release(message.block_hashes)
        if message.failed:
            self._operations.fail("the executor could not copy the blocks")
            self._set_eager()

    def _committed(self, result: Committed) -> None:
        self._release(result.block_hashes)
        for block_hash in result.block_hashes:
            node = self._index.nodes.get(block_hash)
            if node is not None:
                self._index.set_stored(node, self._limits.block_bytes)
            else:
                self._index.dropped_bytes.add(block_hash)
        self._handover.committed(result.number)
        self._wal.retire(result.applied_lsn)
        if result.block_hashes:
            self._fault.stored()
        if result.has_room and (result.block_hashes or not self._hot.pending()):
            self._fault.over()
        self.last_checkpoint_s = self._clock.monotonic()
        self.counters.add_commit(len(result.block_hashes), result.num_bytes, result.seconds)
        self._operations.committed(len(result.block_hashes), result.num_bytes, result.number)

    def _degraded(self, result: Degraded) -> None:
        if self.degraded_reason and not result.generation_lost:  # a try that failed
            self.degraded_reason = self._fault.reason = result.reason
            self._handover.redo(result.epoch)
            return
        self.counters.num_degradations += self._fault.refused(result.reason, generation_lost=result.generation_lost)
        self._wants_room = self._fault.is_second_refusal and not result.generation_lost
        self._become_degraded(result.reason, result.epoch)
        self._release(result.block_hashes)
        if result.generation_lost:
            self._index.forget_stored()
            self._logged_roots.clear()

    def _become_degraded(self, reason: str, epoch: int) -> None:
        self.degraded_reason = reason
        while self._requests.wanted:
            try:
                self._release([self._requests.wanted.popleft().block_hash])
            except IndexError:
                break
        self._hot.clear_waiting()
        self._handover.redo(epoch)
        self._operations.fail(f"the store is degraded: {reason}")
        self._set_eager()

    def _resumed(self, result: Resumed) -> None:
        self.degraded_reason = ""
        if result.late is not None:
            absorb(self._index, result.late)
        self._next_checkpoint_s = self._clock.monotonic()
        if self._wants_room:  # free pages let the file go on without growing
            self._wants_room = False
            self._bounds.free_pages()
        for node in self._index.nodes.values():
            self._hot.consider(node, self._now_s)

    # -------------------------------------------------------------------------------- operations

    def _begin_operation(self, message: _Checkpoint) -> None:
        def done(num_blocks: int, num_bytes: int, error: str) -> None:
            self._inbox.put_internal(CheckpointDone(message.op_id, num_blocks, num_bytes, error))

        self._wait_for_all(done)

    def _refuse_operation(self, message: _Checkpoint) -> None:
        self._inbox.put_internal(CheckpointDone(message.op_id, error=self.degraded_reason))

    def _begin_final(self, _: _Final) -> None:
        self._hot.everything = True
        resident = [node for node in self._index.nodes.values() if node.is_resident]
        for node in sorted(resident, key=self._index.rank, reverse=True):
            self._hot.consider_chain(node, self._now_s)
        self._wait_for_all(self._mark_clean)

    def _mark_clean(self, _num_blocks: int, _num_bytes: int, error: str) -> None:
        if error:
            self.final_done.set()
            return
        self._handover.send(commit=True, clean=True)
        self._operations.begin(lambda *_: self.final_done.set(), (), self._handover.number)

    def _wait_for_all(self, done: OnDone) -> None:
        """Commit what there is, and have ``done`` called when every hot block is durable too."""
        if self.degraded_reason:
            done(0, 0, f"the store is degraded: {self.degraded_reason}")
            return
        if self._unknown_pin:
            self._unknown_pin = ""
            done(0, 0, "events were lost: blocks of a pin are not known")
            return
        self._handover.send(commit=True)
        for leaf in self._index.pins.values():  # those that found no room before get another try, or their refusal is told
            for node in self._index.nodes[leaf].chain():
                self._hot.consider(node, self._now_s)
        self._operations.begin(done, self._hot.pending(), self._handover.number)
        self._set_eager()

    def _set_eager(self) -> None:
        waiting = bool(self._operations)
        self._requests.ungoverned = waiting
        if self._store is not None:
            self._store.set_eager(waiting)

    # -------------------------------------------------------------------------------- plans

    def _advance(self) -> None:
        if self.degraded_reason:
            self._governor.hold_grants(HeldBy.DISK, 0)
            return
        self._grant()
        now = self._now_s
        due = now >= self._next_checkpoint_s or self._wal.num_bytes > self._limits.wal_soft_bytes
        if due and not self._handover.awaits_commit:
            self._next_checkpoint_s = now + self._limits.checkpoint_interval_s
            if self._bounds.keep():
                self._logged_roots &= self._index.namespaces.keys()
                self._trimmed_lsn = self._wal.last_lsn
            self._forget_gone_namespaces()
            if self._handover.is_due or self._hot.num_under_way or self._fault.reason:
                self._handover.send(commit=True)
        if self._operations:
            self._operations.complete()
            self._set_eager()

    def _forget_gone_namespaces(self) -> None:
        """The threads that write may still learn one from what was handed to them before the trim, so this goes on until they are past that."""
        if self._trimmed_lsn is None:
            return
        are_past_it = not self._handover.is_outstanding and self._wal.durable_lsn >= self._trimmed_lsn
        self._codec.retain(self._index.namespaces)
        if are_past_it:
            self._trimmed_lsn = None

    def _grant(self) -> None:
        """Hand hot blocks to the engine thread, pinned ones first, as long as there is room for them on disk and under way."""
        granted: list[IndexNode] = []
        num_refused = 0
        while (node := self._hot.take()) is not None:
            if self._bounds.make_room(node, self._now_s):
                granted.append(node)
                continue
            self._hot.refuse(node)
            self._operations.settle(node.block_hash, "the disk budget has no room for all pins" if node.num_pins else "")
            num_refused += 1
        self.counters.num_refused_blocks += num_refused
        if self._hot.num_waiting:
            self._governor.hold_grants(HeldBy.IN_FLIGHT)
        elif num_refused or self._bounds.had_no_room(self._now_s) or (self._hot.num_refused and not self._bounds.has_free_room()):
            self._governor.hold_grants(HeldBy.DISK, num_refused)
        else:
            self._governor.hold_grants(HeldBy.NONE)
        while self._governor.is_idle and self._bounds.has_free_room() and (node := self._hot.take_dwelt(self._now_s)) is not None:
            if self._bounds.make_room(node, self._now_s):
                granted.append(node)
            else:
                self._hot.refuse(node)
        if not granted:
            return
        if self._handover.has_changes:
            self._handover.send(commit=False)  # a block's node precedes its bytes
        self._handover.uncommitted = True
        wanted = [Wanted(node.block_hash, node.block_id, node.root) for node in granted]
        self._requests.wanted.extend(wanted)  # at once: a copy begun between two of them would be of one block
