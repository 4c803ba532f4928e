"""The whole daemon inside the application's process, without a socket: the offline batch interface, ``kvd.LLM``.

Everything that the daemon does is done here by the same code: batching, prefix sharing, pins, and, with a state directory, the warm restart. It runs on
threads of its own; the application's thread only waits for it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import queue
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard, Unpack, cast

from kvd_client.calls import Call, Delivery
from kvd_client.client import Client
from kvd_client.errors import ClientClosed, DeadlineExceeded, KvdError, Overloaded, QueueTimeout, Timeout
from kvd_client.protocol.codes import Code
from kvd_client.requests import ChatMessages, GenerateOptions, Prompt, generation_call, prompt_body
from kvd_client.results import Completion

from kvd.config import ConfigError, DaemonConfig
from kvd.daemon import Daemon
from kvd.executor.kernels.cpu import native
from kvd.observe.logging import configure_embedded
from kvd.observe.progress import Progress
from kvd.settings.loader import from_arguments
from kvd.settings.model_store import resolve_model
from kvd.start_errors import as_config_error
from kvd.transport.embedded import NAME, EmbeddedEdge

Input = Prompt | ChatMessages
"""Text, token ids, or a conversation."""

_OVER_A_SOCKET = frozenset({"listen", "frontend", "curve_key_file", "curve_clients_file", "ipc_tenants", "allow_plain_tcp", "max_clients"})
"""Settings without a meaning here."""
_QUEUED_PER_RUNNING = 4
"""Requests handed over at once, for each that can run: enough that no place is empty, few enough that nobody is refused."""
_PLACES = frozenset(
    {"max_waiting", "max_waiting_constraints", "max_requests_per_client", "max_text_jobs", "max_text_bytes", "inbox_capacity"}
)
"""The settings which a refusal names that another request's end takes back: there was no place."""
_REFUSED_FOR = re.compile(r"\((?:\w+\.)?(\w+)\)$")
_MOST_REFUSALS = 3
"""Of a request that is ``overloaded`` for another reason."""
_STOP_S = 60.0
_POLL_S = 0.1

_native_engines = threading.Lock()
"""The native kernels of a process share one pool of threads, which computes for one engine."""


def _after_fork() -> None:
    """The engine and its threads stayed with the parent: the child may have one of its own."""
    global _native_engines  # noqa: PLW0603  a lock that the parent holds is never given back here
    _native_engines = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class EngineStoppedError(Exception):
    """The engine is not there: its start failed, it has died, or ``close`` was called. ``__cause__`` says more where there is more."""


