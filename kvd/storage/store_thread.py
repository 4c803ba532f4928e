"""The thread that writes the store: checksums from staging memory, transactions, and what to do when the disk fails.

One transaction is open at a time. It is committed when it holds ``commit_bytes`` of blocks, when the planner says so (a checkpoint's end), or, while
somebody waits for durability, whenever nothing more is staged.

A full or read-only disk leaves the generation as of its last commit, still readable: the thread drops what comes and tries again with growing pauses. Anything
else (an I/O error, damage, an error that nobody foresaw) ends the generation: it is closed, set aside, and with growing pauses a fresh one is tried. The thread
itself never ends before it is told to, for somebody may wait for its answer.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvd.cache.hashing import Namespace
from kvd.observe.failpoints import declare
from kvd.storage.errors import NamespaceGoneError, StorageError, StoreBlockedError, StoreDamagedError, StoreMapFullError, StorePanickedError
from kvd.storage.generations import Generations
from kvd.storage.io_priority import lower_io_priority
from kvd.storage.node_index import NodeIndex
from kvd.storage.ports import Clock
from kvd.storage.schema import NodeRow
from kvd.storage.staging import StagingBuffer, StagingPool
from kvd.storage.store import Store, StoreTransaction, failpoint_translated
from kvd.types import BlockHash, KvGroup
from kvd.wal.disk_faults import fault_sentence, is_passing

declare("checkpoint.before_nodes", "checkpoint.before_blocks", "checkpoint.between_blocks")

_RETRY_MIN_S = 1.0
_RETRY_MAX_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the planner wants in the store besides block bytes. ``None`` as a value removes the row."""

    number: int
    applied_lsn: int
    namespaces: list[tuple[BlockHash, Namespace | None]] = field(default_factory=list)
    nodes: list[NodeRow] = field(default_factory=list)
    removed_nodes: list[BlockHash] = field(default_factory=list)
    dropped_blocks: list[BlockHash] = field(default_factory=list)
    dropped_keys: list[tuple[bytes, bytes]] = field(default_factory=list)
    """(database, key) of rows that stand for nothing."""
    pins: list[tuple[str, BlockHash | None]] = field(default_factory=list)
    commit: bool = False
    clean: bool = False
    epoch: int = 0
    """Of the last ``Degraded`` that was heard."""


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Rows of ``block_hashes``, which lie under ``roots``, in ``buffer``, in that order, in every group."""

    block_hashes: tuple[BlockHash, ...]
    roots: tuple[BlockHash, ...]
    buffer: StagingBuffer


@dataclass(frozen=True, slots=True)
class Committed:
    """Durable: these blocks, and every ``Changes`` up to ``number``."""

    block_hashes: list[BlockHash]
    num_bytes: int
    number: int
    applied_lsn: int
    seconds: float
    has_room: bool
    """Whether the disk has room for as many blocks as one transaction holds."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """These blocks were not written: they came while the store was degraded, or their namespace is gone."""

    block_hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class Degraded:
    """Persistence is off, or still is, for another reason. Every ``Changes`` after the last ``Committed`` is lost, and all stored bytes too if ``generation_lost``."""

    reason: str
    generation_lost: bool
    block_hashes: list[BlockHash]
    epoch: int
    """How often changes were lost. ``Changes`` of an earlier epoch are lost, too: they say less than what has to be handed over again, and their LSN more."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Persistence is on again. ``late``: what the store holds, if it could not be read until now."""

    late: NodeIndex | None = None


Result = Committed | Discarded | Degraded | Resumed


