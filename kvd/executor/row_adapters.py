"""Which row runs with which LoRA adapter, and the adapters that are there. Rows without one cost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.executor.adapter_files import AdapterError, StoredTensor

T = TypeVar("T")


class AdapterMissingError(Exception):
    """A row begins with an adapter that is not there: whoever planned the step has lost count."""


@dataclass(frozen=True, slots=True)
class StepAdapters(Generic[T]):
    """The adapters of a step's rows."""

    adapters: list[T]
    of_rows: NDArray[np.int64]
    """``[R]`` in the order of the step's rows: an index into ``adapters``; -1: the base model."""


class RowAdapters(Generic[T]):
    """Adapters by digest, and by row. ``install`` and ``remove`` may be called from any thread, the rest from the executor's."""

    def __init__(self, installed: dict[bytes, T] | None = None) -> None:
        self._installed = installed if installed is not None else {}
        self._of_rows: dict[int, T] = {}

    def install(self, digest: bytes, adapter: T) -> None:
        self._installed[digest] = adapter

    def remove(self, digest: bytes) -> None:
        """No new row begins with it; those that run keep it."""
        self._installed.pop(digest, None)

    def start(self, row: int, digest: bytes) -> None:
        """A row begins, with an adapter or (``digest`` empty) none.

        Raises:
            AdapterMissingError: there is no such adapter.
        """
        if not digest:
            self._of_rows.pop(row, None)
            return
        adapter = self._installed.get(digest)
        if adapter is None:
            raise AdapterMissingError(f"row {row} begins with the adapter {digest.hex()}, which is not loaded")
        self._of_rows[row] = adapter

    def release(self, rows: Iterable[int]) -> None:
        if self._of_rows:
            for row in rows:
                self._of_rows.pop(row, None)

    def of(self, rows: NDArray[np.int64]) -> StepAdapters[T] | None:
        """Those of a step's rows; None where no live row has one at all."""
        if not self._of_rows:
            return None
        places: dict[int, int] = {}
        adapters: list[T] = []
        of_rows = np.full(len(rows), -1, dtype=np.int64)
        for index, row in enumerate(rows.tolist()):
            adapter = self._of_rows.get(row)
            if adapter is None:
                continue
            if id(adapter) not in places:
                places[id(adapter)] = len(adapters)
                adapters.append(adapter)
            of_rows[index] = places[id(adapter)]
        return StepAdapters(adapters, of_rows) if adapters else None


_LARGEST = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}


def tensor_values(tensor: StoredTensor, what: str, *, dtype: str = "float32", scale: float = 1.0) -> NDArray[np.float32]:
    """``scale`` times a stored tensor as float32, of its shape, finite in ``dtype`` too.

    Raises:
        AdapterError: a value is not finite, or not so in ``dtype``.
    """
    values: NDArray[Any]
    if tensor.dtype == "BF16":
        values = (np.frombuffer(tensor.data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(tensor.data, dtype={"F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype(np.float32)
    if scale != 1.0:
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at
            values = values * np.float32(scale)
    if not (np.abs(values) <= _LARGEST[dtype]).all():
        raise AdapterError(f"{what} holds values that are not finite{f', or not in {dtype}' if dtype != 'float32' else ''}")
    return values.reshape(tensor.shape)


def by_product(modules: Sequence[Any]) -> dict[tuple[int, str], list[Any]]:
    """``AdaptedModule``s by layer and product."""
    products: dict[tuple[int, str], list[Any]] = {}
    for module in modules:
        products.setdefault((module.layer, module.part), []).append(module)
    return products
