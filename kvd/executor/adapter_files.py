"""LoRA adapters as PEFT writes them: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``.

Read whole into memory, so that the digest is of the very bytes that are used, whatever happens to the files meanwhile. Needs neither torch nor NumPy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 2 << 20
"""Of some 15,000 tensors; JSON is parsed with the interpreter's lock held."""
_DOMAIN = b"kvd.lora-adapter.v1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class AdapterError(Exception):
    """An adapter that can't be used; the message names it and says why."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter of this name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the bytes of a file."""

    dtype: str
    """``F32``, ``F16`` or ``BF16``."""
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What stands in an adapter's directory."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    digest: bytes
    """32 bytes over the contents of both files: what its KV belongs to."""
    num_bytes: int
    """Of the weights file."""


def is_adapter_name(name: str) -> bool:
    """Whether it may be the name of an adapter: 1 to 128 letters, digits or ``. _ : @ + -``, the first a letter or digit; so never a path."""
    return _NAME.fullmatch(name) is not None


def adapter_names(directory: Path) -> list[str]:
    """The adapters of a directory, by name: its subdirectories that hold a configuration.

    Raises:
        AdapterError: it can't be read.
    """
    try:
        return sorted(entry.name for entry in directory.iterdir() if is_adapter_name(entry.name) and (entry / CONFIG_FILE).is_file())
    except OSError as error:
        raise AdapterError(f"adapter_dir = {directory}: {error.strerror}") from error


def read_adapter_files(directory: Path, name: str, max_bytes: int) -> AdapterFiles:
    """Read the adapter ``name`` of ``directory``.

    Raises:
        AdapterNotFoundError: there is none of this name.
        AdapterError: its files are missing, damaged, or larger than ``max_bytes``.
    """
    if not is_adapter_name(name):
        raise AdapterNotFoundError(f"no adapter is named {name!r:.140}")
    path = directory / name
    if not path.is_dir():
        raise AdapterNotFoundError(f"no adapter is named {name!r}: {directory} has no such subdirectory")
    config = _read(path / CONFIG_FILE, _MAX_CONFIG_BYTES)
    if not (path / WEIGHTS_FILE).exists() and (path / _PICKLE_FILE).exists():
        raise AdapterError(
            f"{path / _PICKLE_FILE}: a pickle, which may run code, is not read; save the adapter with safe_serialization=True"
        )
    weights = _read(path / WEIGHTS_FILE, max_bytes)
    try:
        settings = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path / CONFIG_FILE}: not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise AdapterError(f"{path / CONFIG_FILE}: not a JSON object")
    tensors = _tensors(weights, path / WEIGHTS_FILE)
    return AdapterFiles(name, settings, tensors, _digest(config, weights), len(weights))


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if not path.is_file():  # reading a fifo would wait for ever
            raise AdapterError(f"{path}: no such file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise AdapterError(f"{path}: {error.strerror}") from error
    if len(content) > max_bytes:
        raise AdapterError(f"{path}: more than {max_bytes} bytes, the most that an adapter of this model may have (max_adapter_rank)")
    return content


def _digest(config: bytes, weights: bytes) -> bytes:
    """Each file counts by its own digest, so that no byte can move from one to the other."""
    return hashlib.sha256(_DOMAIN + hashlib.sha256(config).digest() + hashlib.sha256(weights).digest()).digest()


def _tensors(content: bytes, path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: u64 length of a JSON header, the header, then the data that its offsets count in."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MAX_HEADER_BYTES, len(content) - 8):
        raise AdapterError(f"{path}: damaged safetensors file: its header is cut short")
    try:
        header = json.loads(content[8 : 8 + length])
        data = memoryview(content)[8 + length :]
        return {name: _tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{path}: damaged safetensors file: {error}") from error


def _tensor(name: str, entry: Mapping[str, Any], data: memoryview) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"tensor {name:.200} is stored as {dtype!r:.20}; supported: {', '.join(_DTYPE_BYTES)}")
    if len(shape) != 2 or not all(isinstance(size, int) and 0 <= size < 1 << 40 for size in shape):
        raise ValueError(f"tensor {name:.200} is no matrix that its file could hold")
    num_bytes = _DTYPE_BYTES[dtype] * shape[0] * shape[1]
    if not 0 <= begin <= end <= len(data) or end - begin != num_bytes:
        raise ValueError(f"tensor {name:.200} lies outside of the file, or has too many or too few bytes")
    return StoredTensor(dtype, shape, data[begin:end])