class LLM:
    """A model, its KV pool and everything around them, for this process alone.

    Making one takes as long as the weights take to load. Use it in a ``with`` block, or ``close`` it. All methods may be called from any thread. Over a ``fork`` it stays with the
    parent; the child may make one of its own, except on a GPU (there start it with ``spawn``).

    Args:
        model: a pulled model's name, a GGUF file or a Hugging Face directory; empty: the default model, smollm2.
        state_dir: where pins, prefixes and hot blocks are kept, so that the next ``LLM`` (or ``kvd serve``) over the same directory begins warm; one process at a time
            may use it. None: nothing outlives this object.
        settings: any other key of docs/operations.md by its name (``kv_memory="2GiB"``, ``max_running=16``, ``executor="fake"``), as text or as a value of its kind.
            Neither the environment nor a configuration file is read. ``log_level`` is ``warning`` where nothing else is said.

    Raises:
        TypeError: a setting that does not exist, or has no meaning without a socket.
        kvd.config.ConfigError: a wrong value, or a model that is not there or can't be used; the message says what to change.
        EngineStoppedError: the engine could not start for another reason, such as a state directory that another process uses.
    """

    def __init__(self, model: str = "", *, state_dir: str | Path | None = None, **settings: Any) -> None:
        senseless = settings.keys() & _OVER_A_SOCKET
        if senseless:
            raise TypeError(f"{min(senseless)!r} says something about sockets or their clients; there are none in kvd.LLM")
        config = from_arguments(_arguments(model, state_dir, settings))
        configure_embedded(config.observe.log_level)
        self._engine = _Engine(_with_models(config), is_kept=state_dir is not None)
        self._finalizer = weakref.finalize(self, _Engine.close, self._engine)
        try:
            self._engine.wait_ready()
        except BaseException:
            self.close()
            raise
        self._max_open = max(1, min(_QUEUED_PER_RUNNING * config.scheduler.max_running, *_most_requests(config)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, write the last checkpoint where there is a state directory, and give all memory back. Calling it again does nothing."""
        self._engine.close()
        self._finalizer.detach()

    @property
    def client(self) -> Client:
        """Everything else that a client of the daemon can do: streams, pins, tokenising, status, stats, forgetting. It ends with this object."""
        return self._engine.client

    def generate(
        self,
        prompts: Input | Iterable[Input],
        sampling: GenerateOptions | Sequence[GenerateOptions] | None = None,
        *,
        progress: bool = True,
        timeout_s: float = math.inf,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Answer every prompt; they run side by side and share what they begin with alike.

        Args:
            prompts: texts, lists of token ids, or conversations (rendered with the model's chat template), mixed as you like; a single one is a list of one.
            sampling: options for all of them, or one mapping for each; :class:`kvd_client.requests.GenerateOptions` has them all, and the defaults.
            progress: draw a bar on standard error if that is a terminal.
            timeout_s: for all of it.
            options: the same as ``sampling``, by name; they count where ``sampling`` says nothing.

        Returns:
            The answers in the order of the prompts.

        Raises:
            KvdError: of the first prompt that failed, by its class (:mod:`kvd_client.errors`); ``add_note`` says which. The others are aborted. A prompt for which there
                is no place comes again by itself when there is one; its ``queue_timeout_s`` and ``deadline_s`` count from when it was first handed over.
            Timeout: the time is over.
            EngineStoppedError: there is no engine (any more).
        """
        inputs = _inputs(prompts)
        if isinstance(sampling, Sequence) and len(sampling) != len(inputs):
            raise ValueError(f"{len(inputs)} prompts and {len(sampling)} mappings of options: give one for all, or one for each")
        each: Sequence[Mapping[str, Any]] = sampling if isinstance(sampling, Sequence) else [sampling or {}] * len(inputs)
        batch = _Batch(
            self._engine, [(value, cast("GenerateOptions", {**options, **own})) for value, own in zip(inputs, each, strict=True)]
        )
        bar = Progress("generating", log=lambda *_, **__: None) if progress else None
        try:
            return batch.run(self._max_open, bar, time.monotonic() + timeout_s)
        except ClientClosed as error:
            stopped = self._engine.stopped(error)
            raise stopped from stopped.__cause__
        finally:
            batch.cancel()
            if bar is not None:
                bar.close()

    def chat(
        self,
        conversations: ChatMessages | Sequence[ChatMessages],
        sampling: GenerateOptions | Sequence[GenerateOptions] | None = None,
        *,
        progress: bool = True,
        timeout_s: float = math.inf,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """``generate`` of one conversation or several.

        Raises:
            TypeError: something else than a list of messages.
        """
        values = [conversations] if _is_conversation(conversations) else list(cast("Sequence[ChatMessages]", conversations))
        for index, value in enumerate(values):
            if not _is_conversation(value):
                raise TypeError(
                    f"conversations[{index}] is {value!r:.40}: a conversation is a list of messages, maps of role and content; texts and token ids are for generate"
                )
        return self.generate(values, sampling, progress=progress, timeout_s=timeout_s, **options)


class _Engine:
    """The daemon, its thread, and the client over them."""

    def __init__(self, config: DaemonConfig, *, is_kept: bool) -> None:
        self._pid = os.getpid()
        self._scratch: str | None = None
        self._daemon: Daemon | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_over = threading.Event()  # not the thread's join: one that a signal interrupts takes the thread for dead
        self._has_kernels = (
            config.model.executor != "fake" and native.status().isa is not None
        )  # where torch computes, they draw the samples
        if self._has_kernels and not _native_engines.acquire(blocking=False):
            raise EngineStoppedError("another kvd.LLM of this process has the native kernels' threads, which work for one: close it first")
        try:
            if not is_kept:
                self._scratch = tempfile.mkdtemp(prefix="kvd-llm-")
                config = dataclasses.replace(config, storage=dataclasses.replace(config.storage, state_dir=Path(self._scratch)))
            self._edge = EmbeddedEdge()
            self.client = Client.over(self._edge, endpoint=NAME, timeout_s=math.inf)
            self._daemon = Daemon(config, open_edge=self._edge.attach)
            self._thread = threading.Thread(target=self._run, name="kvd-engine", daemon=True)
            self._thread.start()
        except BaseException:
            if self._daemon is not None:
                self._daemon.request_stop()
            if self._thread is None or not self._thread.is_alive():
                self._give_back()
            raise

    def _run(self) -> None:
        assert self._daemon is not None, "it goes at the end"
        try:
            self._daemon.run()
        except BaseException as error:  # told to whoever asks next
            self._error = error
        finally:
            self._edge.end()
            while self._daemon.is_loading:  # it computes with the kernels' threads, and the interpreter must not end under it
                time.sleep(_POLL_S)
            self._daemon = None  # with the model and the pool
            self._give_back()
            self._is_over.set()

    def _give_back(self) -> None:
        """Kernels and directory: on the engine's thread, however those who wait for it are interrupted."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._has_kernels:
            self._has_kernels = False
            _native_engines.release()

    def wait_ready(self) -> None:
        try:
            self.client.wait_ready()
        except KvdError as error:
            stopped = self.stopped(error)
            raise stopped from stopped.__cause__

    def open(self, call: Call) -> None:
        self._edge.open(call)

    def cancel(self, call: Call) -> None:
        self._edge.cancel(call)

    def stopped(self, told: KvdError) -> Exception:
        """Why there is no engine, as its client was ``told``; its cause is what the engine ended with, if that is known."""
        if os.getpid() != self._pid:
            return EngineStoppedError("it belongs to the process that made it")
        if self._is_closed:
            return EngineStoppedError("it was closed")
        self._is_over.wait(_STOP_S)
        if (wrong := as_config_error(self._error)) is not None:
            return wrong
        stopped = EngineStoppedError(str(self._error) if self._error is not None else "the engine has died; its log says why")
        stopped.__cause__ = self._error or told
        return stopped

    def close(self) -> None:
        """Again after an interruption: wait again."""
        if os.getpid() != self._pid:
            return  # of a fork: everything is the parent's
        daemon, thread = self._daemon, self._thread
        if not self._is_closed:
            self._is_closed = True
            self._edge.close()
            if daemon is not None:
                daemon.request_stop()
        del daemon
        if self._is_over.wait(_STOP_S) and thread is not None:
            thread.join(_POLL_S)


@dataclass(slots=True, eq=False)
class _Request:
    """One prompt of a batch."""

    index: int
    value: Input
    options: GenerateOptions
    begun_s: float | None = None
    """When it was first handed over: from then on its own times count."""
    num_refusals: int = 0
    """For other reasons than that there is no place."""

    @property
    def due_s(self) -> float:
        """When the first of its own times is over, should it not begin to run."""
        if self.begun_s is None:
            return math.inf
        return self.begun_s + min(self.options.get("deadline_s") or math.inf, self.options.get("queue_timeout_s") or math.inf)

    def options_left(self, now_s: float) -> GenerateOptions:
        """Its options, with what earlier tries have left of its times.

        Raises:
            DeadlineExceeded, QueueTimeout: nothing is left.
        """
        if self.begun_s is None:
            self.begun_s = now_s
            return self.options
        waited_s, left = now_s - self.begun_s, self.options.copy()
        if deadline_s := left.get("deadline_s"):
            if waited_s >= deadline_s:
                raise DeadlineExceeded("the request has not begun to run at the end of its deadline_s", code=Code.DEADLINE_EXCEEDED)
            left["deadline_s"] = deadline_s - waited_s
        if queue_timeout_s := left.get("queue_timeout_s"):
            if waited_s >= queue_timeout_s:
                message = "there was no place for the request within its queue_timeout_s"
                raise QueueTimeout(message, code=Code.QUEUE_TIMEOUT, retryable=True)
            left["queue_timeout_s"] = queue_timeout_s - waited_s
        return left


class _Batch:
    """The requests of one ``generate``: a bounded number is open at a time, and each of these puts its end into one queue."""

    def __init__(self, engine: _Engine, requests: Sequence[tuple[Input, GenerateOptions]]) -> None:
        self._engine = engine
        self._ended: queue.SimpleQueue[tuple[_Request, Delivery]] = queue.SimpleQueue()
        self._calls: dict[_Request, Call] = {}
        self._pending = deque(_Request(index, value, options) for index, (value, options) in enumerate(requests))
        """Those that were refused a place come first."""
        self._results: list[Completion | None] = [None] * len(requests)

    def run(self, max_open: int, bar: Progress | None, deadline_s: float) -> list[Completion]:
        num_done, most_open = 0, max_open
        while num_done < len(self._results):
            while self._pending and len(self._calls) < max_open:
                self._open(self._pending.popleft(), deadline_s)
            try:
                request, delivery = self._ended.get(timeout=self._patience_s())
            except queue.Empty:
                self._open(self._pending.popleft(), deadline_s)  # its own time is over, as that says
                continue
            del self._calls[request]
            if isinstance(delivery, Overloaded) and self._comes_again(request, delivery):
                max_open = self._wait_a_little(request, delivery, deadline_s)
                continue
            if isinstance(delivery, KvdError):
                raise self._noted(request, delivery)
            assert isinstance(delivery, Completion), "a whole answer comes as one"
            self._results[request.index] = delivery
            num_done += 1
            max_open = min(most_open, max_open + 1)  # where one ended there may be a place again
            if bar is not None:
                bar.update(num_done, len(self._results))
        return [result for result in self._results if result is not None]

    def cancel(self) -> None:
        """Abort what is open."""
        for call in self._calls.values():
            self._engine.cancel(call)
        self._calls.clear()

    def _noted(self, request: _Request, error: KvdError) -> KvdError:
        error.add_note(f"of prompts[{request.index}], of {len(self._results)}")
        return error

    def _open(self, request: _Request, deadline_s: float) -> None:
        value, now_s = request.value, time.monotonic()
        try:
            kind, body = prompt_body(None, value) if _is_conversation(value) else prompt_body(cast("Prompt", value))
            options = request.options_left(now_s)
            call, _ = generation_call(kind, body, options, stream=False, deliver=lambda delivery: self._ended.put((request, delivery)))
        except KvdError as error:
            raise self._noted(request, error)  # noqa: B904  the same
        call.timeout_s = deadline_s - now_s
        if call.timeout_s <= 0:
            raise Timeout("the time for the batch is over")
        self._calls[request] = call
        self._engine.open(call)

    def _comes_again(self, request: _Request, error: Overloaded) -> bool:
        """Whether it is tried again: for a place as long as it takes, for another reason a few times, and never after a time of its own."""
        if type(error) is not Overloaded:
            return False
        named = _REFUSED_FOR.search(str(error))
        if named is None or named[1] not in _PLACES:
            request.num_refusals += 1
        return request.num_refusals < _MOST_REFUSALS

    def _wait_a_little(self, request: _Request, error: Overloaded, deadline_s: float) -> int:
        """One too many is open: it comes again when others have ended. How many may be open."""
        self._pending.appendleft(request)
        if not self._calls:
            until_s = min(time.monotonic() + max(_POLL_S, error.retry_after_s), request.due_s, deadline_s)
            time.sleep(max(0.0, until_s - time.monotonic()))
        return max(1, len(self._calls))

    def _patience_s(self) -> float | None:
        """Until the time of one that waits for a place is over; that one is then the next."""
        refused = takewhile(lambda request: request.begun_s is not None, self._pending)
        first = min(refused, key=lambda request: request.due_s, default=None)
        if first is None or first.due_s == math.inf:
            return None
        self._pending.remove(first)
        self._pending.appendleft(first)
        return max(0.0, first.due_s - time.monotonic())


def _arguments(model: str, state_dir: str | Path | None, settings: Mapping[str, Any]) -> dict[str, object]:
    arguments: dict[str, object] = {"log_level": "warning", **settings, "model": model}
    if state_dir is None:
        if settings.get("persist"):
            raise ConfigError("storage.persist: it takes a state_dir to persist anything in")
        return {**arguments, "persist": False, "state_dir": tempfile.gettempdir()}
    return {**arguments, "state_dir": str(state_dir)}


def _with_models(config: DaemonConfig) -> DaemonConfig:
    """Models' names replaced by their paths."""
    if config.model.executor == "fake":
        return config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=str(resolve_model(config.model.model))))
    if draft := config.speculative.draft_model:
        path = resolve_model(draft, key="speculative.draft_model")
        config = dataclasses.replace(config, speculative=dataclasses.replace(config.speculative, draft_model=str(path)))
    return config


def _most_requests(config: DaemonConfig) -> tuple[int, ...]:
    return config.transport.max_requests_per_client, config.transport.max_text_jobs, config.scheduler.max_waiting


def _is_conversation(value: object) -> TypeGuard[ChatMessages]:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def _inputs(prompts: Input | Iterable[Input]) -> list[Input]:
    """One input or several: a text, ids in an order and a list of messages are one. What is none, ``prompt_body`` refuses."""
    is_one = isinstance(prompts, str | bytes | bytearray | memoryview | Mapping) or _is_conversation(prompts)
    has_order = hasattr(prompts, "__getitem__") and hasattr(prompts, "__len__")
    if is_one or (has_order and _is_number(next(iter(prompts), None))):
        return [cast("Input", prompts)]
    return list(cast("Iterable[Input]", prompts))


def _is_number(value: object) -> bool:
    """Of whatever kind: a tensor of one, too. Whether it is an id, ``prompt_body`` says."""
    return isinstance(value, Integral) or (getattr(value, "ndim", None) == 0 and not isinstance(value, str | bytes))
