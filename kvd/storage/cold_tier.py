"""The cold tier: blocks that are on disk and not in memory, read back while the engine runs. Implements the scheduler's ``ColdTier``.

A thread of its own reads and checks blocks into staging memory of its own; the engine thread hands what is there to the executor's queue between two steps, and
tells the scheduler through the inbox when it is in the pool. Loads are read one after the other, in the order in which they were asked for, and end in that order. A
block that fails its checks ends its load with what was good before it; its bytes leave the disk. A load that takes longer than ``timeout_s`` is given up, whatever the disk
does then: the reader writes to staging memory alone, so nobody has to wait for it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.cache.hashing import Namespace, block_hash
from kvd.commands import LoadDone
from kvd.observe.failpoints import declare, failpoint
from kvd.storage.block_reading import read_checked
from kvd.storage.copy_out import IDLE_S, POLL_S
from kvd.storage.errors import StorageError
from kvd.storage.load_cost import LoadCost
from kvd.storage.node_index import NodeIndex
from kvd.storage.planner import Planner
from kvd.storage.ports import BlockIO, Clock, LoadTarget, Log, StorageInbox, Ticket
from kvd.storage.schema import BadRowError
from kvd.storage.staging import StagingBuffer, StagingPool
from kvd.storage.store import failpoint_translated
from kvd.storage.store_thread import StoreThread
from kvd.types import BlockHash, KvGroup
from kvd.wal.record import Forget
from kvd.wal.writer import WalWriter

declare("cold.before_read", "cold.before_copy_in")

NO_STORE = "no_store"
STORE_FAULT = "store_fault"
LEFT_MEMORY = "parent_failed"
EXECUTOR = "executor"
TIMEOUT = "timeout"


@dataclass(slots=True)
class _Load:
    load_id: int
    targets: Sequence[LoadTarget]
    asked_s: float
    began_s: float
    num_copied: int = 0
    error: str = ""
    """Of a copy into the pool: nothing behind it counts, though it was read."""
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    """Checked rows of ``targets`` in ``buffer``. ``is_last``: nothing of the load follows; ``error`` says why if something should."""

    load: _Load
    targets: Sequence[LoadTarget]
    buffer: StagingBuffer
    is_last: bool
    error: str


@dataclass(slots=True)
class _Copy:
    batch: _Batch
    num_blocks: int
    tickets: list[Ticket] = field(default_factory=list)
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class _BadBlock:
    """To the planner: the stored bytes of this block failed their checks."""

    block_hash: BlockHash


class ColdTier:
    """``lookup``, ``start_load``, ``poll`` and what is counted belong to the engine thread; the index is only glanced at, by single look-ups."""

    def __init__(
        self,
        *,
        index: NodeIndex,
        store: StoreThread,
        planner: Planner,
        wal: WalWriter,
        cost: LoadCost,
        groups: Sequence[KvGroup],
        staging: StagingPool,
        block_io: BlockIO,
        inbox: StorageInbox,
        clock: Clock,
        log: Log,
        timeout_s: float,
    ) -> None:
        self._index = index
        self._store = store
        self._planner = planner
        self._wal = wal
        self._cost = cost
        self._groups = tuple(groups)
        self._block_bytes = sum(group.row_bytes for group in groups)
        self._staging = staging
        self._block_io = block_io
        self._inbox = inbox
        self._clock = clock
        self._log = log
        self._timeout_s = timeout_s
        self._wake = threading.Condition()
        self._loads: deque[_Load] = deque()
        self._reading: _Load | None = None
        self._stopping = False
        self._in_fault = False
        self._batches: deque[_Batch] = deque()
        self._copies: deque[_Copy] = deque()
        self._open: deque[_Load] = deque()
        self._num_blocks_under_way = 0
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._load_s_total = self._load_s_max = 0.0
        self._thread = threading.Thread(target=self._run, name="kvd-cold-reader", daemon=True)
        planner.handle(_BadBlock, self._drop)

    def start(self, rehydrated_bytes: int, rehydration_s: float) -> None:
        """Begin; what the start has read in so long is the first measurement."""
        self._cost.note_rehydration(rehydrated_bytes, rehydration_s)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the reader; whether it ended in time. Loads under way are not answered any more: the engine loop is over."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -------------------------------------------------------------------------------- engine thread

    def lookup(self, namespace: Namespace, parent_hash: BlockHash, blocks: Sequence[bytes]) -> Sequence[int]:
        """The uses of each block, from the first on, that is on disk and quicker loaded than computed; O(blocks)."""
        self._counts["lookups"] += 1
        reading = self._reading
        if (reading is not None and reading.is_given_up) or self._planner.is_broken:
            return ()  # the disk hangs, or nobody would take note of a block that is bad, and it would be read for each request
        nodes, root = self._index.nodes, namespace.root
        uses: list[int] = []
        for tokens in blocks:
            key = block_hash(parent_hash, tokens)
            node = nodes.get(key)
            if node is None or not node.stored_bytes or node.is_suspect or node.root != root or node.token_ids != tokens:
                break
            if parent_hash != (root if node.parent is None else node.parent.block_hash):
                break
            uses.append(node.uses)
            parent_hash = key
        num_worth = self._cost.num_worth_loading(len(uses), self._num_blocks_under_way) if uses else 0
        if num_worth < len(uses):
            self._counts["refused_slower"] += 1
            self._log.debug("cold.slower", blocks=len(uses), loads=num_worth, **self._measured())
        return uses[:num_worth]

    def start_load(self, load_id: int, namespace: Namespace, targets: Sequence[LoadTarget]) -> None:  # noqa: ARG002 (the port's)
        """Read ``targets`` into the pool; ``LoadDone`` comes through the inbox."""
        self._counts["loads"] += 1
        self._num_blocks_under_way += len(targets)
        now_s = self._clock.monotonic()
        load = _Load(load_id, targets, asked_s=now_s, began_s=now_s)
        self._open.append(load)
        with self._wake:
            self._loads.append(load)
            self._wake.notify_all()

    def idle_delay_s(self) -> float:
        """Seconds after which ``poll`` has something to do."""
        return POLL_S if self._open else IDLE_S

    def poll(self) -> None:
        """Hand over what was read, and tell of what has arrived. Never waits."""
        while self._batches:
            self._begin_copy(self._batches.popleft())
        while self._copies and all(ticket.done() for ticket in self._copies[0].tickets):
            self._finish_copy(self._copies.popleft())
        while self._open and self._clock.monotonic() - self._open[0].asked_s >= self._timeout_s:
            load = self._open[0]
            load.is_given_up = True
            load.error = TIMEOUT
            self._end(load, TIMEOUT)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts."""
        self._cost.note_prefill(num_tokens, seconds)

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what was measured."""
        return {
            "cold_lookups": self._counts["lookups"],
            "cold_loads": self._counts["loads"],
            "cold_loaded_blocks": self._counts["loaded_blocks"],
            "cold_loaded_bytes": self._counts["loaded_blocks"] * self._block_bytes,
            "cold_refused_slower": self._counts["refused_slower"],
            "cold_failed_blocks": self._counts["failed_blocks"],
            "cold_failed_loads": dict(self._failed),
            "cold_load_ms_total": round(self._load_s_total * 1e3, 3),
            "cold_load_ms_max": round(self._load_s_max * 1e3, 3),
            **self._measured(),
        }

    def _measured(self) -> dict[str, Any]:
        cost = self._cost
        return {
            "cold_bytes_per_s": round(1 / cost.seconds_per_byte) if cost.seconds_per_byte else None,
            "cold_latency_ms": round(cost.latency_s * 1e3, 3),
            "prefill_tokens_per_s": round(cost.prefill_tokens_per_s) if cost.prefill_tokens_per_s is not None else None,
        }

    def _begin_copy(self, batch: _Batch) -> None:
        """Only into blocks that are still the load's: from here on the executor's queue keeps the order."""
        targets = batch.targets
        copy = _Copy(batch, next((index for index, target in enumerate(targets) if not target.is_wanted), len(targets)))
        self._copies.append(copy)
        if copy.num_blocks and not batch.load.error:
            ids = [target.block_id for target in targets[: copy.num_blocks]]
            try:
                failpoint("cold.before_copy_in")
                for group in self._groups:
                    copy.tickets.append(self._block_io.copy_in(group.name, ids, batch.buffer.rows(group.name, len(ids))))
            except Exception:  # the executor has failed or is closed; the loop learns so by itself
                copy.has_failed = True

    def _finish_copy(self, copy: _Copy) -> None:
        batch, load = copy.batch, copy.batch.load
        if copy.has_failed or any(ticket.error is not None for ticket in copy.tickets):
            load.error = EXECUTOR
        with self._wake:
            self._staging.give_back(batch.buffer)
            self._wake.notify_all()
        if not load.error:
            load.num_copied += copy.num_blocks
        if batch.is_last and not load.is_given_up:
            self._end(load, load.error or batch.error or LEFT_MEMORY)

    def _end(self, load: _Load, why_not_all: str) -> None:
        """Tell of the oldest load, whose first ``num_copied`` blocks are in the pool."""
        oldest = self._open.popleft()
        assert oldest is load, "loads end in the order in which they began"
        num_failed = len(load.targets) - load.num_copied
        error = why_not_all if num_failed else ""
        seconds = self._clock.monotonic() - load.began_s
        self._num_blocks_under_way -= len(load.targets)
        self._counts["loaded_blocks"] += load.num_copied
        if error:
            self._counts["failed_blocks"] += num_failed
            self._failed[error] += 1
        else:
            self._load_s_total += seconds
            self._load_s_max = max(self._load_s_max, seconds)
            self._cost.note_load(load.num_copied * self._block_bytes, seconds)
        waited_s = load.began_s - load.asked_s
        self._log.debug(
            "cold.loaded", blocks=load.num_copied, failed=num_failed, error=error, waited_s=round(waited_s, 6), seconds=round(seconds, 6)
        )
        self._inbox.put_internal(LoadDone(load.load_id, load.num_copied, error))

    # -------------------------------------------------------------------------------- planner's thread

    def _drop(self, message: _BadBlock) -> None:
        """Bytes that expired between the look-up and the read were no fault of theirs."""
        node = self._index.nodes.get(message.block_hash)
        if node is not None and node.stored_bytes:
            self._index.drop_bytes(node)
            self._wal.append(Forget((node.block_hash,)))

    # -------------------------------------------------------------------------------- the reader

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._loads or self._stopping)
                if self._stopping:
                    return
                load = self._reading = self._loads.popleft()
            load.began_s = self._clock.monotonic()
            num_read, is_over = 0, False
            while not (is_over or load.is_given_up):
                buffer = self._take_buffer()
                if buffer is None:
                    return
                wanted = load.targets[num_read : num_read + buffer.max_blocks]
                num_good, error = self._read(wanted, buffer)
                num_read += num_good
                is_over = num_good < len(wanted) or num_read == len(load.targets)
                self._batches.append(_Batch(load, wanted[:num_good], buffer, is_over, error))
            self._reading = None

    def _take_buffer(self) -> StagingBuffer | None:
        """A free buffer, as soon as there is one; None at the end."""
        with self._wake:
            while not self._stopping:
                buffer = self._staging.take()
                if buffer is not None:
                    return buffer
                self._wake.wait()
        return None

    def _read(self, targets: Sequence[LoadTarget], buffer: StagingBuffer) -> tuple[int, str]:
        """How many of ``targets`` are good, from the first on, and why the next one is not."""
        num_good = 0
        try:
            failpoint_translated("cold.before_read")
            with self._store.reading() as store:
                if store is None:
                    return 0, NO_STORE
                with store.reading_blocks() as reader:
                    for target in targets:
                        if not target.is_wanted:
                            return num_good, LEFT_MEMORY
                        try:
                            read_checked(reader, self._groups, target.block_hash, buffer, num_good)
                        except BadRowError as error:
                            self._planner.post(_BadBlock(target.block_hash))
                            return num_good, error.reason
                        num_good += 1
        except Exception as error:  # not only the store's: somebody waits for this load's end
            if not self._in_fault:
                self._log.error("cold.store_fault", error=str(error) if isinstance(error, StorageError) else repr(error))
            self._in_fault = True
            return 0, STORE_FAULT
        self._in_fault = False
        return num_good, ""
