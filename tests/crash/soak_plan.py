"""What a soak does, as data: which lives the daemon has and how each ends, and what each client asks for. A function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from kvd.config import DaemonConfig, StorageConfig

NUM_CLIENTS = 4
PINS_PER_CLIENT = 2
BLOCK = 16
SALTS = (b"", b"", b"", b"tenant-a", b"tenant-b")

_PHRASE = "In house {0} the rule {0} says that nobody touches the paintings, and that whoever does signs the ledger. "
PREFIXES = tuple((_PHRASE.format(number) * 4)[: 16 * (6 + 3 * number)] for number in range(6))
"""Beginnings that requests share."""
PIN_TEXTS = tuple(
    (f"Pinned text {number}: the ledger lies open, the pen beside it, and the ink is dry. " * 3)[: BLOCK * (3 + number)]
    for number in range(8)
)
"""What pins hold; each has a length of its own, by which it is told from the others."""


@dataclass(frozen=True, slots=True)
class Life:
    """One start of the daemon, and its end.

    ``end``: ``kill`` (so many seconds after READY), ``start`` (killed so many seconds after exec), ``double`` (killed, started and killed during that
    start), ``failpoint`` (dies where ``failpoints`` says, by SIGKILL if it does not get there), ``fault`` (an I/O error, then killed), ``terminate``,
    ``drain`` (by a client) or ``impatient`` (SIGTERM and soon SIGKILL).
    """

    number: int
    end: str
    after_s: float
    then_s: float
    flags: tuple[str, ...]
    failpoints: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """One thing that a client does. Which fields count depends on ``kind``."""

    kind: str
    text: str = ""
    max_tokens: int = 8
    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    salt: bytes = b""
    stream: bool = False
    read_tokens: int = 0
    """Tokens after which a stream is dropped; 0: read to its end."""
    slot: int = 0
    """Which of the client's pins."""
    content: int = 0
    priority: int = 50
    pause_s: float = 0.0


_ENDS = {"kill": 34, "start": 14, "double": 8, "failpoint": 20, "fault": 6, "terminate": 8, "drain": 4, "impatient": 6}


def is_encrypted(seed: int) -> bool:
    """Whether all lives of a seed have an encryption key."""
    return random.Random(f"{seed}/key").random() < 0.5


def plan_life(seed: int, number: int, failpoints: Sequence[str]) -> Life:
    """The ``number``-th life. ``failpoints`` are all names that the daemon knows."""
    rng = random.Random(f"{seed}/life/{number}")
    end = rng.choices(list(_ENDS), list(_ENDS.values()))[0]
    flags = [
        "--checkpoint-interval-s",
        f"{rng.choice((0.1, 0.3, 1.0, 5.0))}",
        "--drain-timeout-s",
        "10",
        "--wal-segment-bytes",
        "64KiB",
        "--wal-max-bytes",
        "4MiB",
    ]
    flags += ["--kv-memory", rng.choice(("128KiB", "256KiB", "2MiB"))]
    flags += ["--store-max-bytes", rng.choice(("32MiB", "64MiB", "1GiB"))]
    flags += ["--fake-step-ms", rng.choice(("0", "0", "1", "5"))]
    flags += ["--max-tokens-per-step", rng.choice(("48", "256", "512"))]
    flags += ["--max-steps-in-flight", rng.choice(("1", "2"))]
    flags += ["--wal-sync-interval-ms", rng.choice(("0", "5", "20"))]
    flags += ["--frontend", rng.choice(("thread", "thread", "thread", "process"))]
    known = {each.name for each in fields(StorageConfig)} | {
        each.name for room in fields(DaemonConfig) for each in fields(room.default_factory)
    }
    for key, values in _LATER_KEYS.items():
        value = rng.choice(values)
        if key in known:
            flags += [f"--{key.replace('_', '-')}", value]
    spec = ""
    if end == "failpoint":
        spec = f"{rng.choice(sorted(failpoints))}=kill@{rng.choice((1, 1, 1, 2, 3, 5))}"
    elif end == "fault":
        spec = f"{rng.choice(sorted(failpoints))}=raise@{rng.choice((1, 1, 2, 4))}"
    return Life(number, end, rng.choice((0.0, 0.05, 0.2, 0.4, 0.8)) * rng.random() * 2, rng.uniform(0.05, 1.5), tuple(flags), spec)


_LATER_KEYS = {
    "write_policy": ("selective", "through", "shutdown"),
    "durability": ("fsync", "fsync", "interval"),
    "cold_tier": ("auto", "always", "never"),
    "eviction_policy": ("lru", "cost"),
}
"""Keys that not every version has."""


def plan_client(seed: int, client: int) -> Iterator[Op]:
    """What a client does, without end."""
    rng = random.Random(f"{seed}/client/{client}")
    number = 0
    while True:
        number += 1
        kind = rng.choices(("ask", "pin", "unpin", "ask_pin", "checkpoint", "report", "forget"), (55, 12, 4, 17, 4, 4, 3))[0]
        pause_s = rng.choice((0.0, 0.0, 0.0, 0.02, 0.1))
        slot, content = rng.randrange(PINS_PER_CLIENT), rng.randrange(len(PIN_TEXTS))
        if kind == "ask":
            prefix = rng.choice(PREFIXES) if rng.random() < 0.8 else f"A text of {client}/{number} alone. " * rng.randint(1, 8)
            n = rng.choice((1, 1, 1, 2, 3))
            is_stream = rng.random() < 0.5
            max_tokens = rng.choice((1, 4, 16, 40))
            yield Op(
                kind,
                text=prefix + f" {rng.randrange(40)}?",
                max_tokens=max_tokens,
                n=n,
                temperature=0.0 if n == 1 else 0.9,
                seed=rng.randrange(1000),
                salt=rng.choice(SALTS),
                stream=is_stream,
                read_tokens=rng.randint(1, max_tokens) if is_stream and rng.random() < 0.2 else 0,
                priority=rng.choice((0, 50, 100)),
                pause_s=pause_s,
            )
        else:
            yield Op(
                kind,
                text=f" and {client}/{number}?",
                slot=slot,
                content=content,
                salt=rng.choice(SALTS),
                priority=rng.choice((0, 50, 100)),
                pause_s=pause_s,
            )
