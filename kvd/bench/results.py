"""The result file: JSON with a version, written anew after each measurement, so that a run that was cut short can go on where it was."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.bench.build import build, commit
from kvd.bench.machine import machine, today, versions
from kvd.bench.measuring import BenchError, OtherRunError
from kvd.bench.prompts import Sizing

SCHEMA = 2
_FACTS = ("date", "machine", "load_before", "driver", "commit", "build", "starts")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run a sample stands. Samples of two targets with the same key, round and repeat are a pair."""

    key: str
    target: str
    round: int
    repeat: int

    def is_of(self, record: dict[str, Any]) -> bool:
        """Whether a sample or a failure of the file stands here."""
        return Place(record["key"], record["target"], record["round"], record["repeat"]) == self


@dataclass(frozen=True, slots=True)
class RoundFigure:
    """A figure's median over the repeats of one round, and when they were over, in the mean (Unix seconds)."""

    value: float
    at_unix_s: float


@dataclass(slots=True)
class Result:
    """All samples of a run, on one machine and of one build.

    Attributes:
        targets: by name, what they are: ``url``, ``version``, ``command`` (empty where the benchmark doesn't start it).
        samples: as in the file, each with ``point``, ``key``, ``target``, ``round``, ``repeat``, ``metrics``, ``requests``, ``warnings`` and what ``Watch`` found.
        failures: measurements that could not be made: ``key``, ``target``, ``round``, ``repeat``, ``error``.
        recovered: failures that a later try of the same place made good.
    """

    seed: int
    facts: dict[str, Any] = field(default_factory=dict)
    sizing: Sizing | None = None
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    recovered: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begun(cls, seed: int) -> Result:
        """An empty one, with the facts of this machine, this build and this moment."""
        load = round(os.getloadavg()[0], 2)
        facts = {"date": today(), "machine": machine(), "load_before": load, "driver": versions(), "commit": commit(), "build": build()}
        return cls(seed, facts)

    def places(self) -> set[Place]:
        """What has been measured."""
        return {Place(each["key"], each["target"], each["round"], each["repeat"]) for each in self.samples}

    def values(self, key: str, target: str, metric: str) -> dict[tuple[int, int], float]:
        """A figure by round and repeat."""
        return {(each["round"], each["repeat"]): each["metrics"][metric] for each in self._having(key, target, metric)}

    def by_round(self, key: str, target: str, metric: str) -> dict[int, RoundFigure]:
        """A figure by round."""
        found: dict[int, list[tuple[float, float]]] = {}
        for each in self._having(key, target, metric):
            found.setdefault(each["round"], []).append((each["metrics"][metric], each["at_unix_s"]))
        return {
            round_: RoundFigure(statistics.median(value for value, _ in pairs), statistics.fmean(at_s for _, at_s in pairs))
            for round_, pairs in found.items()
        }

    def _having(self, key: str, target: str, metric: str) -> list[dict[str, Any]]:
        return [each for each in self.samples if each["key"] == key and each["target"] == target and metric in each["metrics"]]

    def peak_unshared_bytes(self, target: str) -> int | None:
        """RssAnon + RssShmem of a target's processes at their most: while they started, and after each measurement. None where nobody looked."""
        starts = [each["peak_unshared_bytes"] for each in self.facts.get("starts", []) if each["target"] == target]
        loaded = [each["resident_bytes"]["unshared"] for each in self.samples if each["target"] == target and each["resident_bytes"]]
        return max([*starts, *loaded], default=None)

    def point_keys(self) -> list[str]:
        """The points in the order of their first sample."""
        return list(dict.fromkeys(each["key"] for each in self.samples))

    def targets_of(self, key: str) -> list[str]:
        """The targets that a point was measured on."""
        measured = {each["target"] for each in self.samples if each["key"] == key}
        return [name for name in self.targets if name in measured]

    def metrics_of(self, key: str) -> list[str]:
        """The figures of a point."""
        return list(dict.fromkeys(name for each in self.samples if each["key"] == key for name in each["metrics"]))

    def warnings(self) -> list[str]:
        """All of them, once each, with their target."""
        return list(dict.fromkeys(f"{each['target']}, {each['key']}: {text}" for each in self.samples for text in each["warnings"]))

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "kvd-bench",
            "seed": self.seed,
            **self.facts,
            "sizing": None if self.sizing is None else [self.sizing.fixed_tokens, self.sizing.sentence_tokens],
            "targets": self.targets,
            "samples": self.samples,
            "failures": self.failures,
            "recovered": self.recovered,
        }

    def write(self, path: Path) -> None:
        """Replace the file as a whole."""
        temporary = path.with_name(f"{path.name}.part")
        try:
            temporary.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise BenchError(f"the result can't be written: {error}", kind="output") from error


def read_result(path: Path) -> Result:
    """A result from its file.

    Raises:
        BenchError: it is none, or of another version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path} can't be read: {error}", kind="usage") from error
    except ValueError as error:
        raise BenchError(f"{path} is no result of kvd bench: {error}", kind="usage") from error
    if not isinstance(data, dict) or data.get("kind") != "kvd-bench":
        raise BenchError(f"{path} is no result of kvd bench", kind="usage")
    if data.get("schema") != SCHEMA:
        raise BenchError(f"{path} has schema {data.get('schema')}; this version of kvd reads {SCHEMA}", kind="usage")
    facts = {name: data[name] for name in _FACTS if name in data}
    sizing = Sizing(*data["sizing"]) if data["sizing"] else None
    return Result(data["seed"], facts, sizing, data["targets"], data["samples"], data["failures"], data["recovered"])


def open_result(path: Path | None, seed: int) -> Result:
    """A new result, or that of a file which is there and is gone on with.

    Raises:
        BenchError: the file is none, or of another version.
        OtherRunError: it was measured with another seed, machine or build of kvd.
    """
    if path is None or not path.exists():
        return Result.begun(seed)
    result, now = read_result(path), Result.begun(seed)
    facts = [("machine", result.facts["machine"], now.facts["machine"]), ("build", result.facts["build"], now.facts["build"])]
    for what, then, current in [("seed", result.seed, seed), *facts]:
        if then != current:
            raise OtherRunError(f"{path} was measured with {what} {then}, and now it is {current}: give another --out, or remove the file")
    return result


def merged(results: Iterable[Result]) -> Result:
    """Several results of one machine as one; rounds of the same point are numbered on.

    Raises:
        BenchError: they are of different machines, or name different builds of a target alike: their figures can't be compared.
    """
    first, *others = results
    build_of = {name: (first.facts["build"], target["version"], target["command"]) for name, target in first.targets.items()}
    for offset, other in enumerate(others, 1):
        if other.facts["machine"] != first.facts["machine"]:
            raise BenchError(
                f"results of different machines can't be compared: {first.facts['machine']}; {other.facts['machine']}", kind="usage"
            )
        for name, target in other.targets.items():
            found = (other.facts["build"], target["version"], target["command"])
            if build_of.setdefault(name, found) != found:
                raise BenchError(f"the results mean different servers by {name!r}: {build_of[name]}; {found}", kind="usage")
        first.targets |= other.targets
        first.samples += [{**each, "round": each["round"] + 1000 * offset} for each in other.samples]
        first.failures += other.failures
        first.recovered += other.recovered
    return first
