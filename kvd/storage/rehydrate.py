"""Bringing blocks back from disk before traffic: which, in what order, and every check on the way into the pool.

Pins come first, then what is worth most (decayed uses × recompute cost ÷ bytes), each with everything above it. A block whose bytes, header, identity or fingerprint fail
is dropped and counted, and so is what hangs below it; all of it is computed again when asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from kvd.cache.events import BlockOrigin
from kvd.observe.failpoints import declare
from kvd.storage.block_copy import copy_bytes
from kvd.storage.block_reading import read_checked
from kvd.storage.errors import StorageError
from kvd.storage.node_index import IndexNode, NodeIndex
from kvd.storage.ports import BlockIO, Clock, LoadTarget, RehydrationCache, Ticket
from kvd.storage.schema import BadRowError
from kvd.storage.staging import StagingBuffer, StagingPool
from kvd.storage.store import Store, failpoint_translated
from kvd.types import TOKEN_BYTES, BlockHash, KvGroup

BEHIND_BAD_BLOCK = "behind_bad_block"

_BATCH_BYTES = 8 << 20
"""Read, checked and copied together: enough that handing half of it to the second reader costs little."""

_MAX_COPIES = 2
"""Batches that are being copied while the next one is read: reader and executor need not wait for each other at each of them."""

declare("rehydrate.before_read", "rehydrate.before_copy_in", "rehydrate.before_complete")

Progress = Callable[[int, int], None]
"""(blocks done, blocks to do)."""


@dataclass(slots=True)
class Loaded:
    """What came of it. ``bad`` are the blocks whose bytes must leave the disk.

    ``dropped`` counts blocks by the reason of their refusal; those that were to be loaded and hang below a refused one count as ``behind_bad_block``.
    """

    num_blocks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    bad: list[IndexNode] = field(default_factory=list)
    in_memory: set[BlockHash] = field(default_factory=set)
    store_error: str = ""


def with_room(pinned_chains: Iterable[Sequence[BlockHash]], max_blocks: int) -> list[Sequence[BlockHash]]:
    """The pins, most important first, that can be held within ``max_blocks`` different blocks; one that does not fit leaves its place to those after it."""
    held: set[BlockHash] = set()
    chains: list[Sequence[BlockHash]] = []
    for chain in pinned_chains:
        new = [block_hash for block_hash in chain if block_hash not in held]
        if len(held) + len(new) <= max_blocks:
            held.update(new)
            chains.append(chain)
    return chains


def choose(index: NodeIndex, pinned_chains: Iterable[Sequence[BlockHash]], max_blocks: int) -> list[list[IndexNode]]:
    """The chains to load, each from its first block on, the most valuable first; at most ``max_blocks`` different blocks in all."""
    chosen: dict[BlockHash, IndexNode] = {}
    chains: list[list[IndexNode]] = []

    def take(chain: Sequence[IndexNode]) -> None:
        have: list[IndexNode] = []
        is_new = False
        for node in chain:
            if node.block_hash not in chosen:
                if not node.stored_bytes or len(chosen) >= max_blocks:
                    break
                chosen[node.block_hash] = node
                is_new = True
            have.append(node)
        if is_new:
            chains.append(have)

    for hashes in pinned_chains:
        known: list[IndexNode] = []
        for block_hash in hashes:
            node = index.nodes.get(block_hash)
            if node is None or node.parent is not (known[-1] if known else None):
                break
            known.append(node)
        take(known)
    stored = [node for node in index.nodes.values() if node.stored_bytes]
    for node in sorted(stored, key=lambda each: (index.value(each), each.depth), reverse=True):
        if len(chosen) >= max_blocks:
            break
        if node.block_hash not in chosen:
            chain = node.chain()
            if all(each.stored_bytes for each in chain):
                take(chain)
    return chains


@dataclass(frozen=True, slots=True)
class _Load:
    target: LoadTarget
    node: IndexNode


@dataclass(frozen=True, slots=True)
class _Copy:
    loads: list[_Load]
    buffer: StagingBuffer
    tickets: list[Ticket]


class Rehydration:
    """Single use, on a thread that no signal interrupts: it shares locks with others."""

    def __init__(
        self,
        *,
        index: NodeIndex,
        store: Store,
        cache: RehydrationCache,
        block_io: BlockIO,
        groups: Sequence[KvGroup],
        staging: StagingPool,
        clock: Clock,
        deadline_s: float,
    ) -> None:
        self._index = index
        self._store = store
        self._cache = cache
        self._block_io = block_io
        self._groups = tuple(groups)
        self._staging = staging
        self._clock = clock
        self._deadline_s = deadline_s
        self._batch_blocks = max(1, min(staging.max_blocks, _BATCH_BYTES // max(1, sum(group.row_bytes for group in groups))))
        self._loaded = Loaded()
        self._waiting: deque[_Load] = deque()
        self._copies: deque[_Copy] = deque()
        self._unusable: set[BlockHash] = set()
        self._num_total = 0
        self._has_failed = False
        self._second_reader = ThreadPoolExecutor(1, "kvd-rehydrate")
        self._progress: Progress = lambda _done, _total: None

    def run(self, chains: Sequence[Sequence[IndexNode]], progress: Progress) -> Loaded:
        """Load ``chains`` until all are there, the time is over or the store fails. The tree holds no filling node of ours afterwards."""
        try:
            # Its thread begins before there is anything to read: whatever ends the start in the middle of that leaves one that nobody would wait for.
            self._second_reader.submit(int).result()
            return self._run(chains, progress)
        finally:
            self._second_reader.shutdown()  # ``progress`` may raise to end the start, and the store's map is gone soon after

    def _run(self, chains: Sequence[Sequence[IndexNode]], progress: Progress) -> Loaded:
        self._progress = progress
        self._num_total = len({node.block_hash for chain in chains for node in chain})
        try:
            for chain in chains:
                if self._is_over() or not self._begin(chain):
                    break
                while len(self._waiting) >= self._batch_blocks and not self._is_over():
                    self._load_some()
            while self._waiting and not self._is_over():
                self._load_some()
        except StorageError as error:
            self._loaded.store_error = str(error)
        while self._copies:
            self._finish()
        if num_behind := len(self._unusable) - len(self._loaded.bad):
            self._loaded.dropped[BEHIND_BAD_BLOCK] = num_behind
        if self._waiting:
            self._cache.fail_fill([load.target.node for load in self._waiting])
            self._waiting.clear()
        progress(self._loaded.num_blocks, self._num_total)
        return self._loaded

    def _is_over(self) -> bool:
        """Out of time, or a copy failed (if it was the executor, the engine loop learns so by itself)."""
        return self._has_failed or self._clock.monotonic() >= self._deadline_s

    def _begin(self, chain: Sequence[IndexNode]) -> bool:
        """Make filling nodes for what of ``chain`` is not there; False if the pool has no room."""
        num_usable = next((index for index, node in enumerate(chain) if node.block_hash in self._unusable), len(chain))
        usable = chain[:num_usable]
        for node in chain[num_usable:]:
            self._unusable.add(node.block_hash)
            node.is_suspect = True
        if not usable:
            return True
        namespace = self._index.namespaces[usable[0].root]
        targets = self._cache.begin_load(namespace, [(node.token_ids, node.uses) for node in usable], BlockOrigin.RESTORED)
        if targets is None:
            return False
        by_hash = {node.block_hash: node for node in usable}
        self._waiting.extend(_Load(target, by_hash[target.block_hash]) for target in targets)
        return True

    def _load_some(self) -> None:
        """Read one staging buffer's worth, check it, and start its copy into the pool."""
        buffer = self._staging.take()
        if buffer is None:
            self._finish()
            return
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._batch_blocks))]
        try:
            failpoint_translated("rehydrate.before_read")
            good = self._sift(batch, self._read(batch, buffer), buffer)
            failpoint_translated("rehydrate.before_copy_in")
        except StorageError:
            self._staging.give_back(buffer)
            self._cache.fail_fill([load.target.node for load in batch if load.node.block_hash not in self._unusable])
            raise
        if not good:
            self._staging.give_back(buffer)
            return
        ids = [load.target.block_id for load in good]
        tickets = [self._block_io.copy_in(group.name, ids, buffer.rows(group.name, len(ids))) for group in self._groups]
        self._copies.append(_Copy(good, buffer, tickets))
        while self._copies and (len(self._copies) > _MAX_COPIES or all(ticket.done() for ticket in self._copies[0].tickets)):
            self._finish()

    def _read(self, batch: Sequence[_Load], buffer: StagingBuffer) -> list[str]:
        """Bring the blocks of ``batch`` into the rows of ``buffer``, a half of them on a second thread; for each why it can't be used, or nothing."""
        half = len(batch) // 2
        second = self._second_reader.submit(self._read_rows, batch[half:], buffer, half)
        try:
            reasons = self._read_rows(batch[:half], buffer, 0)
        finally:
            wait([second])  # it writes to the buffer
        return reasons + second.result()

    def _read_rows(self, loads: Sequence[_Load], buffer: StagingBuffer, first_row: int) -> list[str]:
        reasons = []
        with self._store.reading_blocks() as reader:
            for row, load in enumerate(loads, first_row):
                try:
                    read_checked(reader, self._groups, load.node.block_hash, buffer, row)
                except BadRowError as error:
                    reasons.append(error.reason)
                else:
                    reasons.append("")
        return reasons

    def _sift(self, batch: Sequence[_Load], reasons: Sequence[str], buffer: StagingBuffer) -> list[_Load]:
        """The loads whose bytes are good, in the first rows of ``buffer``; the others are dropped, with those that hang below them."""
        good: list[_Load] = []
        for row, (load, reason) in enumerate(zip(batch, reasons, strict=True)):
            node = load.node
            if node.parent is not None and node.parent.block_hash in self._unusable:
                self._unusable.add(node.block_hash)  # it left the tree with its parent
                node.is_suspect = True
            elif reason:
                self._unusable.add(node.block_hash)
                self._loaded.dropped[reason] = self._loaded.dropped.get(reason, 0) + 1
                self._loaded.bad.append(node)
                self._cache.fail_fill([load.target.node])
            else:
                if row != len(good):
                    for group in self._groups:
                        copy_bytes(buffer.rows(group.name, 1, len(good)), buffer.rows(group.name, 1, row))
                good.append(load)
        return good

    def _finish(self) -> None:
        """Wait for the oldest copy and make its blocks ready."""
        if not self._copies:
            return
        copy = self._copies.popleft()
        for ticket in copy.tickets:
            ticket.wait()
        self._staging.give_back(copy.buffer)
        nodes: list[Any] = [load.target.node for load in copy.loads]
        failed = next((ticket.error for ticket in copy.tickets if ticket.error is not None), None)
        if failed is not None:
            self._cache.fail_fill(nodes)
            self._has_failed = True
            return
        try:
            failpoint_translated("rehydrate.before_complete")
        except StorageError as error:
            self._loaded.store_error = str(error)
            self._cache.fail_fill(nodes)
            self._has_failed = True
            return
        self._cache.complete_fill(nodes)
        loaded = self._loaded
        kept = [load for load in copy.loads if load.target.node.in_tree]  # what hung below a copy that failed has left
        loaded.num_blocks += len(kept)
        for load in kept:
            loaded.num_tokens += len(load.node.token_ids) // TOKEN_BYTES
            loaded.num_bytes += sum(group.row_bytes for group in self._groups)
            loaded.in_memory.add(load.node.block_hash)
        self._progress(loaded.num_blocks, self._num_total)


