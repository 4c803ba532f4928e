"""How a state directory is opened with a key file, or without one: which codec it is read and written with, and what becomes of what was there in clear.

With a key file and no key ring yet the directory is encrypted at that start: the pins are written anew, sealed; the store, the log and what lies in quarantine are cache
and are removed. There is no way back but to begin anew, for what was once sealed must not come to stand in clear unasked.
"""

from __future__ import annotations

import contextlib
import errno
import struct
from dataclasses import dataclass
from pathlib import Path

from kvd.storage.codec import PLAIN, Codec
from kvd.storage.errors import EncryptionKeyError, StoreBlockedError, UnknownFormatError
from kvd.storage.generations import STORE_NAME
from kvd.storage.key_file import read_key_file
from kvd.storage.keys import KeyRing
from kvd.storage.keys_file import KEYS_NAME, has_keys
from kvd.storage.ports import Log
from kvd.storage.recipes import FORMAT_VERSION, RECIPES_NAME, encode_recipes, read_recipes, recipe_files
from kvd.storage.recovery import WAL_NAME
from kvd.storage.schema import SEALED
from kvd.storage.sealing import BlindCodec, SealedCodec
from kvd.storage.two_copies import TwoCopies
from kvd.wal.disk_faults import errno_of
from kvd.wal.durable import read_regular, remove_any, sync_directory
from kvd.wal.quarantine import QUARANTINE_NAME

_VERSION = struct.Struct("<8xI")
"""Where the version of a recipes file stands."""
_KEY_MISSING = "{} is encrypted; store_encryption_key_file must name the file of its key"
_CACHE = (QUARANTINE_NAME, WAL_NAME, STORE_NAME)


@dataclass(frozen=True, slots=True)
class Encryption:
    """``ring`` None: what is in the state directory stands in clear, or is encrypted and can't be opened (``is_blind``)."""

    codec: Codec
    ring: KeyRing | None = None
    is_blind: bool = False


def master_key_of(key_file: str) -> bytes | None:
    """The master key, or None if none is configured.

    Raises:
        EncryptionKeyError: as ``read_key_file``.
    """
    return read_key_file(Path(key_file)) if key_file else None


def open_encryption(state_dir: Path, master_key: bytes | None, log: Log) -> Encryption:
    """What a start reads and writes ``state_dir`` with. The state lock is held, and nothing was opened yet.

    Raises:
        EncryptionKeyError: the key is missing or wrong, or the keys can't be read; nothing was touched.
        ConfigError: the package for it is not installed.
        OSError: the directory can't be encrypted. One without pins can, later: until then nothing is persisted.
    """
    is_encrypted = has_keys(state_dir)
    if master_key is None:
        if is_encrypted:
            raise EncryptionKeyError(_KEY_MISSING.format(state_dir))
        return Encryption(PLAIN)
    if is_encrypted:
        ring = KeyRing(state_dir, master_key)
    else:
        if _newest_is_sealed(state_dir):
            raise EncryptionKeyError(
                f"the recipes (pins) in {state_dir / RECIPES_NAME} are encrypted and {state_dir / KEYS_NAME} is missing: restore it, or remove them to lose the pins"
            )
        found = [name for name in _CACHE if (state_dir / name).exists()]
        for name in found:
            remove_any(state_dir / name)
        sync_directory(state_dir)
        has_pins = bool(_all_files(recipe_files(state_dir)))  # in clear: they may not stay so
        ring = KeyRing(state_dir, master_key, create=True, may_wait=not has_pins)
        log.info("storage.encrypted", removed=found)
    codec = SealedCodec(ring)
    try:
        seal_recipes(state_dir, codec)
    except StoreBlockedError as error:  # of a key
        raise OSError(errno_of(error) or errno.EIO, str(error)) from error
    return Encryption(codec, ring)


def seal_recipes(state_dir: Path, codec: Codec) -> None:
    """Have no recipes file of ``state_dir`` stand in clear: what the newest says is written anew, sealed, and all others go.

    Raises:
        RecipesUnreadableError: there are some in clear, and none can be read.
        OSError: it can't be done.
    """
    files = recipe_files(state_dir)
    plain = [path for path in _all_files(files) if _version_of(path) == FORMAT_VERSION]
    if not plain:
        return
    if not _newest_is_sealed(state_dir):
        found = read_recipes(state_dir, PLAIN)
        first = found.highest + 1
        codec.hold_tenants({recipe.tenant_salt for recipe in (found.value or {}).values()})
        files.write(first, lambda number: encode_recipes(number, found.value or {}, codec))
        files.remove_before(first)
    for path in plain:
        remove_any(path)
    sync_directory(files.directory)


def reading_encryption(state_dir: Path, key_file: str) -> Encryption:
    """What tools read ``state_dir`` with; without the key of an encrypted one that is its structure alone. Nothing is written.

    Raises:
        EncryptionKeyError, ConfigError: as ``open_encryption``; a key for what is not encrypted is refused as well.
    """
    master_key = master_key_of(key_file)
    is_encrypted = has_keys(state_dir)
    if master_key is None:
        return Encryption(BlindCodec(), is_blind=True) if is_encrypted else Encryption(PLAIN)
    if not is_encrypted:
        raise EncryptionKeyError(f"{state_dir} is not encrypted, and store_encryption_key_file is given")
    ring = KeyRing(state_dir, master_key, readonly=True)
    return Encryption(SealedCodec(ring), ring)


def seeing_codec(state_dir: Path, key_file: str) -> Codec:
    """The codec that reads the contents of ``state_dir``, for tools that have nothing to say without them.

    Raises:
        EncryptionKeyError, ConfigError: as ``reading_encryption``, and if there is no key for what is encrypted.
    """
    encryption = reading_encryption(state_dir, key_file)
    if encryption.is_blind:
        raise EncryptionKeyError(_KEY_MISSING.format(state_dir))
    return encryption.codec


def _all_files(files: TwoCopies) -> list[Path]:
    """The recipes, and what a crash left of writing them."""
    with contextlib.suppress(OSError):
        return [path for path in files.directory.iterdir() if path.is_file() and not path.is_symlink()]
    return []


def _version_of(path: Path) -> int:
    """The version that a file bears, be it whole or not; 0 if it can't be told."""
    try:
        data = read_regular(path)
    except OSError:
        return 0
    return int(_VERSION.unpack_from(data)[0]) if len(data) >= _VERSION.size else 0


def _newest_is_sealed(state_dir: Path) -> bool:
    """Whether the newest whole file of the recipes is an encrypted one.

    Raises:
        RecipesUnreadableError: none can be read.
    """
    try:
        read_recipes(state_dir, PLAIN)
    except UnknownFormatError:
        if any(_version_of(path) > SEALED for _, path in recipe_files(state_dir).files()):
            return True
        raise
    return False
