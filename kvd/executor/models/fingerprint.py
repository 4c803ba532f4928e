"""What KV bytes depend on, as one digest: two daemons with equal fingerprints compute the same blocks from the same tokens.

Weights count by their contents. A file's digest is remembered by device, inode, size and both times, so that a restart does not read
gigabytes; the memory is a cache, and anything wrong with it only costs that time.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvd.executor.models.spec import ModelSpec, WeightsError
from kvd.executor.models.weight_files import weight_files

KV_FORMAT_VERSION = 1
"""Raised whenever the meaning of a block's bytes changes in a way that no other field shows."""

_DOMAIN = "kvd.kv-fingerprint"
_CACHE_VERSION = 2
_MAX_CACHED_FILES = 512
_SETTLED_NS = 2_000_000_000
"""A file touched more recently may change again within its time stamp's tick: it is hashed anew next time."""
_READ_BYTES = 8 << 20

_NOT_COMPUTED_FROM = frozenset({"name", "max_positions", "eos_token_ids", "weights_dtype"})
"""Fields of the spec that no key or value depends on."""


def fingerprint(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: str,
    block_size_tokens: int,
    layout: str,
    kernel_family: str,
    cache_file: Path | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> bytes:
    """32 bytes over weights, the spec (rope included, with its fixed length), dtype, block size, layout, kernel family and KV format.

    ``spec`` is that of ``fit_length``; ``cache_file`` remembers the digests of weight files, and is rewritten atomically.

    Raises:
        ModelError: there are no weights.
        WeightsError: a file cannot be read, or changed while it was.
    """
    digest = hashlib.sha256()
    for tag, value in (
        ("domain", _DOMAIN),
        ("kv_format", KV_FORMAT_VERSION),
        ("spec", _spec_fields(spec)),
        ("dtype", dtype),
        ("block_size_tokens", block_size_tokens),
        ("layout", layout),
        ("kernel_family", kernel_family),
        ("weights", _weight_digests(weight_files(path), cache_file, now_ns)),
    ):
        digest.update(encode_field(tag) + encode_field(value))
    return digest.digest()


def encode_field(value: Any) -> bytes:
    """A value as type tag, length and contents: no two different values, nor any two sequences of them, have the same bytes.

    Raises:
        TypeError: none of None, bool, int, float, str, bytes, tuple, list and dict.
    """
    match value:
        case None:
            tag, body = b"n", b""
        case bool():
            tag, body = b"b", bytes([value])
        case int():
            tag, body = b"i", str(int(value)).encode()
        case float():
            tag, body = b"f", struct.pack("<d", value)
        case str():
            tag, body = b"s", str(value).encode()
        case bytes():
            tag, body = b"y", value
        case tuple() | list():
            tag, body = b"l", b"".join(encode_field(item) for item in value)
        case dict():
            pairs = sorted((encode_field(key), encode_field(item)) for key, item in value.items())
            tag, body = b"d", b"".join(key + item for key, item in pairs)
        case _:
            raise TypeError(f"no encoding for {type(value).__name__}")
    return tag + len(body).to_bytes(8, "little") + body


def _spec_fields(spec: ModelSpec) -> dict[str, Any]:
    described = {item.name: getattr(spec, item.name) for item in fields(spec) if item.name not in _NOT_COMPUTED_FROM}
    described["rope"] = {item.name: getattr(spec.rope, item.name) for item in fields(spec.rope)}
    return described


def _weight_digests(files: tuple[Path, ...], cache_file: Path | None, now_ns: Callable[[], int]) -> tuple[bytes, ...]:
    known = _read_cache(cache_file) if cache_file is not None else {}
    before = dict(known)
    digests = []
    for file in files:
        key, digest = _file_digest(file, known)
        digests.append(bytes.fromhex(digest))
        known.pop(key, None)
        if _is_settled(file, now_ns()):
            known[key] = digest
    if cache_file is not None and known != before:
        with suppress(OSError):
            _write_cache(cache_file, dict(list(known.items())[-_MAX_CACHED_FILES:]))
    return tuple(digests)


def _file_digest(path: Path, known: dict[str, str]) -> tuple[str, str]:
    """The file's identity and the SHA-256 of its contents, in hex."""
    try:
        with path.open("rb", buffering=0) as file:
            key = _identity(os.fstat(file.fileno()))
            if key in known:
                return key, known[key]
            digest = hashlib.sha256()
            for piece in _pieces(file):
                digest.update(piece)
            if _identity(os.fstat(file.fileno())) != key:
                raise WeightsError(f"{path}: changed while it was being read")
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from error
    return key, digest.hexdigest()


def _pieces(file: Any) -> Iterator[memoryview]:
    piece = memoryview(bytearray(_READ_BYTES))
    while num_bytes := file.readinto(piece):
        yield piece[:num_bytes]


def _identity(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _is_settled(path: Path, now_ns: int) -> bool:
    stat = path.stat()
    return now_ns - max(stat.st_mtime_ns, stat.st_ctime_ns) > _SETTLED_NS


def _read_cache(path: Path) -> dict[str, str]:
    """The remembered digests; empty where the file is missing or damaged, or no file at all."""
    try:
        if not path.is_file():  # reading a fifo would wait for ever
            return {}
        content = json.loads(path.read_bytes())
        if content["version"] != _CACHE_VERSION:
            return {}
        digests = content["sha256"]
        if content["check"] != _check_of(digests):
            return {}
        return {str(key): value for key, value in digests.items() if len(bytes.fromhex(value)) == hashlib.sha256().digest_size}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _check_of(digests: dict[str, str]) -> str:
    """A digest over the digests: a flipped bit in one would stand for other weights, and everything on disk would be another model's."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _write_cache(path: Path, digests: dict[str, str]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
            json.dump({"version": _CACHE_VERSION, "sha256": digests, "check": _check_of(digests)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
