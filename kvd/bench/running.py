"""Runs a plan: rounds over interleaved targets, warm-up, servers that live one at a time, and a result that is written after each measurement."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvd.bench.asking import Setting
from kvd.bench.build import build
from kvd.bench.launching import Launched
from kvd.bench.machine import Watch, resident_bytes
from kvd.bench.measuring import BenchError, Measured, OtherRunError, Server
from kvd.bench.plan import Point
from kvd.bench.prompts import seed_of
from kvd.bench.restart import restart
from kvd.bench.results import Place, Result
from kvd.bench.scenarios import SCENARIOS, measure_sizing, warm_up
from kvd.bench.trace import replay

_POLL_S = 0.1


@dataclass(slots=True)
class Target:
    """A server that is measured: how it is spoken to and, where the benchmark starts it, its process. Targets that share one are ways of asking one server.

    ``command`` is how a result tells that it was started: without what is another at each run, such as a temporary folder.
    """

    name: str
    server: Server
    url: str
    launched: Launched | None = None
    pid: int | None = None
    command: str = ""
    is_warm: bool = False

    async def server_pid(self) -> int | None:
        """Whose processor time and memory are counted."""
        if self.launched is not None:
            return self.launched.pid
        return self.pid if self.pid is not None else await self.server.pid()


@dataclass(frozen=True, slots=True)
class Entry:
    """A point of a plan: which targets it is measured on (None: all), how often in a row, and of how many rounds it takes part (None: all)."""

    point: Point
    targets: frozenset[str] | None = None
    repeats: int = 1
    rounds: int | None = None

    def has(self, target: str, round_: int) -> bool:
        return (self.targets is None or target in self.targets) and (self.rounds is None or round_ < self.rounds)


_Wanted = tuple[Target, Entry, Place]


@dataclass(slots=True)
class Progress:
    """What the runner says as it goes: ``said`` gets a line, ``advanced`` the number of measurements that are over."""

    said: Callable[[str], None] = lambda _: None
    advanced: Callable[[int], None] = lambda _: None


@dataclass(slots=True)
class Runner:
    """Measures a plan.

    Args:
        entries: the plan.
        targets: at least one; the first is what ratios are against.
        rounds: how often all targets are visited, in turns of order.
        result: new, or of a run that was cut short: what it has is not measured again.
        out: where the result is written after each measurement.
        wait_s: how long a server that the benchmark does not start is waited for.
        keeps_going: a measurement that fails is noted and the plan goes on; else it raises.
    """

    entries: Sequence[Entry]
    targets: Sequence[Target]
    rounds: int
    result: Result
    out: Path | None = None
    warmup_requests: int = 3
    settle_s: float = 3.0
    keeps_going: bool = False
    wait_s: float = 0.0
    progress: Progress = field(default_factory=Progress)

    def total(self) -> int:
        """Measurements that are still to be made."""
        return sum(1 for _ in self._wanted())

    async def run(self) -> Result:
        """Everything in order.

        Raises:
            BenchError: a target is gone or refuses, and the runner does not keep going; or a server outlives SIGKILL.
            OtherRunError: a target is not the one that the result has samples of, or the code of kvd is not what it was when the result was begun.
        """
        async with AsyncExitStack() as stack:
            for target in self.targets:
                stack.push_async_callback(target.server.aclose)
                if target.launched is not None:
                    stack.callback(target.launched.kill)
            visits = self._visits()
            if not visits:
                self.progress.said("nothing is left to measure")
            for visit in visits:
                await self._visit(visit)
        return self.result

    # --------------------------------------------------------------------------------------------------------- order

    def _wanted(self) -> Iterator[_Wanted]:
        done = self.result.places()
        for round_ in range(self.rounds):
            for target in self._order(round_):
                for entry in self.entries:
                    for repeat in range(entry.repeats):
                        place = Place(entry.point.key, target.name, round_, repeat)
                        if entry.has(target.name, round_) and place not in done:
                            yield target, entry, place

    def _order(self, round_: int) -> list[Target]:
        """Each target is as often early as late."""
        return [*self.targets] if round_ % 2 == 0 else [*reversed(self.targets)]

    def _visits(self) -> list[list[_Wanted]]:
        """Where servers are started one at a time, all points of a server in a row; targets on one server, or on servers that are there, change after each measurement."""
        rank = {entry.point.key: number for number, entry in enumerate(self.entries)}
        is_started = any(target.launched is not None for target in self.targets)
        visits: dict[tuple[int, int | str], list[_Wanted]] = {}
        for wanted in self._wanted():
            launched = wanted[0].launched
            server = id(launched) if launched is not None else wanted[0].name if is_started else ""
            visits.setdefault((wanted[2].round, server), []).append(wanted)
        for visit in visits.values():
            visit.sort(key=lambda each: (rank[each[2].key], each[2].repeat))
        return list(visits.values())

    # ----------------------------------------------------------------------------------------------------- measuring

    async def _visit(self, visit: Sequence[_Wanted]) -> None:
        """Measurements on one server, of one round."""
        first, _, began = visit[0]
        if first.launched is not None:
            first.launched.visit = f"{first.name}-{began.round}-{time.time_ns()}"
        try:
            for target, entry, place in visit:
                try:
                    await self._prepare(target)
                    await self._measure(target, entry.point, place)
                except BenchError as error:
                    if not self.keeps_going or isinstance(error, OtherRunError):
                        raise
                    self._fail(target, place, error)
                self.progress.advanced(1)
        finally:
            if first.launched is not None:
                first.launched.kill()

    async def _prepare(self, target: Target) -> None:
        """A server that answers, is warm, and whose sentences are counted."""
        launched = target.launched
        if launched is not None and launched.pid is None:
            if build() != self.result.facts["build"]:
                raise OtherRunError("the code of kvd has changed since the result was begun: give another --out")
            self.progress.said(f"{target.name}: starting")
            ready_s = await launched.start(target.server)
            start = {"target": target.name, "ready_s": round(ready_s, 3), "peak_unshared_bytes": launched.peak_start_bytes}
            self.result.facts.setdefault("starts", []).append(start)
            for each in self.targets:
                each.is_warm = each.is_warm and each.launched is not launched
        elif launched is None:
            await self._await_ready(target)
        if not target.is_warm:
            await self._identify(target)
            await warm_up(target.server, self.warmup_requests)
            target.is_warm = True
        if self.result.sizing is None:
            self.result.sizing = await measure_sizing(target.server)

    async def _identify(self, target: Target) -> None:
        """Note what the target is; refuse to go on with another one under its name. Where a server is started, its address may be another each time."""
        found = {"url": target.url, "version": await target.server.version(), "command": target.command}
        known = self.result.targets.setdefault(target.name, found)
        for what in ("version", "command") if target.launched is not None else ("version", "command", "url"):
            if known[what] != found[what]:
                then, now = (each[what] or "a server that was there already" for each in (known, found))
                raise OtherRunError(f"{target.name} was measured as {then}, and now it is {now}: give another --out")

    async def _await_ready(self, target: Target) -> None:
        until_s = time.monotonic() + self.wait_s
        while not await target.server.is_ready():
            if time.monotonic() >= until_s:
                raise BenchError(f"{target.name}: no server that is ready at {target.url}", kind="unavailable")
            await asyncio.sleep(_POLL_S)

    async def _measure(self, target: Target, point: Point, place: Place) -> None:
        self.progress.said(f"{target.name}: {point.key}, round {place.round + 1}")
        assert self.result.sizing is not None
        setting = Setting(point, seed_of(self.result.seed, place.key, place.round, place.repeat), self.result.sizing)
        pid = await target.server_pid()
        await target.server.figures()
        with Watch(None if point.scenario == "restart" else pid) as watch:
            measured = await self._run(target, setting)
        measured.metrics |= await target.server.figures()
        pid = await target.server_pid()
        self.result.recovered += [each for each in self.result.failures if place.is_of(each)]
        self.result.failures[:] = [each for each in self.result.failures if not place.is_of(each)]
        self.result.samples.append(
            {
                "key": place.key,
                "point": point.as_dict(),
                "target": target.name,
                "round": place.round,
                "repeat": place.repeat,
                "at_unix_s": round(time.time(), 1),
                "metrics": {name: float(f"{value:.6g}") for name, value in measured.metrics.items()},
                **watch.found,
                "resident_bytes": resident_bytes(pid) if pid is not None else None,
                "load": round(os.getloadavg()[0], 2),
                "requests": [each.as_dict() for each in measured.answers],
                "warnings": measured.warnings,
            }
        )
        self._save()

    async def _run(self, target: Target, setting: Setting) -> Measured:
        match setting.point.scenario:
            case "restart":
                if target.launched is None:
                    raise BenchError(
                        f"{target.name}: the scenario restart kills the server, and needs --server-command for it", kind="usage"
                    )
                return await restart(target.server, setting, target.launched, settle_s=self.settle_s)
            case "trace":
                return await replay(target.server, setting)
            case scenario:
                return await SCENARIOS[scenario](target.server, setting)

    def _fail(self, target: Target, place: Place, error: BenchError) -> None:
        """Note it, and give the next measurement a server that knows nothing of it."""
        self.progress.said(f"{target.name}: {place.key} failed: {error}")
        self.result.failures.append({**asdict(place), "error": str(error)})
        if target.launched is not None:
            target.launched.kill()
        self._save()

    def _save(self) -> None:
        if self.out is not None:
            self.result.write(self.out)
