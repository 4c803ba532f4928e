"""The adapters of a directory: read, checked and packed on a thread of its own, kept until they are wanted, and handed to the runner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from kvd.executor.adapter_files import AdapterError, AdapterFiles, AdapterNotFoundError, adapter_names, read_adapter_files
from kvd.executor.worker import ExecutorError
from kvd.observe.logging import get_logger


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter as a runner takes it."""

    rank: int
    adapter: Any


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """How a read ended: with an adapter that waits to be installed, or with an error."""

    digest: bytes = b""
    rank: int = 0
    num_bytes: int = 0
    error: str = ""
    is_missing: bool = False


class AdapterTarget(Protocol):
    """What runs adapters."""

    @property
    def max_adapter_bytes(self) -> int:
        """Bytes of an adapter's weights file, at most."""

    def pack_adapter(self, files: AdapterFiles) -> PackedAdapter:
        """Make an adapter of this model; called from the store's thread.

        Raises:
            AdapterError: it can't be used.
        """

    def install_adapter(self, digest: bytes, adapter: Any) -> None:
        """Rows may begin with it from now on."""

    def remove_adapter(self, digest: bytes) -> None:
        """Rows begin with it no more."""


class AdapterStore:
    """The subdirectories of ``directory``, by name. Methods may be called from any thread."""

    def __init__(
        self,
        directory: Path,
        target: AdapterTarget,
        *,
        in_order: Callable[[Callable[[], None]], object],
        on_read: Callable[[int, ReadAdapter], None],
        on_names: Callable[[bytes, list[str], str], None],
    ) -> None:
        """``in_order`` does something between the steps that were submitted before and those that come after: a step that is on its way may begin a row with an adapter
        that nobody wants any more. ``on_read(read_id, result)`` and ``on_names(op_id, names, error)`` are called on the store's thread.

        Raises:
            AdapterError: there is no such directory.
        """
        if not directory.is_dir():
            raise AdapterError(f"adapter_dir = {directory}: no such directory")
        self._directory = directory
        self._target = target
        self._in_order = in_order
        self._on_read = on_read
        self._on_names = on_names
        self._read: dict[int, PackedAdapter] = {}
        """By read, until it is installed or discarded: whatever is removed meanwhile, a read keeps what it found."""
        self._packed: dict[bytes, PackedAdapter] = {}
        """Installed and not removed since, by digest."""
        self._lock = threading.Lock()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="kvd-adapters", daemon=True).start()

    def digest_of(self, name: str) -> bytes:
        """The digest of what stands under ``name`` now; reads it.

        Raises:
            AdapterError: it can't be read.
        """
        return read_adapter_files(self._directory, name, self._target.max_adapter_bytes).digest

    def read(self, read_id: int, name: str) -> None:
        """Read and pack an adapter; ``on_read`` is called when that is over."""
        self._work.put(lambda: self._on_read(read_id, self._pack(read_id, name)))

    def list_names(self, op_id: bytes) -> None:
        """Find the adapters there are; ``on_names`` is called with them."""
        self._work.put(lambda: self._list(op_id))

    def install(self, read_id: int, digest: bytes) -> None:
        """Have the runner take what a read has brought."""
        with self._lock:
            packed = self._packed[digest] = self._read.pop(read_id)
        self._between_steps(lambda: self._target.install_adapter(digest, packed.adapter))

    def discard(self, read_id: int) -> None:
        """Forget what a read has brought; what is installed stays."""
        with self._lock:
            del self._read[read_id]

    def remove(self, digest: bytes) -> None:
        """Forget an adapter; rows that run with it keep it until they are over."""
        self._between_steps(lambda: self._target.remove_adapter(digest))
        with self._lock:
            self._packed.pop(digest, None)

    def _between_steps(self, work: Callable[[], None]) -> None:
        with suppress(ExecutorError):  # no further step runs, which whoever collects the last one hears of
            self._in_order(work)

    def close(self) -> None:
        """Let the thread end, after what it was asked for."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _pack(self, read_id: int, name: str) -> ReadAdapter:
        try:
            files = read_adapter_files(self._directory, name, self._target.max_adapter_bytes)
            with self._lock:
                packed = self._packed.get(files.digest)
            if packed is None:
                packed = self._target.pack_adapter(files)
            with self._lock:
                self._read[read_id] = packed
        except AdapterError as error:
            return ReadAdapter(error=str(error), is_missing=isinstance(error, AdapterNotFoundError))
        except Exception as error:  # whatever it is, those who wait must hear of it
            get_logger("adapters").error("internal_error", adapter=name, error=repr(error), exc_info=error)
            return ReadAdapter(error=f"adapter {name}: the daemon met a fault of its own: {type(error).__name__}")
        return ReadAdapter(files.digest, packed.rank, files.num_bytes)

    def _list(self, op_id: bytes) -> None:
        try:
            names, error = adapter_names(self._directory), ""
        except AdapterError as failure:
            names, error = [], str(failure)
        self._on_names(op_id, names, error)
