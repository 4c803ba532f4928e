"""Composition root: the only module that knows every room. Order of the start, drain, and what the service manager is told.

The start, each step only after the one before (docs/architecture.md, "Start"): state directory and lock, endpoints, pool and fingerprint, store and
log, then weights and rehydration side by side, warm-up, and the engine loop on this very thread until the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from kvd.adapter_opening import open_adapters
from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager, eviction_policy
from kvd.commands import Hello, Recipe, Snapshot, Stopped
from kvd.config import ConfigError, DaemonConfig
from kvd.constraint_opening import open_constraints, preparation
from kvd.engine.adapters import Adapters
from kvd.engine.clock import SystemClock
from kvd.engine.loading import Loading, StartThread
from kvd.engine.loop import EngineLoop, LoopEnd, StartWork, State
from kvd.engine.pins import Pins
from kvd.engine.reports import Reports, StartFacts, starting_report
from kvd.engine.service_manager import ServiceManager
from kvd.engine.start_progress import StartProgress
from kvd.executor.adapter_store import AdapterStore
from kvd.executor.head_start import HeadStart
from kvd.executor.models.spec import ModelSpec
from kvd.frontend import Frontend, start_frontend
from kvd.grammar.compiler import GrammarCompiler
from kvd.model_opening import OpenEngine, begin_opening, describe_model, open_engine
from kvd.observe.notify import Notifier
from kvd.observe.process_age import process_age_s
from kvd.observe.progress import Progress
from kvd.pin_rendering import current_recipes, known_ids
from kvd.scheduler.scheduler import Scheduler
from kvd.storage.errors import (
    state_dir_errors,
)
from kvd.storage.persistence import Storage
from kvd.storage.rehydration_report import RehydrationReport
from kvd.text.model import BYTES, SharedTextModel, TextModel
from kvd.transport.inproc import InprocInbox, InprocOutbox

EXIT_OK = 0
EXIT_SOFTWARE = 70

_FRONTEND_STOP_S = 5.0
_STORE_STOP_S = 2.0
"""How long a stop waits for the log that is replayed or the batch of blocks that is under way: the start ends there. What takes longer is left behind: it closes the store
at its end, or goes with the process."""
_MIN_FLUSH_S = 2.0
"""How long clients may take to read what they are owed, or what is left of the drain if that is more."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Restored:
    report: RehydrationReport
    recipes: dict[str, Recipe]
    pins_not_computed: dict[str, str]


class StopDuringStart(BaseException):
    """A stop or the edge's end was seen before the engine loop ran; not an Exception, so that no boundary on the way swallows it."""


