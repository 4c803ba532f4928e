"""Where a model's adapters go: made for its decoder, and handed to the runner's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.executor.adapter_files import AdapterFiles
from kvd.executor.adapter_store import PackedAdapter
from kvd.executor.adapters import Adapter, max_adapter_bytes, plan_adapter
from kvd.executor.models.spec import ModelSpec
from kvd.executor.row_adapters import RowAdapters


class ModelAdapters:
    """An ``AdapterTarget`` (adapter_store.py). Before the weights are there, adapters can be read but not packed."""

    def __init__(self, spec: ModelSpec, why_not: str = "") -> None:
        self.why_not = why_not
        """Why adapters are not computed here; empty where they are."""
        self.max_rank = 0
        """The largest rank that is taken; 0: none at all."""
        self._spec = spec
        self._rows: RowAdapters[Any] | None = None
        self._pack: Callable[[Adapter], Any] | None = None

    @property
    def max_adapter_bytes(self) -> int:
        """Bytes of an adapter's weights file, at most."""
        return max_adapter_bytes(self._spec, self.max_rank)

    def attach(self, rows: RowAdapters[Any], pack: Callable[[Adapter], Any]) -> None:
        """The weights are there: ``pack`` makes an adapter of their decoder, ``rows`` are the runner's."""
        self._rows, self._pack = rows, pack

    def pack_adapter(self, files: AdapterFiles) -> PackedAdapter:
        """Raises:
        AdapterError: it can't be used with this model.
        """
        assert self._pack is not None, "an adapter before the weights"
        adapter = plan_adapter(files, self._spec, self.max_rank)
        return PackedAdapter(adapter.rank, self._pack(adapter))

    def install_adapter(self, digest: bytes, adapter: Any) -> None:
        assert self._rows is not None, "an adapter before the weights"
        self._rows.install(digest, adapter)

    def remove_adapter(self, digest: bytes) -> None:
        assert self._rows is not None, "an adapter before the weights"
        self._rows.remove(digest)
