"""What the edge knows and what it has to say: shared by the session's parts, owned by the edge's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvd_client.protocol.codec import encode
from kvd_client.protocol.messages import Failed, Message

from kvd.commands import Command, Hello, Snapshot, Stopped
from kvd.config import TransportConfig
from kvd.observe.logging import get_logger
from kvd.transport.bodies import TextJob
from kvd.transport.counters import Counters
from kvd.transport.errors import RequestError
from kvd.transport.ports import Text
from kvd.types import RETRYABLE_CODES, ErrorCode

_MAX_FAILURE_CHARS = 2000
RETRY_AFTER_S = 0.5
"""What a retryable refusal advises when nothing better is known."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for one peer. ``request_id`` names the request of whose answer it is a part, and whose credit ``num_tokens`` use; a terminal message outlives its request."""

    peer: bytes
    frames: list[bytes]
    request_id: bytes = b""
    num_tokens: int = 0

    @property
    def is_stream(self) -> bool:
        """Whether it gives way to terminal messages where too much waits; its request fails then."""
        return bool(self.request_id)

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames, with an allowance for what holds them."""
        return sum(map(len, self.frames)) + 256


@dataclass(slots=True)
class Edge:
    """Facts about the engine as last heard, the text model once it is loaded, and the three ways out."""

    config: TransportConfig
    instance: bytes
    put: Callable[[Command], bool]
    drain_timeout_s: float
    counters: Counters = field(default_factory=Counters)
    hello: Hello | None = None
    text: Text | None = None
    snapshot: Snapshot = field(default_factory=lambda: Snapshot("starting", {"state": "starting"}, {}))
    stopped: bool = False
    flush_s: float = Stopped().flush_s
    outgoing: list[Outgoing] = field(default_factory=list)
    text_jobs: list[TextJob] = field(default_factory=list)
    log: Any = field(default_factory=lambda: get_logger("transport"))
    num_text_jobs: int = 0
    num_text_bytes: int = 0

    def send(self, peer: bytes, message: Message, *bodies: bytes, request_id: bytes = b"", num_tokens: int = 0) -> None:
        """Queue a message; one with a ``request_id`` is a part of that request's answer."""
        self.outgoing.append(Outgoing(peer, encode(message, *bodies), request_id, num_tokens))

    def send_failed(self, peer: bytes, error: RequestError, *, request_id: bytes = b"", op_id: bytes = b"") -> None:
        """Queue the terminal message of a request or operation that failed; raises nothing, whatever the error's text holds."""
        self.send(
            peer,
            Failed(
                code=error.code,
                message=error.message[:_MAX_FAILURE_CHARS].encode("utf-8", "replace").decode("utf-8"),
                request_id=request_id,
                op_id=op_id,
                retryable=error.code in RETRYABLE_CODES,
                retry_after_s=error.retry_after_s,
            ),
        )

    def require_ready(self) -> tuple[Hello, Text]:
        """The engine's facts and the text model, when requests can be served.

        Raises:
            RequestError: ``starting`` or ``draining``, retryable.
        """
        state = self.snapshot.state
        if self.stopped or state == "draining":
            raise RequestError(ErrorCode.DRAINING, "the daemon is shutting down", retry_after_s=1.0)
        if state != "ready" or self.hello is None or self.text is None:
            raise self.starting()
        return self.hello, self.text

    def starting(self) -> RequestError:
        """The answer while the daemon is not ready."""
        retry_after_s = max(self.snapshot.ready_in_s, RETRY_AFTER_S)
        return RequestError(ErrorCode.STARTING, f"the daemon is {self.snapshot.state}", retry_after_s=retry_after_s)

    def internal_error(self, error: BaseException) -> RequestError:
        """A fault of the daemon's own: counted, logged, and what the request that met it is told."""
        self.counters.internal_errors += 1
        self.log.error("internal_error", error=repr(error), exc_info=error)
        return RequestError(ErrorCode.INTERNAL, f"the daemon met a fault of its own: {type(error).__name__}")

    def put_or_refuse(self, command: Command) -> None:
        """Hand a command to the engine.

        Raises:
            RequestError: ``overloaded``, if its inbox is full.
        """
        if not self.put(command):
            raise RequestError(ErrorCode.OVERLOADED, "too many commands wait for the engine (inbox_capacity)", retry_after_s=RETRY_AFTER_S)

    def queue_text(self, job: TextJob) -> None:
        """Hand a body to the text threads.

        Raises:
            RequestError: ``overloaded``, if too many prompts or too many bytes of them wait.
        """
        config = self.config
        for limit, is_full in (
            ("max_text_jobs", self.num_text_jobs >= config.max_text_jobs),
            ("max_text_bytes", self.num_text_bytes + job.num_bytes > max(config.max_text_bytes, job.num_bytes)),
        ):
            if is_full:
                raise RequestError(ErrorCode.OVERLOADED, f"too many prompts wait to be tokenised ({limit})", retry_after_s=RETRY_AFTER_S)
        self.num_text_jobs += 1
        self.num_text_bytes += job.num_bytes
        self.text_jobs.append(job)

    def text_done(self, num_bytes: int) -> None:
        """A text thread has finished a job of so many body bytes."""
        self.num_text_jobs -= 1
        self.num_text_bytes -= num_bytes
