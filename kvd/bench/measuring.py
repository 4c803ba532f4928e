"""What one request and one measurement are, as data, and the client that every target gives."""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvd.bench.prompts import Messages


class BenchError(Exception):
    """A measurement can't be made: what is wrong, and what to do. ``kind`` is ``usage``, ``unavailable``, ``refused`` or ``failed``."""

    def __init__(self, message: str, *, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


class OtherRunError(BenchError):
    """What would be measured now is not what the result has: figures of two seeds, machines or builds are not to be mixed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="usage")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request without an early end: ``max_tokens`` come out of it for each of ``n`` answers. Greedy, or drawn at temperature 1 by a ``seed``.

    ``began`` is set as soon as the answer's first token is here.
    """

    messages: Messages
    max_tokens: int
    n: int = 1
    seed: int | None = None
    began: asyncio.Event | None = field(default=None, compare=False)


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times are seconds of ``time.perf_counter``.

    ``arrivals`` has the time of each piece, ``pieces`` the tokens in it (where the target doesn't say: one). ``restored_tokens`` is None where the target knows no such thing,
    ``drafted_tokens`` and, of these, ``accepted_tokens`` where it doesn't tell or drafted nothing.
    """

    asked_s: float
    arrivals: list[float] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    ended_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    restored_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None

    def took(self, ask: Ask, num_tokens: int) -> None:
        """A piece is here, of so many tokens."""
        self.arrivals.append(time.perf_counter())
        self.pieces.append(num_tokens)
        if ask.began is not None:
            ask.began.set()

    @property
    def ttft_s(self) -> float:
        """From asking until the first token was here; of an answer without visible text until its end."""
        return (self.arrivals[0] if self.arrivals else self.ended_s) - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring pieces."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def tokens_within(self, begin_s: float, end_s: float) -> float:
        """Tokens that came after ``begin_s`` and not after ``end_s``, each piece weighed by the tokens that it must have held on average."""
        weight = self.completion_tokens / sum(self.pieces) if self.completion_tokens and self.pieces else 1.0
        return weight * sum(size for at, size in zip(self.arrivals, self.pieces, strict=True) if begin_s < at <= end_s)

    def as_dict(self) -> dict[str, Any]:
        """What is kept of it in a result."""
        return {
            "ttft_s": round(self.ttft_s, 5),
            "total_s": round(self.ended_s - self.asked_s, 5),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "restored_tokens": self.restored_tokens,
            "completion_tokens": self.completion_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "text_crc32": zlib.crc32(self.text.encode()),
        }


class Server(Protocol):
    """A target as the driver uses it."""

    async def ask(self, ask: Ask) -> Answer:
        """Stream one answer.

        Raises:
            BenchError: it failed, or the server is gone.
        """

    async def is_ready(self) -> bool:
        """Whether requests would be served now. Never raises for a server that is not there yet."""

    async def version(self) -> str:
        """The server's own name and version, as far as it tells."""

    async def pin(self, name: str, messages: Messages) -> bool:
        """Keep what these messages begin with over a restart; False where the target has no such thing."""

    async def pid(self) -> int | None:
        """The server's process, where the target tells."""

    async def figures(self) -> dict[str, float]:
        """What the client itself found since the last call, besides the answers."""

    async def aclose(self) -> None:
        """Let the connection go."""


@dataclass(slots=True)
class Measured:
    """What one run of a scenario gave: named figures, and the requests that they were made of."""

    metrics: dict[str, float]
    answers: list[Answer] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