def mark_unreachable(index: NodeIndex) -> set[BlockHash]:
    """The blocks that have bytes, and whose ancestors all have. The others' bytes can't be loaded and were not checked: they become suspect."""
    reachable: set[BlockHash] = set()
    for node in sorted(index.nodes.values(), key=lambda each: each.depth):
        if node.stored_bytes:
            if not node.is_suspect and (node.parent is None or node.parent.block_hash in reachable):
                reachable.add(node.block_hash)
            else:
                node.is_suspect = True
    return reachable


def recompute_candidates(index: NodeIndex, reachable: set[BlockHash], in_memory: set[BlockHash], max_blocks: int) -> list[list[IndexNode]]:
    """Chains that were used twice or more and can't be loaded whole, the most valuable first; only the longest of each branch."""
    hot = [node for node in index.nodes.values() if node.uses >= 2]
    inner = {node.parent.block_hash for node in hot if node.parent is not None}
    ends = [node for node in hot if node.block_hash not in inner and node.block_hash not in reachable]
    chains: list[list[IndexNode]] = []
    counted = set(in_memory)
    for node in sorted(ends, key=index.value, reverse=True):
        chain = node.chain()
        missing = [each.block_hash for each in chain if each.block_hash not in counted]
        if len(missing) <= max_blocks:
            max_blocks -= len(missing)
            counted.update(missing)
            chains.append(chain)
    return chains
