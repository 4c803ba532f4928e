"""The adapters' store with its answers going into the engine's inbox."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kvd.commands import AdapterNames, AdapterRead, Command
from kvd.config import AdaptersConfig, ConfigError
from kvd.executor.adapter_files import AdapterError
from kvd.executor.adapter_store import AdapterStore, AdapterTarget, ReadAdapter
from kvd.executor.worker import ExecutorThread


class Inbox(Protocol):
    """The engine's, from inside the daemon."""

    def put_internal(self, command: Command, /) -> None: ...


def open_adapters(config: AdaptersConfig, target: AdapterTarget, executor: ExecutorThread, inbox: Inbox) -> AdapterStore | None:
    """The store of the configured directory; None where none is configured.

    Raises:
        ConfigError: there is no such directory.
    """
    if not config.adapter_dir:
        return None

    def on_read(read_id: int, result: ReadAdapter) -> None:
        inbox.put_internal(
            AdapterRead(read_id, result.digest, result.rank, result.num_bytes, error=result.error, is_missing=result.is_missing)
        )

    def on_names(op_id: bytes, names: list[str], error: str) -> None:
        inbox.put_internal(AdapterNames(op_id, tuple(names), error))

    try:
        return AdapterStore(Path(config.adapter_dir), target, in_order=executor.call, on_read=on_read, on_names=on_names)
    except AdapterError as error:
        raise ConfigError(str(error)) from error
