"""The storage room's front: what the daemon and the engine loop talk to. Implements the engine's ``CacheObserver`` and hands out its ``RecipeBook``.

Life: ``lock`` (takes the state directory) → ``open`` (recipes, store, log) → ``rehydrate`` (blocks into the pool; then the threads run) → ``on_step`` and the
rest, from the engine thread → ``shutdown_checkpoint`` → ``close``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import structlog

from kvd.cache.events import CacheEvent
from kvd.cache.hashing import Namespace
from kvd.cache.tenants import Selection
from kvd.commands import CheckpointDone, Recipe, Submit
from kvd.config import StorageConfig
from kvd.storage.budget import plan_budget, quarantine_max_bytes, recipes_max_bytes
from kvd.storage.cold_tier import ColdTier
from kvd.storage.copy_out import IDLE_S, POLL_S
from kvd.storage.encryption import Encryption, master_key_of, open_encryption
from kvd.storage.forgetting import Forgetting
from kvd.storage.keys import KeyRing
from kvd.storage.lock import StateLock
from kvd.storage.node_index import IndexNode
from kvd.storage.ports import BlockIO, Clock, Leases, Log, RehydrationCache, StorageInbox
from kvd.storage.recipes import RecipeStore
from kvd.storage.recovery import adopt_recipes, keep_budget, recover
from kvd.storage.rehydrate import Loaded, Rehydration, choose, mark_unreachable, recompute_candidates, with_room
from kvd.storage.rehydration_report import RehydrationReport
from kvd.storage.running import Running, assemble
from kvd.storage.running_report import running_stats, running_status
from kvd.storage.start_gate import StartGate
from kvd.storage.start_guard import STABLE_AFTER_S, StartGuard, StartVerdict
from kvd.types import TOKEN_BYTES, BlockHash, KvGroup, SamplingParams
from kvd.wal.durable import keep_private, make_directory
from kvd.wal.quarantine import QUARANTINE_NAME, bound
from kvd.wal.record import Forget

_STOP_S = 10.0


class Storage:
    """Made by ``lock``. Unless said otherwise, the engine thread's alone."""

    def __init__(
        self, config: StorageConfig, lock: StateLock, guard: StartGuard, encryption: Encryption, *, clock: Clock, log: Log
    ) -> None:
        self._config = config
        self._lock = lock
        self._guard = guard
        self._encryption = encryption
        self._clock = clock
        self._log = log
        self._recipes: RecipeStore | None = None
        self._running: Running | None = None
        self._inbox: StorageInbox | None = None
        self._fingerprint = b""
        self._groups: tuple[KvGroup, ...] = ()
        self._verdict = StartVerdict(guard, log)
        self._is_ready = False
        self._pin_chains: list[tuple[str, list[BlockHash]]] = []
        self._forgetting: Forgetting | None = None
        self._start_gate = StartGate(self._let_go)

    # -------------------------------------------------------------------------------- start

    @classmethod
    def lock(cls, config: StorageConfig, *, clock: Clock, log: Log | None = None) -> Storage:
        """Take the state directory, making it if need be, and its encryption keys.

        Raises:
            StateLockedError: another process holds it.
            EncryptionKeyError: the key is missing or wrong, or the keys can't be read; nothing was touched.
            ConfigError: the package for encryption is not installed.
            OSError: it can't be made or written.
        """
        log = log or structlog.get_logger("storage")
        master_key = master_key_of(config.store_encryption_key_file)
        make_directory(config.state_dir)
        lock = StateLock(config.state_dir)
        try:
            keep_private(config.state_dir)
            encryption = open_encryption(config.state_dir, master_key, log)
            guard = StartGuard(config.state_dir)
        except BaseException:
            lock.release()
            raise
        if guard.fault:
            log.error("storage.not_writable", reason=guard.fault)
        return cls(config, lock, guard, encryption, clock=clock, log=log)

    @property
    def keys(self) -> KeyRing | None:
        """The encryption keys of the tenants; None: what is stored stands in clear."""
        return self._encryption.ring

    @property
    def running(self) -> Running | None:
        """What works on the store's behalf; None where nothing is persisted."""
        return self._running

    @property
    def fingerprint_cache(self) -> Path:
        """Where the executor may remember digests of weight files."""
        return self._config.state_dir / "fingerprints"

    @property
    def recipe_book(self) -> RecipeStore:
        assert self._recipes is not None, "open comes first"
        return self._recipes

    @property
    def failed_starts(self) -> int:
        """Starts before this one whose process died before READY or within ten seconds of it."""
        return self._guard.failed_starts

    def open(
        self,
        *,
        namespace_fingerprint: bytes,
        groups: Sequence[KvGroup],
        inbox: StorageInbox,
        leases: Leases,
        block_io: BlockIO,
        block_size_tokens: int = 16,
    ) -> None:
        """Read what is there. Damage is set aside and logged, never raised.

        Raises:
            RecipesUnreadableError: the pins can't be read.
            UnknownFormatError: something was written by another version.
            OSError: the directory can't be written.
            StorageClosedError: after ``close``.
        """
        self._fingerprint = namespace_fingerprint
        self._groups = tuple(groups)
        self._inbox = inbox
        with self._start_gate.under_way():
            self._open(leases, block_io, block_size_tokens, inbox)

    def _open(self, leases: Leases, block_io: BlockIO, block_size_tokens: int, inbox: StorageInbox) -> None:
        namespace_fingerprint = self._fingerprint
        total_bytes = self._config.store_max_bytes
        codec, ring = self._encryption.codec, self._encryption.ring
        self._recipes = RecipeStore(
            self._config.state_dir,
            inbox=inbox,
            log=self._log,
            codec=codec,
            max_bytes=recipes_max_bytes(total_bytes),
            unsynced_max_s=self._config.unsynced_max_s,
        )
        with contextlib.suppress(OSError):  # on a disk that can't be written
            bound(self._config.state_dir / QUARANTINE_NAME, quarantine_max_bytes(total_bytes))
        block_bytes = block_size_tokens * TOKEN_BYTES
        forgetting = self._forgetting = Forgetting(
            self._config.state_dir,
            self,
            recipes=self._recipes,
            inbox=inbox,
            log=self._log,
            fingerprint=namespace_fingerprint,
            block_bytes=block_bytes,
            codec=codec,
        )
        if not self._config.persist:
            return
        budget = plan_budget(self._config, self._groups, codec, recipes_bytes=self._recipes.file_bytes)
        recovered = recover(
            self._config.state_dir,
            budget,
            self._groups,
            set_store_aside=self._guard.set_store_aside,
            now_unix_s=int(self._clock.unix()),
            uses_half_life_s=self._config.uses_half_life_s,
            codec=codec,
        )
        for mark in forgetting.unfinished:
            recovered.index.forget(mark)
        num_foreign = recovered.index.collect_namespaces(namespace_fingerprint)
        now_unix_s = self._clock.unix()
        recipes = {name: recipe for name, recipe in self._recipes.recipes().items() if not recipe.has_expired(now_unix_s)}
        chains = adopt_recipes(recovered.index, recipes, namespace_fingerprint, block_bytes)
        if ring is not None and recovered.store is not None:
            self._drop_unused_keys(ring, recovered.index.namespaces.values(), recipes.values())
        names = [recipe.name for recipe in sorted(recipes.values(), key=lambda each: (-each.priority, each.created_unix_s))]
        self._pin_chains = list(zip(names, chains, strict=True))
        keep_budget(recovered, budget, self._groups, now_unix_s=int(self._clock.unix()))
        for damage in recovered.damage:
            self._log.warning("storage.damage", what=damage)
        self._log.info(
            "storage.opened",
            generation=recovered.generations.current.generation,
            nodes=len(recovered.index.nodes),
            blocks=recovered.index.num_stored,
            bytes=recovered.index.stored_bytes,
            replayed=recovered.log.num_records,
            torn_bytes=recovered.log.torn_bytes,
            bad_rows=recovered.num_bad_rows,
            foreign_nodes=num_foreign,
            degraded=recovered.store_error,
        )
        self._running = assemble(
            self._config,
            recovered,
            budget,
            groups=self._groups,
            block_size_tokens=block_size_tokens,
            inbox=inbox,
            leases=leases,
            block_io=block_io,
            clock=self._clock,
            log=self._log,
        )

    def _drop_unused_keys(self, ring: KeyRing, namespaces: Iterable[Namespace], recipes: Iterable[Recipe]) -> None:
        """Nothing is left on disk of a tenant that neither a namespace nor a pin names."""
        try:
            ring.retain({each.tenant_salt for each in namespaces} | {each.tenant_salt for each in recipes})
        except OSError as error:  # they are few bytes, and the next start tries again
            self._log.warning("storage.unused_keys_stay", error=str(error))

    def rehydrate(
        self, cache: RehydrationCache, block_io: BlockIO, deadline_s: float, progress: Callable[[int, int], None]
    ) -> RehydrationReport:
        """Load the most valuable blocks into the pool until ``deadline_s`` (monotonic), then start the threads.

        Needs only the pool: the weights may be loading meanwhile. Direct calls of the cache are fine, the loop does not run yet.

        Raises:
            StorageClosedError: ``close`` was called.
        """
        with self._start_gate.under_way():
            return self._rehydrate(cache, block_io, deadline_s, progress)

    def _rehydrate(
        self, cache: RehydrationCache, block_io: BlockIO, deadline_s: float, progress: Callable[[int, int], None]
    ) -> RehydrationReport:
        running = self._running
        recompute_pins = not self._guard.skip_pins
        if running is None:
            self._open_forgetting.start()
            names = tuple(self.recipe_book.recipes())
            return RehydrationReport(
                pins_pending=names,
                recompute_pins=recompute_pins,
                failed_starts=self.failed_starts,
                failed_computations=self._guard.failed_computations,
            )
        started_s = time.monotonic()
        index = running.recovered.index
        max_blocks = int(cache.num_blocks * self._config.rehydrate_max_fraction)
        loaded = self._load(running, cache=cache, block_io=block_io, deadline_s=deadline_s, max_blocks=max_blocks, progress=progress)
        for node in loaded.bad:
            index.drop_bytes(node)
        for start in range(0, len(loaded.bad), 1024):
            running.wal.append(Forget(tuple(node.block_hash for node in loaded.bad[start : start + 1024])))
        if loaded.dropped:
            self._log.warning("rehydrate.dropped", **loaded.dropped)
        if loaded.store_error:
            self._log.error("rehydrate.store_failed", error=loaded.store_error)
        room = max(0, max_blocks - loaded.num_blocks)
        reachable = mark_unreachable(index)
        chains = recompute_candidates(index, reachable, loaded.in_memory, room) if recompute_pins else []
        pending = tuple(name for name, chain in self._pin_chains if not all(key in loaded.in_memory for key in chain))
        self._start_gate.check()
        running.store.start()
        lost = running.recovered.store is None and not running.recovered.is_unread
        running.planner.start(running.store, degraded_reason=running.recovered.store_error, generation_lost=lost)
        if running.cold_tier is not None:
            running.cold_tier.start(loaded.num_bytes, time.monotonic() - started_s)
        self._open_forgetting.start()
        return RehydrationReport(
            num_blocks=loaded.num_blocks,
            num_tokens=loaded.num_tokens,
            num_bytes=loaded.num_bytes,
            seconds=time.monotonic() - started_s,
            dropped=loaded.dropped,
            pins_pending=pending,
            recompute_pins=recompute_pins,
            recompute=tuple(self._submit(running, chain) for chain in chains),
            failed_starts=self.failed_starts,
            failed_computations=self._guard.failed_computations,
        )

    def _load(
        self,
        running: Running,
        *,
        cache: RehydrationCache,
        block_io: BlockIO,
        deadline_s: float,
        max_blocks: int,
        progress: Callable[[int, int], None],
    ) -> Loaded:
        store = running.recovered.store
        if store is None:
            return Loaded()
        pinned = with_room([chain for _, chain in self._pin_chains], cache.max_pinned_blocks)
        chains = choose(running.recovered.index, pinned, max_blocks)
        work = Rehydration(
            index=running.recovered.index,
            store=store,
            cache=cache,
            block_io=block_io,
            groups=self._groups,
            staging=running.staging,
            clock=self._clock,
            deadline_s=deadline_s,
        )
        return work.run(chains, progress)

    def _submit(self, running: Running, chain: Sequence[IndexNode]) -> Submit:
        namespace = running.recovered.index.namespaces[chain[0].root]
        return Submit(
            request_id=os.urandom(16),
            token_ids=b"".join(node.token_ids for node in chain),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=1,
            credit_tokens=1,
            tenant_salt=namespace.tenant_salt,
            adapter=namespace.adapter_digest,
        )

    def mark_ready(self) -> None:
        """READY: unless the process dies within ten seconds, and before it has served a request, this start counts as good."""
        self._is_ready = True
        self._verdict.good_in(STABLE_AFTER_S)

    def mark_served(self) -> None:
        """A client's request was finished: this start counts as good from now on."""
        self._verdict.good_in(0.0)

    def mark_engine_error(self) -> None:
        """The executor raised. If that was before READY, it was over what this start computed, and the next one would compute it again."""
        if not self._is_ready:
            self._guard.note_failed_computation()

    # -------------------------------------------------------------------------------- while the engine runs

    def on_step(self, step: int, events: Sequence[CacheEvent]) -> None:
        """Take a step's events; end the leases of finished copies and begin a new one. Never waits."""
        running = self._running
        if running is None:
            return
        if events:
            running.planner.observe(events)
        running.governor.on_step(step)
        running.copy_out.poll()
        if running.cold_tier is not None:
            running.cold_tier.poll()

    @property
    def cold_tier(self) -> ColdTier | None:
        """What is on disk and not in memory, for the scheduler; None if nothing is to be read while the engine runs."""
        return self._running.cold_tier if self._running is not None else None

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts."""
        if self.cold_tier is not None:
            self.cold_tier.note_prefill(num_tokens, seconds)

    def set_queue_depth(self, num_waiting: int) -> None:
        """How many requests wait: the governor pauses copies above its threshold."""
        if self._running is not None:
            self._running.governor.queue_depth = num_waiting

    def idle_delay_s(self) -> float:
        """Seconds after which ``on_step`` wants to be called again though no step runs."""
        running = self._running
        if running is None:
            return IDLE_S
        cold_s = running.cold_tier.idle_delay_s() if running.cold_tier is not None else IDLE_S
        return POLL_S if running.planner.is_busy else min(cold_s, running.copy_out.idle_delay_s())

    def checkpoint_now(self, op_id: bytes) -> None:
        """Persist every hot block; ``CheckpointDone`` comes through the inbox."""
        running = self._running
        if running is not None and running.planner.is_alive:
            running.planner.request_checkpoint(op_id)
        elif self._inbox is not None:
            error = "nothing is persisted (persist = false)" if running is None else "persistence has stopped"
            self._inbox.put_internal(CheckpointDone(op_id, error=error))

    def forget(self, op_id: bytes, selection: Selection, pins: dict[str, Recipe]) -> None:
        """Have a selection, which has left memory, leave the disk for good; ``ForgetDone`` comes through the inbox. ``pins`` are in it."""
        self._open_forgetting.request(op_id, selection, pins)

    def is_forgetting(self, recipe: Recipe) -> bool:
        """Whether a forget that was begun, by this life or an earlier one, and is not done would take this pin too."""
        return self._open_forgetting.takes(recipe)

    @property
    def may_forget(self) -> bool:
        """Whether there is room for another forget beside those that are not done."""
        return self._open_forgetting.has_room

    @property
    def _open_forgetting(self) -> Forgetting:
        assert self._forgetting is not None, "open comes first"
        return self._forgetting

    def block_on_disk(self, block_hash: BlockHash) -> tuple[bool, float]:
        """Whether a block's bytes are on disk, and when a request last used it (seconds since the epoch, 0 if unknown).

        A glance at the planner's index from another thread: single look-ups, no iteration.
        """
        node = None if self._running is None else self._running.recovered.index.nodes.get(block_hash)
        return (False, 0.0) if node is None else (node.stored_bytes > 0, float(node.last_use_unix_s))

    def status(self) -> dict[str, Any]:
        """The ``store`` part of the status report."""
        ring, recipes = self._encryption.ring, self._recipes
        fault = self._guard.fault or (recipes.fault if recipes is not None else "") or (ring.fault if ring is not None else "")
        return running_status(
            self._running,
            self._config,
            is_encrypted=ring is not None,
            fault=fault,
            damage=self._damage(),
            failed_starts=self.failed_starts,
            now_s=self._clock.monotonic(),
        )

    def _damage(self) -> list[str]:
        """What this start found damaged and set aside, as sentences."""
        notes = list(self._recipes.notes) if self._recipes is not None else []
        notes += self.keys.notes if self.keys is not None else ()
        return notes + (self._running.recovered.damage if self._running is not None else [])

    def stats(self) -> dict[str, Any]:
        """Counters of log and checkpoints for the stats report."""
        return running_stats(self._running) if self._running is not None else {}

    # -------------------------------------------------------------------------------- end

    def shutdown_checkpoint(self, deadline_s: float) -> bool:
        """Persist everything that is ready in the tree, the hottest first, until ``deadline_s`` (monotonic); whether all of it is durable.

        On the engine thread after the loop ended, while the executor still works.
        """
        running = self._running
        if running is None or not running.planner.is_alive:
            return False
        running.planner.request_final()
        while not running.planner.final_done.wait(POLL_S):
            if self._clock.monotonic() >= deadline_s or not running.planner.is_alive:
                return False
            running.copy_out.poll()
        return not running.planner.degraded_reason

    def close(self, *, clean: bool) -> None:
        """End the threads and let go of the state directory. While one still hangs on its disk the lock stays: it goes with the process.

        ``clean`` says that the daemon ended as it should, so that its start was a good one; if not, the start counts neither as good nor as one that died.
        While another thread is inside ``open`` or ``rehydrate``, nothing is touched under it: that thread lets go at the end of these.
        """
        if self._start_gate.leave(lambda: self._verdict.end(clean=clean)):
            return
        is_over = self._end_threads()
        self._verdict.end(clean=clean)
        if is_over:
            self._lock.release()

    def _let_go(self) -> None:
        if self._end_threads():
            self._lock.release()

    def _end_threads(self) -> bool:
        """Whether all of them have ended, and the store is closed."""
        is_over = self._forgetting is None or self._forgetting.stop(_STOP_S)
        running = self._running
        if running is not None:
            # each knows whether it was started: the start may have ended between two of them
            if running.cold_tier is not None:
                running.cold_tier.stop(_STOP_S)
            running.planner.stop(_STOP_S)
            is_over = running.store.stop(_STOP_S) and is_over
            running.wal.close(_STOP_S)
            is_over = is_over and not running.wal.is_alive
        if self._recipes is not None:
            is_over = self._recipes.close(_STOP_S) and is_over
        return is_over
