"""The master key's file: 32 random bytes, as they are or as 64 hexadecimal digits, readable by its owner alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvd.storage.cipher import KEY_BYTES
from kvd.storage.errors import EncryptionKeyError
from kvd.wal.durable import open_regular, sync_directory

_MAX_FILE_BYTES = 256


def read_key_file(path: Path) -> bytes:
    """The master key.

    Raises:
        EncryptionKeyError: there is no such file, others may read it, or it holds no key; the message says which and never shows its content.
    """
    name = f"store_encryption_key_file = {path}"
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise EncryptionKeyError(f"{name}: {error.strerror or error}") from error
    if mode & 0o077:
        raise EncryptionKeyError(f"{name}: others than its owner may use it (mode {mode & 0o777:04o}): chmod 600 {path}")
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii").strip())
    except ValueError as error:
        raise EncryptionKeyError(f"{name}: it holds no key: {KEY_BYTES} bytes or {2 * KEY_BYTES} hexadecimal digits") from error
    if len(key) != KEY_BYTES:
        raise EncryptionKeyError(f"{name}: it holds {len(key)} bytes; a key has {KEY_BYTES} (`kvd store keygen` makes one)")
    return key


def write_key_file(path: Path) -> None:
    """Make a new key's file, durable on return.

    Raises:
        FileExistsError: something has that name; it is left alone.
        OSError: it can't be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, f"{secrets.token_hex(KEY_BYTES)}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(path.absolute().parent)
