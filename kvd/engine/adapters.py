"""LoRA adapters on the engine's side: which are loaded, who uses them, and who waits for one.

A request names an adapter; here the name becomes the digest of what is loaded under it, which is what its blocks belong to. An adapter that is not loaded is read on demand, on a
thread of its own, while the request waits. At most ``max_adapters`` are loaded: the one that was idle longest makes room, and where every one is in use the request waits, as it
would for blocks. Whoever has waited long stops later requests from passing, so that some adapter becomes idle and the wait is bounded by what already runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from kvd.cache.events import BlockOrigin
from kvd.cache.tenants import Selection
from kvd.commands import (
    AdapterNames,
    AdapterRead,
    ChoiceDone,
    Event,
    ListAdapters,
    LoadAdapter,
    OpDone,
    OpFailed,
    PinPrefix,
    Recipe,
    RequestDone,
    RequestFailed,
    RequestUsage,
    Submit,
    UnloadAdapter,
)
from kvd.engine.ports import AdapterSource, Clock
from kvd.scheduler.scheduler import Scheduler
from kvd.types import ErrorCode, FinishReason

_FAIR_WAIT_S = 2.0
"""A request that has waited for so long is passed by no other one with an adapter."""
_RETRY_AFTER_S = 1.0
FORGOTTEN = "the prefix was forgotten meanwhile"
"""Why a pin fails that was under way."""


@dataclass(slots=True)
class _Resident:
    """A loaded adapter."""

    digest: bytes
    rank: int
    num_bytes: int
    names: set[str] = field(default_factory=set)
    """Empty: it leaves when it is idle."""
    num_requests: int = 0
    last_use: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    """Someone who goes on when an adapter is there."""

    name: str
    since_s: float
    then: Callable[[_Resident], list[Event]]
    fail: Callable[[ErrorCode, str, float], list[Event]]
    recipe: Recipe | None = None
    """A pin's."""
    read_id: int = 0
    """For an explicit load: the read that answers it; whatever is loaded under the name will not do."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Request(_Waiter):
    submit: Submit
    is_internal: bool
    is_private: bool = False
    """Its prefix was forgotten meanwhile: it leaves nothing behind."""


class Adapters:
    """Stands before the scheduler. Used by the engine thread alone; methods return the events that they cause."""

    def __init__(self, *, scheduler: Scheduler, source: AdapterSource | None, clock: Clock, max_adapters: int, max_waiting: int) -> None:
        """``source`` None: the daemon serves no adapters."""
        self._scheduler = scheduler
        self._source = source
        self._clock = clock
        self._max_adapters = max_adapters
        self._max_waiting = max_waiting
        self._residents: dict[bytes, _Resident] = {}
        self._by_name: dict[str, _Resident] = {}
        self._reading: dict[int, str] = {}
        self._waiting: dict[_Waiter, None] = {}
        """In the order of their arrival."""
        self._waiting_requests: dict[bytes, _Request] = {}
        """Those of them that are requests, by id."""
        self._unusable: dict[str, str] = {}
        """Why the last read of a name came to nothing, though its directory is there."""
        self._names_of_digests: dict[bytes, str] = {}
        """What pins' adapters were called before the start."""
        self.uses: dict[bytes, _Resident] = {}
        """By request id: what accepted requests run with."""
        self._num_uses = 0
        self._num_reads = 0
        self._counters: Counter[str] = Counter()
        self._log = structlog.get_logger("adapters")

    # -------------------------------------------------------------------------------- requests

    def submit(
        self, command: Submit, *, internal: bool = False, background: bool = False, origin: BlockOrigin = BlockOrigin.COMPUTED
    ) -> list[Event]:
        """``Scheduler.submit`` once the request's adapter is there, which is at once for the base model."""
        name = command.adapter_name
        if not name and not command.adapter:
            return self._scheduler.submit(command, internal=internal, background=background, origin=origin)
        if command.request_id in self.uses or command.request_id in self._waiting_requests:
            return []
        since_s = self._clock.monotonic()

        def fail(code: ErrorCode, message: str, retry_after_s: float) -> list[Event]:
            return [RequestFailed(command.request_id, code, message, retry_after_s)]

        def run(resident: _Resident) -> list[Event]:
            if command.adapter not in (b"", resident.digest):
                return fail(ErrorCode.NOT_FOUND, f"adapter {name} is not any more what it was when this was recorded", 0.0)
            self._use(command.request_id, resident)
            return self._scheduler.submit(
                msgspec.structs.replace(waiter.submit, adapter=resident.digest),
                internal=internal,
                background=background,
                origin=origin,
                is_private=waiter.is_private,
                waited_s=self._clock.monotonic() - since_s,
            )

        waiter = _Request(
            name=name or self._names_of_digests.get(command.adapter, ""),
            since_s=since_s,
            then=run,
            fail=fail,
            submit=command,
            is_internal=internal,
        )
        return self._admit(waiter)

    def pin(self, command: PinPrefix, pin: Callable[[PinPrefix], list[Event]]) -> list[Event]:
        """``pin``, once the recipe's adapter is there and its digest known."""
        recipe = command.recipe
        if not recipe.adapter_name:
            return pin(command)
        waiter = _Waiter(
            name=recipe.adapter_name,
            since_s=self._clock.monotonic(),
            then=lambda resident: pin(PinPrefix(command.op_id, msgspec.structs.replace(recipe, adapter=resident.digest))),
            fail=lambda code, message, retry_after_s: [OpFailed(command.op_id, code, message, retry_after_s)],
            recipe=recipe,
        )
        return self._admit(waiter)

    def release(self, request_id: bytes) -> list[Event]:
        """A request is over."""
        resident = self.uses.pop(request_id, None)
        if resident is None:
            return []
        resident.num_requests -= 1
        self._leave_if_unnamed(resident)
        return self._go_on()

    def grant(self, request_id: bytes, num_tokens: int) -> bool:
        """More stream credit for a request that waits here; whether it does."""
        waiter = self._waiting_requests.get(request_id)
        if waiter is None:
            return False
        waiter.submit = msgspec.structs.replace(waiter.submit, credit_tokens=waiter.submit.credit_tokens + num_tokens)
        return True

    def abort(self, request_id: bytes) -> list[Event]:
        """End a request that waits here; nothing if none of this id does."""
        waiter = self._waiting_requests.get(request_id)
        if waiter is None:
            return []
        self._drop(waiter)
        choices = range(0 if waiter.is_internal else waiter.submit.num_choices)
        ended: list[Event] = [
            *(ChoiceDone(request_id, choice, FinishReason.ABORTED) for choice in choices),
            RequestDone(request_id, RequestUsage()),
        ]
        return ended + self._go_on()

    def end_waiting(self, code: ErrorCode, message: str) -> list[Event]:
        """Nobody's adapter will come: all who wait fail."""
        return self._answer(list(self._waiting), lambda waiter: waiter.fail(code, message, _RETRY_AFTER_S))

    def forget(self, selection: Selection) -> list[Event]:
        """A selection is being forgotten: the pins of it that wait here fail, and the requests that are in it or may grow into it will leave nothing behind."""
        for waiter in self._waiting_requests.values():
            waiter.is_private |= selection.may_hold(waiter.submit.tenant_salt, waiter.submit.token_ids)
        pins = [
            each for each in self._waiting if each.recipe is not None and selection.holds(each.recipe.tenant_salt, each.recipe.token_ids)
        ]
        events = self._answer(pins, lambda waiter: waiter.fail(ErrorCode.NOT_FOUND, FORGOTTEN, 0.0))
        return events + self._go_on() if events else events

    def expire(self) -> list[Event]:
        """The requests whose time is over while they wait."""
        if not self._waiting:
            return []
        now_s = self._clock.monotonic()
        events: list[Event] = []
        for waiter in list(self._waiting_requests.values()):
            command, waited_s = waiter.submit, now_s - waiter.since_s
            if 0 < command.deadline_s <= waited_s:
                self._drop(waiter)
                events += waiter.fail(ErrorCode.DEADLINE_EXCEEDED, f"not over within {command.deadline_s:g} s (deadline_s)", 0.0)
            elif 0 < command.queue_timeout_s <= waited_s:
                self._drop(waiter)
                message = f"its adapter was not there within {command.queue_timeout_s:g} s (queue_timeout_s)"
                events += waiter.fail(ErrorCode.QUEUE_TIMEOUT, message, _RETRY_AFTER_S)
        return events + self._go_on() if events else events

    # -------------------------------------------------------------------------------- operations

    def handle(self, command: LoadAdapter | UnloadAdapter | ListAdapters | AdapterRead | AdapterNames) -> list[Event]:
        """An operation, or what comes back from disk."""
        match command:
            case LoadAdapter():
                return self.load(command)
            case UnloadAdapter():
                return self.unload(command)
            case ListAdapters():
                return self.list_adapters(command)
            case AdapterRead():
                return self.on_read(command)
            case AdapterNames():
                return self.on_names(command)

    def load(self, command: LoadAdapter) -> list[Event]:
        """Read an adapter, also one that is loaded: what its directory holds now is what its name means from then on."""

        def fail(code: ErrorCode, message: str, retry_after_s: float) -> list[Event]:
            return [OpFailed(command.op_id, code, message, retry_after_s)]

        if self._source is None:
            return fail(ErrorCode.NOT_FOUND, _NO_ADAPTERS, 0.0)
        read_id = self._begin_read(command.name)
        if not read_id:
            return fail(ErrorCode.ADAPTER_CAPACITY, self._capacity(), _RETRY_AFTER_S)
        waiter = _Waiter(
            name=command.name,
            since_s=self._clock.monotonic(),
            then=lambda resident: [OpDone(command.op_id, self._described(command.name, resident))],
            fail=fail,
            read_id=read_id,
        )
        self._waiting[waiter] = None
        return []

    def unload(self, command: UnloadAdapter) -> list[Event]:
        """Let an adapter go: at once, or when the requests that run with it are over. It is read again when somebody names it."""
        resident = self._by_name.pop(command.name, None)
        if resident is None:
            return [OpFailed(command.op_id, ErrorCode.NOT_FOUND, f"no adapter is loaded under the name {command.name!r:.140}")]
        resident.names.discard(command.name)
        self._leave_if_unnamed(resident)
        state = "unloaded" if resident.digest not in self._residents else "in use"
        result = {"name": command.name, "digest": resident.digest.hex(), "state": state, "requests": resident.num_requests}
        return [OpDone(command.op_id, result), *self._go_on()]

    def list_adapters(self, command: ListAdapters) -> list[Event]:
        """Ask which adapters there are; the answer comes with ``on_names``."""
        if self._source is None:
            return [OpDone(command.op_id, {"adapters": [], "max_adapters": 0})]
        self._source.list_names(command.op_id)
        return []

    def on_names(self, command: AdapterNames) -> list[Event]:
        """The names on disk."""
        if command.error:
            return [OpFailed(command.op_id, ErrorCode.ADAPTER_UNUSABLE, command.error)]
        self._unusable = {name: reason for name, reason in self._unusable.items() if name in command.names}
        on_disk = [name for name in command.names if name not in self._by_name]
        loaded = [self._described(name, resident) for name, resident in self._by_name.items()]
        adapters = [*loaded, *(self._described_on_disk(name) for name in on_disk)]
        adapters.sort(key=lambda each: each["name"])
        return [OpDone(command.op_id, {"adapters": adapters, "max_adapters": self._max_adapters})]

    def on_read(self, command: AdapterRead) -> list[Event]:
        """An adapter was read, or could not be."""
        assert self._source is not None, "somebody read it"
        name = self._reading.pop(command.read_id)
        waiting = [waiter for waiter in self._waiting if waiter.name == name and waiter.read_id in (0, command.read_id)]
        if command.error:
            code = ErrorCode.NOT_FOUND if command.is_missing else ErrorCode.ADAPTER_UNUSABLE
            self._log.warning("adapter_not_loaded", name=name, error=command.error)
            if not command.is_missing:
                self._unusable[name] = command.error
            if name in self._by_name:  # what is loaded stays, and so do those who wait for their turn with it
                waiting = [waiter for waiter in waiting if waiter.read_id]
            return self._answer(waiting, lambda waiter: waiter.fail(code, command.error, 0.0)) + self._go_on()
        self._unusable.pop(name, None)
        resident = self._residents.get(command.digest)
        if resident is not None:
            self._source.discard(command.read_id)
        else:
            if not self._make_room():
                self._source.discard(command.read_id)
                loads = [waiter for waiter in waiting if waiter.read_id]
                return self._answer(loads, lambda waiter: waiter.fail(ErrorCode.ADAPTER_CAPACITY, self._capacity(), _RETRY_AFTER_S))
            resident = self._residents[command.digest] = _Resident(command.digest, command.rank, command.num_bytes)
            self._source.install(command.read_id, command.digest)
            self._counters["loads"] += 1
            self._log.info("adapter_loaded", name=name, digest=command.digest.hex(), rank=command.rank, num_bytes=command.num_bytes)
        self._touch(resident)
        self._name(name, resident)
        return self._answer(waiting, lambda waiter: waiter.then(resident)) + self._go_on()

    def preload(self, recipes: Iterable[Recipe]) -> None:
        """At start: read the adapters that pins use, as many as may be loaded, in this order; and know what all of them are called."""
        for recipe in recipes:
            if recipe.adapter_name and recipe.adapter:
                self._names_of_digests[recipe.adapter] = recipe.adapter_name
                if self._source is not None and recipe.adapter_name not in self._reading.values():
                    self._begin_read(recipe.adapter_name)

    # -------------------------------------------------------------------------------- reports

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read."""
        return bool(self._reading)

    @property
    def has_waiting(self) -> bool:
        """Whether a request or an operation waits here."""
        return bool(self._waiting)

    def report(self) -> dict[str, Any]:
        """The ``adapters`` part of the status report: those with names, and those that only requests hold which began before."""
        residents = self._residents.values()
        return {
            "max_adapters": self._max_adapters if self._source is not None else 0,
            "loaded": [self._described(name, resident) for resident in residents for name in sorted(resident.names)],
            "unloading": [self._facts(resident) for resident in residents if not resident.names],
            "waiting": len(self._waiting),
        }

    def stats(self) -> dict[str, int]:
        """Counters since the start; ``loaded`` are those that take memory now, with a name or without."""
        return {
            "loaded": len(self._residents),
            "loads": self._counters["loads"],
            "evictions": self._counters["evictions"],
            "requests": self._counters["requests"],
            "waiting": len(self._waiting),
        }

    # -------------------------------------------------------------------------------- within

    def _admit(self, waiter: _Waiter) -> list[Event]:
        if self._source is None:
            return waiter.fail(ErrorCode.NOT_FOUND, _NO_ADAPTERS, 0.0)
        if not waiter.name:
            return waiter.fail(ErrorCode.NOT_FOUND, "the adapter that it was recorded with is not known any more", 0.0)
        resident = self._by_name.get(waiter.name)
        if resident is not None and not self._is_held_up(self._waiting):
            return waiter.then(resident)
        if isinstance(waiter, _Request) and not waiter.is_internal and len(self._waiting) >= self._max_waiting:
            message = f"{len(self._waiting)} requests wait for adapters, the limit is {self._max_waiting} (max_waiting)"
            return waiter.fail(ErrorCode.OVERLOADED, message, _RETRY_AFTER_S)
        self._waiting[waiter] = None
        if isinstance(waiter, _Request):
            self._waiting_requests[waiter.submit.request_id] = waiter
        if resident is None and waiter.name not in self._reading.values():
            self._begin_read(waiter.name)
        return []

    def _go_on(self) -> list[Event]:
        """Something has changed: who waits goes on, if it can, the oldest first."""
        events: list[Event] = []
        passed: list[_Waiter] = []
        for waiter in list(self._waiting):
            if waiter.read_id:
                continue
            resident = self._by_name.get(waiter.name)
            if resident is not None and not self._is_held_up(passed):
                events += self._answer([waiter], lambda each, resident=resident: each.then(resident))  # type: ignore[misc]
                continue
            passed.append(waiter)
            if resident is None and waiter.name not in self._reading.values():
                self._begin_read(waiter.name)
        return events

    def _is_held_up(self, before: Iterable[_Waiter]) -> bool:
        """Whether one of those before has waited so long for room that nobody may pass."""
        latest_s = self._clock.monotonic() - _FAIR_WAIT_S
        return any(waiter.since_s <= latest_s and not waiter.read_id and waiter.name not in self._by_name for waiter in before)

    def _answer(self, waiters: Iterable[_Waiter], how: Callable[[_Waiter], list[Event]]) -> list[Event]:
        events: list[Event] = []
        for waiter in waiters:
            self._drop(waiter)
            events += how(waiter)
        return events

    def _drop(self, waiter: _Waiter) -> None:
        del self._waiting[waiter]
        if isinstance(waiter, _Request):
            del self._waiting_requests[waiter.submit.request_id]

    def _begin_read(self, name: str) -> int:
        """Read an adapter if there is or may be room for it; the read's number, 0 if there is none."""
        num_busy = sum(1 for resident in self._residents.values() if resident.num_requests)
        if self._source is None or num_busy + len(self._reading) >= self._max_adapters:
            return 0
        self._num_reads += 1
        self._reading[self._num_reads] = name
        self._source.read(self._num_reads, name)
        return self._num_reads

    def _make_room(self) -> bool:
        """Have the adapter that was idle longest leave, if there are as many as may be; whether there is room for another."""
        while len(self._residents) >= self._max_adapters:
            idle = [resident for resident in self._residents.values() if not resident.num_requests]
            if not idle:
                return False
            self._counters["evictions"] += 1
            self._remove(min(idle, key=lambda resident: resident.last_use))
        return True

    def _name(self, name: str, resident: _Resident) -> None:
        old = self._by_name.get(name)
        self._by_name[name] = resident
        resident.names.add(name)
        if old is not None and old is not resident:
            old.names.discard(name)
            self._leave_if_unnamed(old)

    def _leave_if_unnamed(self, resident: _Resident) -> None:
        if not resident.names and not resident.num_requests:
            self._remove(resident)

    def _remove(self, resident: _Resident) -> None:
        assert self._source is not None, "somebody loaded it"
        del self._residents[resident.digest]
        for name in resident.names:
            del self._by_name[name]
        self._source.remove(resident.digest)
        self._log.info("adapter_unloaded", names=sorted(resident.names), digest=resident.digest.hex())

    def _use(self, request_id: bytes, resident: _Resident) -> None:
        self.uses[request_id] = resident
        resident.num_requests += 1
        self._counters["requests"] += 1
        self._touch(resident)

    def _touch(self, resident: _Resident) -> None:
        self._num_uses += 1
        resident.last_use = self._num_uses

    def _capacity(self) -> str:
        return f"all {self._max_adapters} adapters that may be loaded are in use (max_adapters); unload one, or try again when requests are over"

    def _described_on_disk(self, name: str) -> dict[str, Any]:
        reason = self._unusable.get(name)
        return {"name": name, "state": "on disk"} if reason is None else {"name": name, "state": "unusable", "error": reason}

    @staticmethod
    def _described(name: str, resident: _Resident) -> dict[str, Any]:
        return {"name": name, "state": "loaded", **Adapters._facts(resident)}

    @staticmethod
    def _facts(resident: _Resident) -> dict[str, Any]:
        return {
            "digest": resident.digest.hex(),
            "rank": resident.rank,
            "bytes": resident.num_bytes,
            "requests": resident.num_requests,
        }


_NO_ADAPTERS = "this daemon serves no adapters: it was started without adapter_dir"
