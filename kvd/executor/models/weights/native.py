"""From mapped files to the native kernels' packed matrices: all threads convert and pack, and nothing but the packed matrices is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.executor.kernels.cpu import native
from kvd.executor.models.spec import ModelSpec
from kvd.executor.models.weights.plan import Assignment, assign, check_names
from kvd.executor.models.weights.source import WeightSource, open_source

KEPT = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"})
"""Storage types that the kernels multiply as they are; weights in others are converted to the dtype."""

PLAIN = {"float32": "f32", "bfloat16": "bf16"}
"""The kernels' formats of plain weights by dtype."""


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer. Vectors are float32.

    A fused matrix is one packed matrix, or several whose outputs follow one another where its tensors are kept in different storage types.
    """

    attention_norm: NDArray[np.float32]
    """``[hidden]``"""
    qkv: tuple[Any, ...]
    """``[(num_heads + 2 * num_kv_heads) * head_dim, hidden]``: queries, keys, values"""
    qkv_bias: NDArray[np.float32] | None
    qk_norm: NDArray[np.float32] | None
    """``[num_heads + num_kv_heads, head_dim]``: the query norm once a query head, the key norm once a key head"""
    output: Any
    """``[hidden, num_heads * head_dim]``"""
    feed_forward_norm: NDArray[np.float32]
    gate_up: tuple[Any, ...]
    """``[2 * intermediate, hidden]``: gate, up"""
    down: Any
    """``[hidden, intermediate]``"""


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """All weights, packed. A tied ``head`` is the embedding itself."""

    embedding: Any
    """``[vocab, hidden]``"""
    layers: tuple[NativeLayer, ...]
    final_norm: NDArray[np.float32]
    head: Any


def keeps_quantised(spec: ModelSpec, setting: str) -> bool:
    """Whether ``load_native`` keeps some matrix as the file quantised it, by the configuration key ``weights``."""
    return setting == "auto" and not KEPT.isdisjoint(spec.quantisation.split("+"))


def load_native(
    path: Path, spec: ModelSpec, *, dtype: str, pool: Any, quantised: bool, progress: Callable[[int, int], None] | None = None
) -> NativeWeights:
    """Read and pack the weights at ``path`` for ``spec`` (of ``inspect_model``, then ``fit_length``).

    ``dtype`` is ``float32`` or ``bfloat16``: what plain weights are kept in; with ``quantised`` those of the types ``KEPT`` stay as they are.
    ``pool`` are the kernels' threads. ``progress`` gets the bytes of the files read so far and in all, after each tensor.

    Raises:
        UnsupportedModelError: weights in a format or a storage type that is not read.
        WeightsError: a tensor is missing, unexpected, of a wrong shape, or a file is damaged; the message names it.
    """
    source = open_source(path, spec)
    plan = assign(spec)
    check_names(plan, source.shapes, source.ignored, source.origin)
    loader = _Loader(source, spec, PLAIN[dtype], pool, quantised=quantised)
    total = sum(source.sizes_bytes[item.name] for item in plan)
    done = 0
    parts: dict[tuple[int | None, str], Any] = {}
    for place, group in groupby(plan, key=lambda item: (item.layer, item.part)):
        items = list(group)
        parts[place] = loader.matrices(items) if _is_matrix(items[0]) else loader.vector(items)
        done += sum(source.sizes_bytes[item.name] for item in items)
        if progress is not None:
            progress(done, total)
    (embedding,) = parts[None, "embedding"]
    (head,) = parts.get((None, "head"), (embedding,))
    layers = tuple(_layer(parts, index) for index in range(spec.num_layers))
    return NativeWeights(embedding, layers, parts[None, "final_norm"], head)


def _is_matrix(item: Assignment) -> bool:
    return len(item.shape) > 1


def _layer(parts: dict[tuple[int | None, str], Any], index: int) -> NativeLayer:
    (output,), (down,) = parts[index, "output"], parts[index, "down"]
    return NativeLayer(
        attention_norm=parts[index, "attention_norm"],
        qkv=parts[index, "qkv"],
        qkv_bias=parts.get((index, "qkv_bias")),
        qk_norm=parts.get((index, "qk_norm")),
        output=output,
        feed_forward_norm=parts[index, "feed_forward_norm"],
        gate_up=parts[index, "gate_up"],
        down=down,
    )


class _Loader:
    """Makes the parts of the decoder from the tensors that fill them."""

    def __init__(self, source: WeightSource, spec: ModelSpec, plain: str, pool: Any, *, quantised: bool) -> None:
        self._source = source
        self._head_dim = spec.head_dim
        self._plain = plain
        self._pool = pool
        self._quantised = quantised
        self._module = native.module()

    def matrices(self, items: list[Assignment]) -> tuple[Any, ...]:
        """Tensors one below the other, neighbours of one format in one matrix."""
        return tuple(self._matrix(form, list(group)) for form, group in groupby(items, key=self._format))

    def vector(self, items: list[Assignment]) -> NDArray[np.float32]:
        """Vectors one after the other; norms of a head as many times as there are heads, ``[heads, head_dim]``."""
        return np.concatenate([self._values(item) for item in items])

    def _format(self, item: Assignment) -> str:
        _, storage = self._source.stored(item.name)
        return storage.lower() if self._quantised and storage in KEPT else self._plain

    def _matrix(self, form: str, items: list[Assignment]) -> Any:
        matrix = self._module.Matrix(form, sum(item.num_rows for item in items), items[0].shape[1])
        for item in items:
            address, storage = self._source.stored(item.name)
            interleaved = self._head_dim if item.interleaved else 0
            self._module.load_rows(matrix, self._pool, item.first_row - items[0].first_row, item.num_rows, address, storage, interleaved)
        return matrix

    def _values(self, item: Assignment) -> NDArray[np.float32]:
        values = np.empty(item.shape, dtype=np.float32)
        self._module.load_values(*self._source.stored(item.name), values)
        return values if item.part != "qk_norm" else np.tile(values, (item.num_rows, 1))