class Daemon:
    """One daemon in this process: it runs on the thread that calls ``run``, and leaves the process as it is. Single use."""

    def __init__(
        self, config: DaemonConfig, *, open_edge: Callable[..., Frontend] = start_frontend, notifier: Notifier | None = None
    ) -> None:
        """``open_edge`` is called as ``start_frontend`` is; ``notifier`` tells a service manager, without it none is told."""
        self._config = config
        self._open_edge = open_edge
        self._clock = SystemClock()
        self._manager = ServiceManager(self._clock, notifier or Notifier())
        self._log = structlog.get_logger("daemon")
        self._inbox = InprocInbox(config.engine.inbox_capacity)
        self._outbox = InprocOutbox()
        self._instance = os.urandom(16)
        self._text = SharedTextModel(BYTES if config.model.executor == "fake" else config.model.model)
        self._facts = StartFacts(
            model=Path(config.model.model).name or config.model.executor,
            fingerprint="",
            instance=self._instance.hex(),
            started_monotonic_s=self._clock.monotonic(),
        )
        self._loop: EngineLoop | None = None
        self._engine: OpenEngine | None = None
        self._threads: list[StartThread[Any]] = []
        self._opening_store: StartThread[None] | None = None
        self._restoring: StartThread[StartWork] | None = None
        self._grammar: GrammarCompiler | None = None
        self._adapter_store: AdapterStore | None = None
        self._head_start = HeadStart()
        self._progress = StartProgress(self._manager.progress, lambda: self._publish(State.REHYDRATING), self._clock)
        self._num_stops = 0
        self._failure = ""

    @property
    def is_loading(self) -> bool:
        """Whether a thread that loads runs, even after ``run``: then the process must not end in the interpreter's own way."""
        # over the list itself, not a copy: what a thread that has just ended had begun stands behind it, and is asked after it
        if any(thread.is_running for thread in self._threads):
            return True
        return (self._grammar is not None and self._grammar.is_running) or self._head_start.is_running

    def run(self) -> int:
        """From the start to the end; the exit code (docs/operations.md, "Exit codes")."""
        frontend: Frontend | None = None
        storage: Storage | None = None
        clean = False
        try:
            self._facts.startup["imports"] = round(process_age_s(), 3)
            with state_dir_errors(self._config.storage.state_dir):
                storage = Storage.lock(self._config.storage, clock=self._clock)
            spec = self._beside(StartThread("kvd-describing", self._begin_opening))
            started = self._clock.monotonic()
            frontend = self._start_frontend()
            self._facts.startup["edge"] = self._since(started)
            engine = self._beside(StartThread("kvd-opening", partial(self._open, storage, spec)))
            end = self._serve(storage, engine)
            if end is LoopEnd.ENGINE_ERROR:
                storage.mark_engine_error()
            if end is LoopEnd.DRAINED and not self._failure:
                self._manager.on_last_checkpoint(self._config.engine.drain_timeout_s)
                storage.shutdown_checkpoint(self._clock.monotonic() + self._config.engine.drain_timeout_s)
                clean = True
        except BaseException:
            if self._loop is not None or not self._is_ending:
                raise  # else a stop or the edge has ended the start: a terminal's Ctrl-C ends the edge's process too, which then fails
            self._manager.on_state(State.DRAINING, "stopped during the start")
            if not self._failure:
                self._log.info("stopped_during_start")
                clean = True
        finally:
            flush_s = max(_MIN_FLUSH_S, self._loop.drain_left_s if self._loop is not None else 0.0)
            self._outbox.put([Stopped(flush_s)])
            if frontend is not None:
                frontend.stop(flush_s + _FRONTEND_STOP_S)
            self._head_start.discard()
            for thread in (self._opening_store, self._restoring):
                if thread is not None:
                    thread.wait(_STORE_STOP_S)  # left behind if the disk hangs
            if self._grammar is not None:
                self._grammar.close()
            if self._adapter_store is not None:
                self._adapter_store.close()
            if self._engine is not None:
                self._engine.executor.close(_FRONTEND_STOP_S)
            if storage is not None:
                storage.close(clean=clean)
        self._log.info("stopped", clean=clean)
        if self._failure and not clean:
            self._load_text()  # if the model is what the edge failed for, that is what to say
        return EXIT_OK if clean else EXIT_SOFTWARE

    def request_stop(self) -> None:
        """End: what runs may finish, for as long as a drain may take. Any thread, also before ``run``.

        A start ends within moments, whatever it loads or computes; but while it takes the state directory or brings up the edge, only after that.
        """
        self._num_stops += 1
        if self._loop is not None:
            self._loop.request_drain()

    # -------------------------------------------------------------------------------- start

    def _beside(self, thread: StartThread[T]) -> T:
        """What the thread's work returns. Whatever that is in, a stop or the edge's end ends the start at once, and leaves it behind."""
        self._begin(thread)
        return thread.finish(self._end_if_stopped)

    def _begin(self, thread: StartThread[Any]) -> None:
        self._threads.append(thread)
        thread.start()

    def _begin_opening(self) -> ModelSpec | None:
        spec = describe_model(self._config.model)
        self._head_start = begin_opening(self._config, spec)
        if self._is_ending:  # nobody waits for this thread any more
            self._head_start.discard()
        return spec

    def _open(self, storage: Storage, spec: ModelSpec | None) -> OpenEngine:
        self._engine = self._open_engine(storage, spec)
        if self._is_ending:  # nobody waits for this thread any more
            self._engine.executor.close()
        return self._engine

    def _start_frontend(self) -> Frontend:
        config = self._config
        self._publish(State.STARTING)
        frontend = self._open_edge(
            config.transport,
            text_source=self._text.source,
            inbox=self._inbox,
            outbox=self._outbox,
            instance=self._instance,
            observe=config.observe,
            on_failure=self._on_frontend_failure,
            drain_timeout_s=config.engine.drain_timeout_s,
            load_text=self._text.load,
        )
        self._log.info("listening", endpoints=list(frontend.endpoints), pid=os.getpid(), state="starting")
        self._manager.progress("starting")
        return frontend

    def _load_text(self) -> TextModel:
        """The text side, which the edge has too.

        Raises:
            TextError: the model's tokenizer or template can't be used.
            ConfigError: it can't be read.
        """
        try:
            return self._text.load()
        except OSError as error:
            raise ConfigError(f"model = {self._text.source}: {error.strerror}: {error.filename or self._text.source}") from error

    def _open_engine(self, storage: Storage, spec: ModelSpec | None) -> OpenEngine:
        engine = open_engine(self._config, spec, storage.fingerprint_cache, self._head_start)
        self._facts.fingerprint = engine.fingerprint.hex()
        self._facts.kernels = str(engine.facts["kernels"])
        self._facts.draft = engine.draft
        self._log.info(
            "kernels",
            kernels=self._facts.kernels,
            **({"draft_model": engine.draft["model"], "draft_kernels": engine.draft["kernels"]} if engine.draft else {}),
        )
        reason = engine.facts.get("why_torch")
        if reason and engine.facts["device"] == "cpu" and self._config.model.kernels != "torch":
            self._log.warning("torch_computes", reason=reason)
        return engine

    def _serve(self, storage: Storage, engine: OpenEngine) -> LoopEnd:
        config = self._config
        cache = CacheManager(
            num_blocks=engine.num_blocks,
            block_size_tokens=config.cache.block_size_tokens,
            free_watermark=config.cache.free_watermark,
            max_pinned_fraction=config.cache.max_pinned_fraction,
            policy=eviction_policy(config.cache.eviction_policy, engine.num_blocks, config.cache.block_size_tokens),
        )
        self._opening_store = StartThread("kvd-store-opening", partial(self._open_store, storage, engine, cache))
        self._beside(self._opening_store)
        self._adapter_store = open_adapters(config.adapters, engine.adapters, engine.executor, self._inbox)
        self._grammar = open_constraints(config, engine.vocab_size, self._text.load, self._inbox, self._clock.monotonic)
        self._restoring = StartThread("kvd-restoring", partial(self._restore, storage, engine, cache))
        work = self._beside(self._restoring)
        fingerprint = engine.fingerprint
        # A sequence that fills the whole pool is the longest that can ever run.
        max_model_len = min(engine.max_model_len, engine.num_blocks * config.cache.block_size_tokens)

        def namespace_of(tenant_salt: bytes, adapter: bytes) -> Namespace:
            return Namespace(fingerprint, tenant_salt, adapter)

        scheduler = Scheduler(
            config.scheduler,
            cache,
            self._clock,
            namespace_of=namespace_of,
            max_model_len=max_model_len,
            shared_tile_tokens=engine.shared_tile_tokens,
            cold_tier=storage.cold_tier,
            constraint_compiler=self._grammar,
            speculative=config.speculative,
            has_draft_model=bool(engine.draft),
            masks_may_be_late=True,
        )
        adapters = Adapters(
            scheduler=scheduler,
            source=self._adapter_store,
            clock=self._clock,
            max_adapters=config.adapters.max_adapters,
            max_waiting=config.scheduler.max_waiting,
        )
        pins = Pins(cache=cache, adapters=adapters, recipes=storage.recipe_book, observer=storage, namespace_of=namespace_of)
        reports = Reports(
            facts=self._facts,
            scheduler=scheduler,
            cache=cache,
            observer=storage,
            pins=pins,
            adapters=adapters,
            clock=self._clock,
            executor_stats=lambda: engine.facts,
        )
        self._outbox.put(
            [
                Hello(
                    self._instance,
                    engine.model,
                    engine.fingerprint,
                    engine.vocab_size,
                    max_model_len,
                    config.cache.block_size_tokens,
                    min(config.scheduler.max_choices, config.scheduler.max_running),
                    engine.max_model_len if max_model_len < engine.max_model_len else 0,
                )
            ]
        )
        self._loop = EngineLoop(
            inbox=self._inbox,
            outbox=self._outbox,
            scheduler=scheduler,
            cache=cache,
            executor=engine.executor,
            observer=storage,
            pins=pins,
            adapters=adapters,
            reports=reports,
            clock=self._clock,
            max_steps_in_flight=config.engine.max_steps_in_flight or engine.max_steps_in_flight,
            drain_timeout_s=config.engine.drain_timeout_s,
            log_steps=config.observe.log_steps,
            on_progress=self._manager.on_round,
            on_state=lambda state: self._on_state(state, storage),
            on_served=storage.mark_served,
        )
        if self._is_ending:  # since it was last looked at
            self._loop.request_drain()
        self._before_loop()
        return self._loop.run(work)

    def _open_store(self, storage: Storage, engine: OpenEngine, cache: CacheManager) -> None:
        started = self._clock.monotonic()
        with state_dir_errors(self._config.storage.state_dir):
            storage.open(
                namespace_fingerprint=engine.fingerprint,
                groups=engine.executor.groups(),
                inbox=self._inbox,
                leases=cache,
                block_io=engine.executor,
                block_size_tokens=self._config.cache.block_size_tokens,
            )
        self._facts.startup["store_open"] = self._since(started)

    def _restore(self, storage: Storage, engine: OpenEngine, cache: CacheManager) -> StartWork:
        """Weights and blocks side by side; then the warm-up. What is left of the start is the loop's."""
        config = self._config
        started = self._clock.monotonic()
        loading = Loading(engine.load, self._on_weights)
        self._begin(loading)
        preparing = preparation(self._grammar, self._log)
        self._begin(preparing)
        self._publish(State.REHYDRATING)
        deadline_s = started + config.storage.rehydrate_timeout_s
        restored = self._bring_back(storage, engine, cache, started, deadline_s)
        waited = self._clock.monotonic()
        loading.finish(self._end_if_stopped)
        preparing.finish(self._end_if_stopped)
        self._facts.startup["wait_for_weights"] = self._since(waited)
        self._facts.startup |= {name: round(seconds, 3) for name, seconds in engine.times.items()}
        self._log.info("rehydrated", **restored.report.as_dict())
        now = self._clock.monotonic()
        return StartWork(
            recipes=restored.recipes,
            pins_not_computed=restored.pins_not_computed,
            recompute=known_ids(restored.report.recompute, engine.vocab_size, self._log),
            pins_deadline_s=deadline_s,
            recompute_deadline_s=min(deadline_s, now + config.storage.recompute_budget_s),
        )

    def _on_weights(self, text: str) -> None:
        """On the loading thread, which ends at its next report when the start is to end."""
        self._end_if_stopped()
        self._progress.on_weights(text)

    def _bring_back(self, storage: Storage, engine: OpenEngine, cache: CacheManager, started: float, deadline_s: float) -> _Restored:
        """Ends at the next report of progress when the start is to end."""
        bar = Progress("rehydrating")

        def progress(done: int, total: int) -> None:
            self._end_if_stopped()
            bar.update(done, total)
            self._progress.on_blocks(done, total)

        report = storage.rehydrate(cache, engine.executor, deadline_s, progress)
        bar.close()
        self._end_if_stopped()
        self._progress.blocks_are_back()
        self._facts.rehydration = report.as_dict()
        self._facts.startup["rehydrate"] = self._since(started)
        recipes, not_computed = current_recipes(
            storage.recipe_book.recipes(),
            report,
            load_text=self._load_text,
            vocab_size=engine.vocab_size,
            template_date=self._config.transport.template_date,
            adapter_digest=None if self._adapter_store is None else self._adapter_store.digest_of,
            log=self._log,
        )
        return _Restored(report, recipes, not_computed)

    # -------------------------------------------------------------------------------- state, signals, failures

    def _publish(self, state: State) -> None:
        status = starting_report(self._facts, self._clock, state, self._progress.text)
        self._outbox.put([Snapshot(state, status, {"uptime_s": status["uptime_s"]}, 1.0)])

    def _on_state(self, state: State, storage: Storage) -> None:
        if state is State.READY:
            storage.mark_ready()
            self._facts.startup["total"] = round(process_age_s(), 3)
            self._log.info("ready", **{f"{key}_s": value for key, value in self._facts.startup.items()})
        else:
            self._log.info(state.value)
        self._manager.on_state(state, state.value)

    def _since(self, started_s: float) -> float:
        return round(self._clock.monotonic() - started_s, 3)

    @property
    def _is_ending(self) -> bool:
        """Whether a stop was asked for, or the edge has failed."""
        return self._num_stops > 0 or bool(self._failure)

    def _end_if_stopped(self) -> None:
        if self._is_ending:
            raise StopDuringStart

    def _on_frontend_failure(self, message: str) -> None:
        """On one of the edge's threads: without an edge nobody can be served, so end."""
        self._failure = message
        self._log.error("frontend_failed", error=message)
        if self._loop is not None:
            self._loop.request_drain()

    # -------------------------------------------------------------------------------- what the process may do besides

    def _before_loop(self) -> None:
        """Everything is loaded."""
