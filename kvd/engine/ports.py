"""What the engine loop needs of the world. Implementers don't import this; the type checker proves the fit in daemon.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvd.cache.events import CacheEvent
from kvd.cache.tenants import Selection
from kvd.commands import Command, Event, Recipe
from kvd.step import ExecutorOutput, SchedulerOutput
from kvd.types import BlockHash


class Inbox(Protocol):
    """Commands for the engine, from the edge and from storage. Bounded; a full inbox blocks nobody: the edge answers ``overloaded``."""

    def drain(self) -> list[Command]:
        """Take everything that waits, oldest first; never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something waits or the time is over; whether something waits."""


class Outbox(Protocol):
    def put(self, events: Sequence[Event]) -> None:
        """Hand a step's events to the edge in order; never blocks (stream credit bounds what may be unread)."""


class Ticket(Protocol):
    """Work handed to the executor's queue."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the work is done; re-raises nothing (``collect`` does)."""


class Executor(Protocol):
    """Runs steps in the order of ``submit``, one queue with copy-out and copy-in (storage/ports.py BlockIO)."""

    def submit(self, step: SchedulerOutput) -> Ticket: ...

    def collect(self, ticket: Ticket) -> ExecutorOutput:
        """Wait for a step's result. Whatever the step raised is raised here; then the executor is not used again."""


class CacheObserver(Protocol):
    """Storage, as the loop sees it. Called on the engine thread between submit and collect; must not block."""

    def on_step(self, step: int, events: Sequence[CacheEvent]) -> None: ...

    def set_queue_depth(self, num_waiting: int) -> None:
        """For the governor: how many requests wait."""

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step has computed ``num_tokens`` of prompts, alone or beside decoding, in so long: what loading from disk is weighed against."""

    def idle_delay_s(self) -> float:
        """Seconds after which an idle loop should call ``on_step`` again."""

    def checkpoint_now(self, op_id: bytes) -> None:
        """Persist every hot block; ``CheckpointDone`` comes through the inbox."""

    def forget(self, op_id: bytes, selection: Selection, pins: dict[str, Recipe]) -> None:
        """Have a selection, which has left memory, leave the disk, and ``pins``, which are in it; ``ForgetDone`` comes through the inbox."""

    def is_forgetting(self, recipe: Recipe) -> bool:
        """Whether a forget that was begun, by this life or an earlier one, and is not done would take this pin too."""

    @property
    def may_forget(self) -> bool:
        """Whether there is room for another forget beside those that are not done."""

    def block_on_disk(self, block_hash: BlockHash) -> tuple[bool, float]:
        """Whether a block's bytes are on disk, and when a request last used it (seconds since the epoch, 0 if unknown)."""

    def status(self) -> dict[str, Any]:
        """The ``store`` part of the status report."""

    def stats(self) -> dict[str, Any]:
        """Counters of WAL and checkpoints for the stats report."""


class AdapterSource(Protocol):
    """LoRA adapters on disk and in the executor. Never blocks; what takes time is told through the inbox, as ``AdapterRead`` and ``AdapterNames``."""

    def read(self, read_id: int, name: str) -> None:
        """Read an adapter. What a read without an error has brought is its own until it is installed or discarded."""

    def list_names(self, op_id: bytes) -> None:
        """Find the adapters on disk."""

    def install(self, read_id: int, digest: bytes) -> None:
        """Rows may begin with what this read has brought from now on."""

    def discard(self, read_id: int) -> None:
        """What this read has brought is not wanted, or there already."""

    def remove(self, digest: bytes) -> None:
        """No further row begins with it, and its memory is free when the last one is over."""


class RecipeBook(Protocol):
    """The durable pins (storage/recipes.py). Completion comes through the inbox as ``RecipeDurable``."""

    def recipes(self) -> dict[str, Recipe]:
        """Every recipe, those waiting for their fsync included."""

    def put(self, op_id: bytes, recipe: Recipe) -> None: ...

    def remove(self, op_id: bytes, name: str) -> None: ...


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, never going back."""

    def unix(self) -> float:
        """Seconds since the epoch."""
