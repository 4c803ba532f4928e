"""The planner: one thread that knows what storage knows, and decides what is logged, copied, committed and expired.

It takes the engine's events in order, keeps the node index, appends inserts to the log, asks the engine thread for the bytes of hot blocks (pinned, or
used twice or more) and the storage thread for commits. It never touches the disk and never makes the engine thread wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvd.cache.events import BlockOrigin, BlockRemoved, BlocksPinned, BlockStored, BlocksUnpinned, BlocksUsed, CacheEvent
from kvd.commands import CheckpointDone
from kvd.storage import schema
from kvd.storage.budget import PlannerLimits
from kvd.storage.copy_out import CopyRequests, Wanted
from kvd.storage.hot_blocks import HotBlocks
from kvd.storage.node_index import IndexNode, NodeIndex
from kvd.storage.operations import OnDone, Operations
from kvd.storage.ports import Clock, Log, StorageInbox
from kvd.storage.store_thread import Changes, Committed, Degraded, Discarded, Result, Resumed, StoreThread
from kvd.types import BlockHash, BlockId
from kvd.wal.record import Insert, Pin, Unpin
from kvd.wal.writer import WalWriter

MAX_WAITING_EVENTS = 65536
"""Events that the planner has not taken yet; those of blocks are dropped and counted beyond."""

_EXPIRE_FRACTION = 0.02
_FULL_EXPIRE_FRACTION = 0.1
_WAKE_S = 0.25


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
        inbox: StorageInbox,
        limits: PlannerLimits,
        clock: Clock,
        log: Log,
    ) -> None:
        self._index = index
        self._wal = wal
        self._requests = requests
        self._inbox = inbox
        self._limits = limits
        self._clock = clock
        self._log = log
        self._store: StoreThread | None = None
        self._mail: deque[CacheEvent | _Checkpoint | _Returned | _Final | Result] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._logged_roots: set[BlockHash] = set()
        self._hot = HotBlocks(limits.max_wanted)
        self._unknown_pin = ""
        self._in_fault = False
        self._outstanding: deque[Changes] = deque()
        self._operations = Operations()
        self._number = 0
        self._next_checkpoint_s = clock.monotonic() + limits.checkpoint_interval_s
        self._no_room_until_s = 0.0
        self._uncommitted = False
        self.final_done = threading.Event()
        self.degraded_reason = ""
        self.last_checkpoint_s: float | None = None
        self.num_lost_events = self.num_checkpoints = self.num_committed_bytes = self.num_committed_blocks = 0
        self.num_expired_bytes = self.num_trimmed_nodes = self.num_refused_blocks = self.num_degradations = 0
        self.commit_s_total = self.commit_s_max = 0.0
        self._thread = threading.Thread(target=self._run, name="kvd-planner", daemon=True)

    def start(self, store: StoreThread, *, degraded_reason: str) -> None:
        self._store = store
        self.degraded_reason = degraded_reason
        if degraded_reason:
            self._index.forget_stored()
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        """Counters since the start; readable from any thread."""
        return {
            "checkpoints": self.num_checkpoints,
            "checkpoint_blocks": self.num_committed_blocks,
            "checkpoint_bytes": self.num_committed_bytes,
            "checkpoint_commit_ms_total": round(self.commit_s_total * 1e3, 3),
            "checkpoint_commit_ms_max": round(self.commit_s_max * 1e3, 3),
            "checkpoint_refused_blocks": self.num_refused_blocks,
            "expired_bytes": self.num_expired_bytes,
            "trimmed_nodes": self.num_trimmed_nodes,
            "lost_events": self.num_lost_events,
            "degradations": self.num_degradations,
            "hot_blocks_waiting": self._hot.num_waiting,
            "blocks_under_way": self._hot.num_under_way,
        }

    # -------------------------------------------------------------------------------- engine thread

    def observe(self, events: Sequence[CacheEvent]) -> None:
        if len(self._mail) > MAX_WAITING_EVENTS:
            kept = [event for event in events if isinstance(event, BlocksPinned | BlocksUnpinned)]
            self.num_lost_events += len(events) - len(kept)
            events = kept
        self._mail.extend(events)
        self._wake.set()

    def request_checkpoint(self, op_id: bytes) -> None:
        self._post(_Checkpoint(op_id))

    def request_final(self) -> None:
        self._post(_Final())

    def returned(self, block_hashes: list[BlockHash], failed: bool) -> None:
        self._post(_Returned(block_hashes, failed))

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
        self._post(result)

    def _post(self, message: _Checkpoint | _Returned | _Final | Result) -> None:
        self._mail.append(message)
        self._wake.set()

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(_WAKE_S)
            self._wake.clear()
            try:
                while self._mail:
                    self._take(self._mail[0])
                    self._mail.popleft()  # only now: who sent one that can't be taken is still to be answered
                self._advance()
            except Exception as error:
                # A fault of ours must not end the daemon nor go on writing from a wrong picture: persistence stays off from here.
                self._log.error("storage.planner_failed", error=repr(error))
                self.num_degradations += 1
                self.degraded_reason = f"the planner failed: {error!r}"
                self._refuse_from_now_on()

    def _refuse_from_now_on(self) -> None:
        """Answer whoever waits, and comes to wait, with the reason; until the end."""
        self._requests.wanted.clear()
        self._operations.fail(self.degraded_reason)
        self._requests.ungoverned = False
        while not self._stopping:
            while self._mail:
                message = self._mail.popleft()
                if isinstance(message, _Checkpoint):
                    self._inbox.put_internal(CheckpointDone(message.op_id, error=self.degraded_reason))
                elif isinstance(message, _Final):
                    self.final_done.set()
            self._wake.wait(_WAKE_S)
            self._wake.clear()

    def _take(self, message: CacheEvent | _Checkpoint | _Returned | _Final | Result) -> None:
        if isinstance(message, BlockStored):
            self._stored(message)
        elif isinstance(message, BlocksUsed):
            for block_hash in message.block_hashes:
                self._used(block_hash)
        elif isinstance(message, BlockRemoved):
            self._removed(message)
        elif isinstance(message, BlocksPinned):
            self._pinned(message)
        elif isinstance(message, BlocksUnpinned):
            self._index.unpin(message.name)
            self._wal.append(Unpin(message.name))
        elif isinstance(message, Committed):
            self._committed(message)
        elif isinstance(message, Discarded):
            self._release(message.block_hashes)
        elif isinstance(message, _Returned):
            self._release(message.block_hashes)
            if message.failed:
                self._operations.fail("the executor could not copy the blocks")
                self._set_eager()
        elif isinstance(message, Degraded):
            self._degraded(message)
        elif isinstance(message, Resumed):
            self._resumed()
        elif isinstance(message, _Checkpoint):
            self._begin_operation(message.op_id)
        else:
            self._begin_final()

    # -------------------------------------------------------------------------------- events of the cache

    def _stored(self, event: BlockStored) -> None:
        index = self._index
        is_new_namespace = index.add_namespace(event.namespace)
        node = index.nodes.get(event.block_hash)
        if node is None:
            node = index.insert(event.namespace.root, event.parent_hash, event.token_ids)
            if node is None:
                self.num_lost_events += 1
                return
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
        node.block_id = event.block_id
        node.origin = event.origin.value
        self._touch(node)

    def _used(self, block_hash: BlockHash) -> None:
        node = self._index.nodes.get(block_hash)
        if node is not None:
            node.uses += 1
            self._touch(node)

    def _touch(self, node: IndexNode) -> None:
        node.last_use_unix_s = int(self._clock.unix())
        self._index.dirty[node.block_hash] = node
        self._hot.consider(node)

    def _removed(self, event: BlockRemoved) -> None:
        node = self._index.nodes.get(event.block_hash)
        if node is not None and node.block_id == event.block_id:
            node.block_id = BlockId(-1)
            if self._hot.discard(node):
                self._operations.settle(node.block_hash)

    def _pinned(self, event: BlocksPinned) -> None:
        if not event.block_hashes or not self._index.pin(event.name, event.block_hashes[-1]):
            self.num_lost_events += 1
            self._unknown_pin = event.name
            return
        self._wal.append(Pin(event.name, event.block_hashes[-1]))
        for node in self._index.nodes[event.block_hashes[-1]].chain():
            self._hot.consider(node)

    # -------------------------------------------------------------------------------- results of the store

    def _release(self, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            self._hot.release(block_hash, self._index.nodes.get(block_hash))
            self._operations.settle(block_hash)

    def _committed(self, result: Committed) -> None:
        self._release(result.block_hashes)
        for block_hash in result.block_hashes:
            node = self._index.nodes.get(block_hash)
            if node is not None:
                self._index.set_stored(node, self._limits.block_bytes)
            else:
                self._index.dropped_bytes.add(block_hash)
        while self._outstanding and self._outstanding[0].number <= result.number:
            self._outstanding.popleft()
        self._wal.retire(result.applied_lsn)
        self._uncommitted = False
        if self._in_fault and (result.block_hashes or not self._hot.pending()):
            self._in_fault = False
            self._log.info("storage.resumed")
        self.last_checkpoint_s = self._clock.monotonic()
        self.num_checkpoints += 1
        self.num_committed_bytes += result.num_bytes
        self.num_committed_blocks += len(result.block_hashes)
        self.commit_s_total += result.seconds
        self.commit_s_max = max(self.commit_s_max, result.seconds)
        self._operations.committed(len(result.block_hashes), result.num_bytes, result.number)

    def _degraded(self, result: Degraded) -> None:
        is_news = not self._in_fault
        self._in_fault = True
        if is_news or result.generation_lost:
            self._log.error("storage.degraded", reason=result.reason, generation_lost=result.generation_lost)
        self._become_degraded(result.reason)
        self._release(result.block_hashes)
        if result.generation_lost:
            self._index.forget_stored()
            self._logged_roots.clear()
        elif is_news:  # full: free pages let the file go on without growing
            self.num_expired_bytes += self._index.expire_bytes(int(self._index.stored_bytes * _FULL_EXPIRE_FRACTION))

    def _become_degraded(self, reason: str) -> None:
        self.num_degradations += 1
        self.degraded_reason = reason
        while self._requests.wanted:
            try:
                self._release([self._requests.wanted.popleft().block_hash])
            except IndexError:
                break
        self._hot.clear_waiting()
        self._redo_outstanding()
        self._operations.fail(f"the store is degraded: {reason}")
        self._set_eager()

    def _redo_outstanding(self) -> None:
        """What was handed over and is not durable is dirty again."""
        index = self._index
        while self._outstanding:
            changes = self._outstanding.popleft()
            index.dirty_namespaces.update(root for root, _ in changes.namespaces)
            index.dirty_pins.update(name for name, _ in changes.pins)
            index.dropped_keys.update(changes.dropped_keys)
            index.removed.update(key for key in changes.removed_nodes if key not in index.nodes)
            for row in changes.nodes:
                node = index.nodes.get(row.block_hash)
                if node is not None:
                    index.dirty[row.block_hash] = node
            for block_hash in changes.dropped_blocks:
                node = index.nodes.get(block_hash)
                if node is None or not node.stored_bytes:
                    index.dropped_bytes.add(block_hash)

    def _resumed(self) -> None:
        self.degraded_reason = ""
        self._next_checkpoint_s = self._clock.monotonic()
        for node in self._index.nodes.values():
            self._hot.consider(node)

    # -------------------------------------------------------------------------------- operations

    def _begin_operation(self, op_id: bytes) -> None:
        def done(num_blocks: int, num_bytes: int, error: str) -> None:
            self._inbox.put_internal(CheckpointDone(op_id, num_blocks, num_bytes, error))

        self._wait_for_all(done)

    def _begin_final(self) -> None:
        self._hot.everything = True
        resident = [node for node in self._index.nodes.values() if node.is_resident]
        for node in sorted(resident, key=self._index.rank, reverse=True):
            self._hot.consider(node)
        self._wait_for_all(self._mark_clean)

    def _mark_clean(self, _num_blocks: int, _num_bytes: int, error: str) -> None:
        if error:
            self.final_done.set()
            return
        self._send(commit=True, clean=True)
        self._operations.begin(lambda *_: self.final_done.set(), (), self._number)

    def _wait_for_all(self, done: OnDone) -> None:
        """Commit what there is, and have ``done`` called when every hot block is durable too."""
        if self.degraded_reason:
            done(0, 0, f"the store is degraded: {self.degraded_reason}")
            return
        if self._unknown_pin:
            unknown, self._unknown_pin = self._unknown_pin, ""
            done(0, 0, f"events were lost: blocks of the pin {unknown} are not known")
            return
        self._send(commit=True)
        for leaf in self._index.pins.values():  # those that found no room before get another try, or their refusal is told
            for node in self._index.nodes[leaf].chain():
                self._hot.consider(node)
        self._operations.begin(done, self._hot.pending(), self._number)
        self._set_eager()

    def _set_eager(self) -> None:
        waiting = bool(self._operations)
        self._requests.ungoverned = waiting
        if self._store is not None:
            self._store.set_eager(waiting)

    # -------------------------------------------------------------------------------- plans

    def _advance(self) -> None:
        if self.degraded_reason:
            return
        self._grant()
        now = self._clock.monotonic()
        due = now >= self._next_checkpoint_s or self._wal.num_bytes > self._limits.wal_soft_bytes
        if due and not any(changes.commit for changes in self._outstanding):
            self._next_checkpoint_s = now + self._limits.checkpoint_interval_s
            self._keep_bounds()
            if self._has_changes() or self._uncommitted or self._hot.num_under_way:
                self._send(commit=True)
        if self._operations:
            self._operations.complete()
            self._set_eager()

    def _keep_bounds(self) -> None:
        index, limits = self._index, self._limits
        if len(index.nodes) > limits.max_nodes:
            self.num_trimmed_nodes += index.trim(int(limits.max_nodes * 0.9))
        excess = index.stored_bytes - limits.max_block_bytes
        if excess > 0:
            self.num_expired_bytes += index.expire_bytes(excess)

    def _has_changes(self) -> bool:
        index = self._index
        return bool(index.dirty or index.removed or index.dropped_bytes or index.dropped_keys or index.dirty_namespaces or index.dirty_pins)

    def _grant(self) -> None:
        """Hand hot blocks to the engine thread, pinned ones first, as long as there is room for them on disk and under way."""
        granted: list[IndexNode] = []
        while (node := self._hot.take()) is not None:
            if self._make_room(node):
                granted.append(node)
                continue
            self._hot.release(node.block_hash, node)
            self._operations.settle(node.block_hash, "the disk budget has no room for all pins" if node.num_pins else "")
            self.num_refused_blocks += 1
        if not granted:
            return
        if self._has_changes():
            self._send(commit=False)  # a block's node precedes its bytes
        self._uncommitted = True
        self._requests.wanted.extend(Wanted(node.block_hash, node.block_id) for node in granted)

    def _make_room(self, node: IndexNode) -> bool:
        limits, index = self._limits, self._index
        needed = index.stored_bytes + self._hot.num_under_way * limits.block_bytes - limits.max_block_bytes
        if needed <= 0:
            return True
        now = self._clock.monotonic()
        if now < self._no_room_until_s and not node.num_pins:
            return False
        below = (True, 0.0, 0) if node.num_pins else index.rank(node)  # one pin's bytes never make room for another's
        freed = index.expire_bytes(max(needed, int(limits.max_block_bytes * _EXPIRE_FRACTION)), below=below)
        self.num_expired_bytes += freed
        if freed < needed:
            self._no_room_until_s = now + limits.checkpoint_interval_s
            return False
        return True

    def _send(self, *, commit: bool, clean: bool = False) -> None:
        index, store = self._index, self._store
        assert store is not None
        self._number += 1
        namespaces = [
            (root, schema.pack_namespace(index.namespaces[root]) if root in index.namespaces else None) for root in index.dirty_namespaces
        ]
        changes = Changes(
            number=self._number,
            applied_lsn=self._wal.last_lsn,
            namespaces=namespaces,
            nodes=[node.row() for node in index.dirty.values()],
            removed_nodes=list(index.removed),
            dropped_blocks=list(index.dropped_bytes),
            dropped_keys=list(index.dropped_keys),
            pins=[(name, index.pins.get(name)) for name in index.dirty_pins],
            commit=commit,
            clean=clean,
        )
        for pending in (index.dirty, index.removed, index.dropped_bytes, index.dropped_keys, index.dirty_namespaces, index.dirty_pins):
            pending.clear()
        self._outstanding.append(changes)
        self._uncommitted = True
        store.submit(changes)
