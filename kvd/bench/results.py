"""The result file: JSON with a version, written anew after each measurement, so that a run that was cut short can go on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.bench.machine import machine, today, versions
from kvd.bench.measuring import BenchError
from kvd.bench.prompts import Sizing

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run a sample stands. Samples of two targets with the same key, round and repeat are a pair."""

    key: str
    target: str
    round: int
    repeat: int


@dataclass(slots=True)
class Result:
    """All samples of a run, on one machine.

    Attributes:
        targets: by name, what they are: ``url``, ``version``.
        samples: as in the file, each with ``point``, ``key``, ``target``, ``round``, ``repeat``, ``metrics``, ``requests``, ``warnings`` and what ``Watch`` found.
        failures: measurements that could not be made: ``key``, ``target``, ``round``, ``error``.
    """

    seed: int
    facts: dict[str, Any] = field(default_factory=dict)
    sizing: Sizing | None = None
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begun(cls, seed: int) -> Result:
        """An empty one, with the facts of this machine and moment."""
        load = round(os.getloadavg()[0], 2)
        return cls(seed, {"date": today(), "machine": machine(), "load_before": load, "driver": versions()})

    def places(self) -> set[Place]:
        """What has been measured."""
        return {Place(each["key"], each["target"], each["round"], each["repeat"]) for each in self.samples}

    def values(self, key: str, target: str, metric: str) -> dict[tuple[int, int], float]:
        """A figure by round and repeat."""
        return {
            (each["round"], each["repeat"]): each["metrics"][metric]
            for each in self.samples
            if each["key"] == key and each["target"] == target and metric in each["metrics"]
        }

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
    facts = {name: data[name] for name in ("date", "machine", "load_before", "driver", "starts") if name in data}
    sizing = Sizing(*data["sizing"]) if data["sizing"] else None
    return Result(data["seed"], facts, sizing, data["targets"], data["samples"], data["failures"])


def merged(results: Iterable[Result]) -> Result:
    """Several results of one machine as one; rounds of the same point are numbered on.

    Raises:
        BenchError: they are of different machines: their figures can't be compared.
    """
    first, *others = results
    for offset, other in enumerate(others, 1):
        if other.facts["machine"] != first.facts["machine"]:
            raise BenchError(
                f"results of different machines can't be compared: {first.facts['machine']}; {other.facts['machine']}", kind="usage"
            )
        first.targets |= other.targets
        first.samples += [{**each, "round": each["round"] + 1000 * offset} for each in other.samples]
        first.failures += other.failures
    return first
