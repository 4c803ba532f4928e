"""Reads the tensors of a GGUF file through a memory map and dequantises them in runs of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvd.executor.models.gguf_config import ROPE_DIVISORS
from kvd.executor.models.gguf_file import open_gguf
from kvd.executor.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

_RUN_BYTES = 16 << 20
"""Float32 bytes of a run of rows: what dequantising needs beyond the weights themselves."""


class GgufSource:
    """The tensors of one file.

    Raises:
        UnsupportedModelError: a tensor is stored in a type that is not read.
        WeightsError: the file is damaged or cut short.
    """

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._file = open_gguf(path)
        self._head_dim = spec.head_dim
        self.origin = self._file.origin
        self.shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        self.sizes_bytes = {name: tensor.size_bytes for name, tensor in self._file.tensors.items()}
        self.ignored = frozenset({ROPE_DIVISORS})

    def read(self, name: str) -> Iterator[Tensor]:
        """The tensor as float32, in runs of whole rows whose number is a multiple of ``head_dim`` except in the last."""
        import torch
        from gguf import GGMLQuantizationType, dequantize

        tensor = self._file.tensors[name]
        kind = GGMLQuantizationType[tensor.storage]
        stored = np.frombuffer(self._file.map, dtype=np.uint8, count=tensor.size_bytes, offset=tensor.offset_bytes)
        stored = stored.reshape(*tensor.shape[:-1], -1)
        rows = max(1, _RUN_BYTES // (4 * tensor.shape[-1] * self._head_dim)) * self._head_dim
        step = rows if len(tensor.shape) > 1 else stored.shape[0]
        for start in range(0, stored.shape[0], step):
            run = dequantize(stored[start : start + step], kind)
            yield torch.from_numpy(run if run.flags.writeable else run.copy())

    def stored(self, name: str) -> tuple[int, str]:
        """See ``WeightSource.stored``."""
        tensor = self._file.tensors[name]
        return np.frombuffer(self._file.map, dtype=np.uint8, count=1, offset=tensor.offset_bytes).ctypes.data, tensor.storage
