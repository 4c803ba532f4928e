"""What a disk's refusal is called: one word that a status names and people look up, and how much disk a folder takes as ``du`` counts it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_WORDS = {
    errno.EIO: "the disk fails",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EMFILE: "this process has no file descriptors left",
    errno.ENFILE: "the system has no file descriptors left",
    errno.ENOMEM: "there is no memory left",
    errno.EACCES: "permission denied",
    errno.EPERM: "the operating system forbids it",
    errno.EFBIG: "the file size limit is reached",
}
_PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EFBIG}
)
_STAT_BLOCK_BYTES = 512


def errno_of(error: BaseException) -> int:
    """The system's error number behind an exception, 0 if there is none.

    Libraries in C hand on its text alone: the texts of the numbers above are looked for.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno:
            return seen.errno
        for number in _WORDS:
            if os.strerror(number) in str(seen):
                return number
        seen = seen.__cause__
    return 0


def is_passing(error: BaseException) -> bool:
    """Whether the refusal says nothing against what is on disk (full, read-only, no descriptors): the same files may serve when it is over."""
    return errno_of(error) in _PASSING


def fault_sentence(error: BaseException) -> str:
    """Why the disk refused: ``enospc: the disk is full ([Errno 28] No space left on device)``. The word before the colon is the errno's name."""
    text = str(error) or repr(error)
    number = errno_of(error)
    if number not in errno.errorcode:
        return text
    name = errno.errorcode[number].lower()
    if text.startswith(f"{name}: "):
        return text
    return f"{name}: {_WORDS[number]} ({text})" if number in _WORDS else f"{name}: {text}"


def disk_bytes(path: Path) -> int:
    """What ``path`` and everything below it take on disk, folders included, as ``du -s`` counts it; 0 for what is not there."""
    return sum(os_stat.st_blocks * _STAT_BLOCK_BYTES for os_stat in _stats(path))


def _stats(path: Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError):
        yield path.lstat()
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(OSError):
            for entry in list(path.iterdir()):
                yield from _stats(entry)
