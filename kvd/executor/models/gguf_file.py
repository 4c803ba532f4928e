"""The header of a GGUF file (ggml's specification, versions 2 and 3, little-endian): metadata and where each tensor lies.

The ``gguf`` package's own reader builds numpy views of every vocabulary entry, seconds for a real vocabulary; this one steps over
strings in arrays, which no part of a model's description needs, and can name what is cut short, and needs no import that a start would wait for.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvd.executor.models.spec import ModelError, UnsupportedModelError, WeightsError

_STORAGES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    8: ("Q8_0", 32, 34),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}
"""By ggml's number: the name, values of a block, and bytes of a block."""

STORAGE_TYPES = tuple(name for name, _, _ in _STORAGES.values())
"""The types of tensors that are read."""

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MIN_ALIGNMENT = 8
_MAX_DIMENSIONS = 4
_MAX_NESTED_ARRAYS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Struct codes of the value types."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in the file. ``shape`` has the rows first, unlike the file."""

    name: str
    shape: tuple[int, ...]
    storage: str
    offset_bytes: int
    """From the start of the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header, and the whole file mapped read-only.

    ``metadata`` holds numbers, strings, booleans and arrays of numbers; arrays of strings are left out.
    """

    origin: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    map: mmap.mmap


def open_gguf(path: Path) -> GgufFile:
    """Map a file and read its header.

    Raises:
        UnsupportedModelError: another version, one part of a split file, or a tensor in a storage type that is not read.
        WeightsError: the file is damaged or cut short; the message names the tensor where there is one.
        ModelError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    cursor = _Cursor(mapped, str(path))
    if cursor.take(4) != b"GGUF":
        raise WeightsError(f"{path}: not a GGUF file")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise UnsupportedModelError(f"{path}: GGUF version {version} is not supported; supported: 2, 3, little-endian")
    num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        value = cursor.value(cursor.number("I"))
        if value is not None:
            metadata[key] = value
    if metadata.get("split.count", 1) != 1:
        raise UnsupportedModelError(f"{path}: one part of a split GGUF file; merge the parts first (llama-gguf-split --merge)")
    return GgufFile(str(path), metadata, _tensors(cursor, num_tensors, metadata), mapped)


def _tensors(cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
    found = []
    for _ in range(num_tensors):
        name = cursor.string()
        num_dimensions = cursor.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise WeightsError(f"{cursor.origin}: damaged GGUF file: tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed([cursor.number("Q") for _ in range(num_dimensions)]))
        found.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < _MIN_ALIGNMENT or alignment & (alignment - 1):
        raise WeightsError(f"{cursor.origin}: damaged GGUF file: alignment {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in found:
        storage = _STORAGES.get(type_id)
        if storage is None:
            raise UnsupportedModelError(
                f"{cursor.origin}: tensor {name} is stored as {_storage_name(type_id)}; supported: {', '.join(STORAGE_TYPES)}"
            )
        kind, block, block_bytes = storage
        if name in tensors or shape[-1] % block:
            raise WeightsError(f"{cursor.origin}: damaged GGUF file: tensor {name} occurs twice or does not fill its blocks")
        if offset % alignment:
            raise WeightsError(f"{cursor.origin}: damaged GGUF file: tensor {name} lies at {offset}, not aligned to {alignment} bytes")
        tensor = GgufTensor(name, shape, kind, start + offset, math.prod(shape) // block * block_bytes)
        if tensor.offset_bytes + tensor.size_bytes > cursor.size:
            raise WeightsError(f"{cursor.origin}: truncated GGUF file: tensor {name} ends beyond the file's {cursor.size} bytes")
        tensors[name] = tensor
    in_place = sorted(tensors.values(), key=lambda tensor: (tensor.offset_bytes, tensor.size_bytes))
    for before, after in pairwise(in_place):
        if before.offset_bytes + before.size_bytes > after.offset_bytes:
            raise WeightsError(f"{cursor.origin}: damaged GGUF file: tensors {before.name} and {after.name} overlap")
    return tensors


def _storage_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType

    return next((kind.name for kind in GGMLQuantizationType if int(kind) == type_id), f"type {type_id}")


class _Cursor:
    """Reads the header from front to back.

    Raises:
        WeightsError: the file ends within a field, or a field cannot be.
    """

    def __init__(self, mapped: mmap.mmap, origin: str) -> None:
        self.origin = origin
        self.offset = 0
        self.size = len(mapped)
        self._map = mapped

    def take(self, num_bytes: int) -> bytes:
        taken = self._map[self.offset : self.offset + num_bytes]
        if len(taken) != num_bytes:
            raise WeightsError(f"{self.origin}: truncated GGUF file: its header goes on beyond {self.size} bytes")
        self.offset += num_bytes
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.origin}: damaged GGUF file: a string is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value, of a type id, within ``depth`` arrays; None for an array that is stepped over."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"), depth + 1)
        if kind not in _SCALARS:
            raise WeightsError(f"{self.origin}: damaged GGUF file: value type {kind}")
        return self.number(_SCALARS[kind])

    def _array(self, kind: int, length: int, depth: int) -> Any:
        if kind == _STRING:
            self._step_over_strings(length)
            return None
        if kind == _ARRAY:
            if depth == _MAX_NESTED_ARRAYS:
                raise WeightsError(f"{self.origin}: damaged GGUF file: arrays are nested more than {_MAX_NESTED_ARRAYS} deep")
            for _ in range(length):
                self.value(_ARRAY, depth)
            return None
        if kind not in _SCALARS:
            raise WeightsError(f"{self.origin}: damaged GGUF file: array of value type {kind}")
        item_bytes = struct.calcsize("<" + _SCALARS[kind])
        return list(struct.unpack(f"<{length}{_SCALARS[kind]}", self.take(length * item_bytes)))

    def _step_over_strings(self, length: int) -> None:
        offset, last, length_of = self.offset, self.size - 8, struct.Struct("<Q").unpack_from
        for _ in range(length):
            if offset > last:
                raise WeightsError(f"{self.origin}: truncated GGUF file: its vocabulary goes on beyond {self.size} bytes")
            offset += 8 + length_of(self._map, offset)[0]
        self.offset = offset
