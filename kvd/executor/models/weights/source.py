"""Tensors by name, whatever format they are stored in. Opening one needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvd.executor.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(Protocol):
    """Tensors by name, as a format stores them."""

    @property
    def origin(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """Bytes in the file."""

    @property
    def ignored(self) -> frozenset[str]:
        """Names that may be there and are not needed."""

    def read(self, name: str) -> Iterator[Tensor]:
        """The tensor in runs of whole rows, in any float dtype, on the CPU."""

    def stored(self, name: str) -> tuple[int, str]:
        """Where the tensor's stored bytes lie in memory while this source lives, mapped from the file, and in which of GGUF's storage types."""


def open_source(path: Path, spec: ModelSpec) -> WeightSource:
    """The tensors at ``path``, in the spec's format."""
    if spec.weights_format == "gguf":
        from kvd.executor.models.weights.gguf import GgufSource

        return GgufSource(path, spec)
    from kvd.executor.models.weights.safetensors import SafetensorsSource

    return SafetensorsSource(path, spec)
