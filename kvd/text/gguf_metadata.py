"""The metadata of a GGUF file (ggml's specification, versions 2 and 3, little-endian).

The ``gguf`` package's reader makes a numpy view of every string of the vocabulary, which takes seconds; this one takes a fraction of one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd.text.errors import TokenizerError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Struct codes of the value types."""
_MAX_PAIRS = 1 << 20
_MAX_DEPTH = 4


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The file's key-value pairs; arrays become lists.

    Raises:
        TokenizerError: the file cannot be read, is no GGUF file of a known version, or is damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _read(mapped)
    except (OSError, ValueError, struct.error, UnicodeDecodeError, KeyError) as error:
        raise TokenizerError(f"{path}: not a GGUF file, or damaged: {error}") from error


def _read(mapped: mmap.mmap) -> dict[str, Any]:
    magic, version, _, num_pairs = struct.unpack_from("<4sIQQ", mapped, 0)
    if magic != b"GGUF" or version not in (2, 3) or num_pairs > _MAX_PAIRS:
        raise ValueError("the header is not that of GGUF version 2 or 3, little-endian")
    position = 24
    pairs: dict[str, Any] = {}
    for _ in range(num_pairs):
        key, position = _string(mapped, position)
        (kind,) = struct.unpack_from("<I", mapped, position)
        pairs[key], position = _value(mapped, position + 4, kind, 0)
    return pairs


def _string(mapped: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", mapped, position)
    stop = position + 8 + length
    if stop > len(mapped):
        raise ValueError("a string goes on beyond the end")
    return mapped[position + 8 : stop].decode("utf-8"), stop


def _value(mapped: mmap.mmap, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(mapped, position)
    if kind != _ARRAY:
        form = struct.Struct("<" + _SCALARS[kind])
        return form.unpack_from(mapped, position)[0], position + form.size
    item_kind, count = struct.unpack_from("<IQ", mapped, position)
    position += 12
    if count > len(mapped) or depth > _MAX_DEPTH:
        raise ValueError("an array goes on beyond the end")
    if item_kind not in (_STRING, _ARRAY):
        form = struct.Struct(f"<{count}{_SCALARS[item_kind]}")
        return list(form.unpack_from(mapped, position)), position + form.size
    items = []
    for _ in range(count):
        item, position = _value(mapped, position, item_kind, depth + 1)
        items.append(item)
    return items, position