class StoreThread:
    """``submit`` and ``stage`` may be called from any thread; results come through ``on_result`` on this thread.

    ``store`` None, or for reading alone: the thread begins degraded. ``read_late``: there is one that could not be read yet, and this makes an index of it once
    it can; without it, none was found or could be made.
    """

    def __init__(
        self,
        generations: Generations,
        store: Store | None,
        *,
        groups: Sequence[KvGroup],
        staging: StagingPool,
        commit_bytes: int,
        clock: Clock,
        on_result: Callable[[Result], None],
        read_late: Callable[[Store], NodeIndex] | None = None,
    ) -> None:
        self._generations = generations
        self._store = store
        self._groups = tuple(groups)
        self._staging = staging
        self._commit_bytes = commit_bytes
        self._clock = clock
        self._on_result = on_result
        self._values = {group.name: memoryview(bytearray(generations.codec.value_bytes(group.row_bytes))) for group in groups}
        self._wake = threading.Condition()
        self._reading = threading.Condition()
        self._num_readers = 0
        self._changes: deque[Changes] = deque()
        self._staged: deque[StagedBatch] = deque()
        self._asked: deque[tuple[Callable[[], str], queue.SimpleQueue[str]]] = deque()
        self._eager = False
        self._stopping = False
        # the thread's own
        self._txn: StoreTransaction | None = None
        self._txn_began_s = 0.0
        self._txn_hashes: list[BlockHash] = []
        self._number = self._epoch = 0
        self._applied_lsn = store.meta.applied_lsn if store is not None else 0
        self._clean = False
        self._is_degraded = store is None or store.readonly
        self._read_late = read_late
        self._is_lost = store is None and read_late is None
        self._must_reopen = False
        self._retry_s = _RETRY_MIN_S
        self._next_probe_s = time.monotonic() + self._retry_s
        self._thread = threading.Thread(target=self._run, name="kvd-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, changes: Changes) -> None:
        with self._wake:
            self._changes.append(changes)
            self._wake.notify_all()

    def stage(self, batch: StagedBatch) -> None:
        with self._wake:
            self._staged.append(batch)
            self._wake.notify_all()

    def rewrite(self) -> str:
        """Have all rows in a new generation and the old one unlinked, so that nothing of what was deleted is left; empty, or why not. Waits for it.

        Where disk or budget have no room for both, or nothing can be written to the old one, the new one is empty, and what is in memory is written anew.
        """
        return self._ask(self._rewrite)

    def begin_anew(self) -> str:
        """Have a store that can't be written give way to an empty one, and what is in memory written anew; empty, or why not. Waits for it."""
        return self._ask(self._begin_anew)

    def erase_others(self) -> str:
        """Have nothing left of other generations than the current one; empty, or why not. Waits for it."""
        return self._ask(self._erase_others)

    def _ask(self, work: Callable[[], str]) -> str:
        answer: queue.SimpleQueue[str] = queue.SimpleQueue()
        with self._wake:
            self._asked.append((work, answer))
            self._wake.notify_all()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=1.0)
        return "the store's thread has ended"

    def set_eager(self, eager: bool) -> None:
        """Whether somebody waits for durability: then what is staged is committed at once."""
        with self._wake:
            self._eager = eager
            self._wake.notify_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Store | None]:
        """The store, from any thread, beside the writes; None while there is none. It is not closed meanwhile, so keep this as short as a read transaction.

        A closed environment under a reader's view is a segmentation fault.
        """
        with self._reading:
            store = self._store
            self._num_readers += store is not None
        try:
            yield store
        finally:
            if store is not None:
                with self._reading:
                    self._num_readers -= 1
                    self._reading.notify_all()

    def stop(self, timeout_s: float) -> bool:
        """Finish what was handed over, commit, close the store; whether that was in time. Without a thread, because the start ended before, only close it."""
        if self._thread.ident is None:
            store = self._take_store()
            return store is None or store.close(timeout_s)
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        lower_io_priority()
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work, max(0.0, self._next_probe_s - time.monotonic()) if self._is_degraded else None)
                changes, staged = list(self._changes), list(self._staged)
                self._changes.clear()
                self._staged.clear()
                asked = list(self._asked)
                self._asked.clear()
                eager, stopping = self._eager, self._stopping
            if self._is_degraded:
                self._discard(staged)
                for work, answer in asked:
                    answer.put("the store's thread ends" if stopping else work())
                if stopping:
                    break
                if self._is_degraded and time.monotonic() >= self._next_probe_s:
                    self._probe()
                continue
            try:
                for change in changes:
                    self._apply(change)
                while staged:
                    self._write(staged[0])
                    self._staging.give_back(staged.pop(0).buffer)
                if self._txn is not None and (eager or stopping or any(change.commit for change in changes)):
                    self._commit()
            except Exception as error:
                self._degrade(error)
                self._discard(staged)
            for work, answer in asked:
                answer.put(work())
            if stopping:
                break
        store = self._take_store()
        if store is not None:
            with contextlib.suppress(Exception):
                store.close()

    def _rewrite(self) -> str:
        try:
            if self._txn is not None:
                self._commit()
        except Exception as error:
            self._degrade(error)
        if self._is_degraded:
            return self._begin_anew()
        store, generation = self._take_store(), self._generations.current.generation
        assert store is not None, "it is not degraded"
        try:
            fresh = self._generations.rewritten(store, self._commit_bytes, int(self._clock.unix()))
        except Exception as error:
            if self._generations.current.generation == generation:  # it stands
                with self._reading:
                    self._store = store
            else:
                with contextlib.suppress(Exception):
                    store.close()
            refused = isinstance(error, OSError) and is_passing(
                error
            )  # of a folder or of CURRENT: nothing is wrong with what was committed
            self._degrade(StoreBlockedError(fault_sentence(error)) if refused else error)
            return fault_sentence(error)
        if fresh is None:
            return self._replace_by_empty(store)
        with self._reading:
            self._store = fresh
        return ""

    def _begin_anew(self) -> str:
        if not self._is_degraded:
            return ""
        self._read_late = None
        return self._replace_by_empty(self._take_store())

    def _erase_others(self) -> str:
        try:
            self._generations.erase_others(keep_current=not self._is_lost)
        except Exception as error:
            return fault_sentence(error)
        return ""

    def _replace_by_empty(self, store: Store | None) -> str:
        """An empty generation in the place of ``store``, which nobody reads; empty, or why there is none yet."""
        try:
            fresh = self._generations.replaced_by_empty(store, int(self._clock.unix()))
        except Exception as error:
            self._degrade(StoreDamagedError(fault_sentence(error)))  # lost, whatever it was
            return fault_sentence(error)
        with self._reading:
            self._store = fresh
        self._applied_lsn = fresh.meta.applied_lsn
        self._is_degraded = self._is_lost = self._must_reopen = False
        self._epoch += 1
        self._on_result(
            Degraded("what is forgotten could not be left out of the store in its place: what stays is written anew", True, [], self._epoch)
        )
        self._on_result(Resumed())
        return ""

    def _take_store(self) -> Store | None:
        """The store, which nobody reads nor can come to read any more."""
        with self._reading:
            store, self._store = self._store, None
            self._reading.wait_for(lambda: self._num_readers == 0)
        return store

    def _has_work(self) -> bool:
        return bool(self._changes or self._staged or self._asked or self._stopping or (self._eager and self._txn is not None))

    def _apply(self, changes: Changes) -> None:
        if changes.epoch != self._epoch:
            return
        txn = self._transaction()
        failpoint_translated("checkpoint.before_nodes")
        for database, key in changes.dropped_keys:  # first: under the key of a damaged row a good one may follow
            txn.delete_key(database, key)
        self._generations.codec.prepare([namespace.tenant_salt for _, namespace in changes.namespaces if namespace is not None])
        for root, namespace in changes.namespaces:
            txn.put_namespace(namespace) if namespace is not None else txn.delete_namespace(root)
        for row in changes.nodes:
            with contextlib.suppress(NamespaceGoneError):  # it has been trimmed since: the next changes remove it
                txn.put_node(row)
        for block_hash in changes.removed_nodes:
            txn.delete_node(block_hash)
        for block_hash in changes.dropped_blocks:
            for group in self._groups:
                txn.delete_block(group.name, block_hash)
        for name, leaf in changes.pins:
            txn.put_pin(name, leaf) if leaf is not None else txn.delete_pin(name)
        self._number, self._applied_lsn, self._clean = changes.number, changes.applied_lsn, changes.clean
        failpoint_translated("checkpoint.before_blocks")

    def _write(self, batch: StagedBatch) -> None:
        for index, block_hash in enumerate(batch.block_hashes):
            txn = self._transaction()
            try:
                for group in self._groups:
                    row = batch.buffer.rows(group.name, 1, index)
                    self._generations.codec.write_block(self._values[group.name], group, block_hash, batch.roots[index], row)
            except NamespaceGoneError:
                self._on_result(Discarded([block_hash]))
                continue
            for group in self._groups:
                txn.put_block(group.name, block_hash, self._values[group.name])
            self._txn_hashes.append(block_hash)
            failpoint_translated("checkpoint.between_blocks")
            if txn.num_bytes >= self._commit_bytes:
                self._commit()

    def _transaction(self) -> StoreTransaction:
        if self._store is None:
            raise StoreDamagedError("no store is open")
        if self._txn is None:
            self._txn = self._store.begin()
            self._txn_began_s = self._clock.monotonic()
        return self._txn

    def _commit(self) -> None:
        txn, store = self._transaction(), self._store
        assert store is not None
        began_s = self._clock.monotonic()
        meta = replace(store.meta, applied_lsn=self._applied_lsn, clean=self._clean, written_unix_s=int(self._clock.unix()))
        txn.put_meta(meta)
        txn.commit()
        self._txn = None
        try:
            has_room = store.disk_has_room(self._commit_bytes)
        except OSError:  # what was committed is good, whatever this is
            has_room = False
        if txn.num_bytes or has_room:  # rows of nodes fit even on a full disk: only blocks show that the fault is over
            self._retry_s = _RETRY_MIN_S
        hashes, self._txn_hashes = self._txn_hashes, []
        self._on_result(Committed(hashes, txn.num_bytes, self._number, self._applied_lsn, self._clock.monotonic() - began_s, has_room))

    # -------------------------------------------------------------------------------- faults

    def _discard(self, staged: list[StagedBatch]) -> None:
        for batch in staged:
            self._staging.give_back(batch.buffer)
            self._on_result(Discarded(list(batch.block_hashes)))

    def _degrade(self, error: Exception) -> None:
        self._abort()
        hashes, self._txn_hashes = self._txn_hashes, []
        self._is_degraded = True
        self._epoch += 1
        self._next_probe_s = time.monotonic() + self._retry_s
        lost = not isinstance(error, StoreBlockedError)
        if lost:
            self._read_late = None
            store = self._take_store()
            self._is_lost = True
            with contextlib.suppress(Exception):  # what can't be closed or moved now is moved or removed before the next generation is made
                if store is not None:
                    store.close()
                self._generations.set_aside()
        store = self._store
        self._applied_lsn = store.meta.applied_lsn if store is not None else 0
        self._tell(error, lost=lost, hashes=hashes)

    def _tell(self, error: Exception, *, lost: bool = False, hashes: list[BlockHash] | None = None) -> None:
        reason = str(error) if isinstance(error, StorageError) else fault_sentence(error)
        self._on_result(Degraded(reason, lost, hashes or [], self._epoch))

    def _abort(self) -> None:
        txn, self._txn = self._txn, None
        if txn is not None:
            with contextlib.suppress(Exception):  # a panicked environment refuses even this
                txn.abort()

    def _probe(self) -> None:
        """Try whether the disk takes writes again; the next try comes after twice the time."""
        self._retry_s = min(self._retry_s * 2, _RETRY_MAX_S)
        self._next_probe_s = time.monotonic() + self._retry_s
        try:
            store = self._writable_store()
            self._txn = store.begin()
            self._txn.put_meta(replace(store.meta, written_unix_s=int(self._clock.unix())))
            self._txn.commit()
            late = self._read_late(store) if self._read_late is not None else None
        except StoreMapFullError as error:
            # Not even one row fits: nothing can be removed either, and only a fresh generation helps.
            self._degrade(StoreDamagedError(str(error)))
        except (
            StorePanickedError
        ):  # lmdb could not write its last page: what was committed before is whole, and is read from the file again
            self._abort()
            self._must_reopen = True
        except Exception as error:
            self._abort()
            if self._is_lost or isinstance(error, StoreBlockedError):
                self._tell(error)
            else:
                self._degrade(error)
        else:
            self._txn = self._read_late = None
            self._is_degraded = False
            self._on_result(Resumed(late))

    def _writable_store(self) -> Store:
        """The store that is open, the same one opened again if it could not be written, or a fresh one if it was given up.

        Raises:
            StorageError, OSError: none can be written yet.
        """
        store = self._store
        if store is not None and not (store.readonly or self._must_reopen):
            return store
        store = self._take_store()
        if store is not None:
            store.close()
        store = self._generations.create_fresh(int(self._clock.unix())) if self._is_lost else self._generations.reopen()
        self._is_lost = self._must_reopen = False
        self._applied_lsn = store.meta.applied_lsn
        with self._reading:
            self._store = store
        if store.readonly:
            raise StoreBlockedError(store.blocked_by)
        return store
