r"""The key ring's files, ``keys/keys.<n>``: two that hold the same (``two_copies``), each key wrapped by the master key (docs/storage-format.md, "Encryption").

    8 bytes "KVDKEY\r\n", u32 format version, u64 generation, u64 length, msgpack, u32 crc32c of all before

Older files are overwritten before they are unlinked. None of them ever goes to quarantine.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from crc32c import crc32c

from kvd.observe.failpoints import declare
from kvd.storage.cipher import KEY_BYTES, NONCE_BYTES, Cipher, SealBrokenError
from kvd.storage.errors import EncryptionKeyError, KeysUnreadableError, UnknownFormatError
from kvd.storage.two_copies import CopyDamagedError, Found, TwoCopies
from kvd.wal.durable import remove_any, sync_directory

declare(
    "keys.before_sync",
    "keys.before_rename",
    "keys.after_rename",
    "keys.copy.before_sync",
    "keys.copy.before_rename",
    "keys.copy.after_rename",
    "keys.before_unlink",
)

KEYS_NAME = "keys"
FORMAT_VERSION = 1
STORE = None
"""In a tenant's place: what belongs to no tenant, such as the names of pins."""
_MAGIC = b"KVDKEY\r\n"
_HEADER = struct.Struct("<8sIQQ")
_CRC = struct.Struct("<I")
_OF_STORE, _OF_TENANT = b"\0", b"\1"
INDEX_PLACE = b"kvd.index-key"


class StoredKey(msgspec.Struct, frozen=True, array_like=True):
    """A key as it stands in the file: ``wrapped`` is nonce, ciphertext and tag of (kind, key, tenant salt) under the master key."""

    key_id: int
    reserved: int
    wrapped: bytes


class KeysContent(msgspec.Struct, frozen=True, array_like=True):
    check: bytes
    index_key: bytes
    next_id: int
    keys: tuple[StoredKey, ...]


@dataclass(frozen=True, slots=True)
class UnwrappedKeys:
    content: KeysContent
    index_key: bytes
    secrets: tuple[tuple[bytes | None, bytes], ...]
    """(tenant, key) of each of the content's keys."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnwrappedKeys) and self.content == other.content

    __hash__ = None  # type: ignore[assignment]


class MasterKey:
    """What the master key is used for: wrapping, and telling whether it is the right one."""

    def __init__(self, key: bytes, random: Callable[[int], bytes]) -> None:
        self.check = hmac.digest(key, b"kvd.master-key-check.v1", "sha256")[:16]
        self._cipher = Cipher(hmac.digest(key, b"kvd.key-wrapping.v1", "sha256"))
        self._random = random

    def wrap(self, secret: bytes, place: bytes) -> bytes:
        nonce = self._random(NONCE_BYTES)
        return nonce + self._cipher.seal(nonce, secret, place)

    def unwrap(self, wrapped: bytes, place: bytes) -> bytes:
        try:
            return self._cipher.open(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], place)
        except (SealBrokenError, ValueError) as error:
            raise CopyDamagedError("a key in it can't be unwrapped") from error

    def wrap_key(self, key_id: int, tenant: bytes | None, key: bytes) -> bytes:
        kind = _OF_STORE if tenant is STORE else _OF_TENANT
        return self.wrap(kind + key + (tenant or b""), _key_place(key_id))

    def decode(self, generation: int, data: bytes) -> UnwrappedKeys:
        """A file's content.

        Raises:
            CopyDamagedError, UnknownFormatError: as ``decode_keys``; or a key in it can't be unwrapped.
            EncryptionKeyError: whole, but of another master key.
        """
        content = decode_keys(generation, data)
        if not hmac.compare_digest(content.check, self.check):
            raise EncryptionKeyError("store_encryption_key_file: this is not the key that the state directory is encrypted with")
        secrets: list[tuple[bytes | None, bytes]] = []
        for stored in content.keys:
            secret = self.unwrap(stored.wrapped, _key_place(stored.key_id))
            tenant = STORE if secret[:1] == _OF_STORE else secret[1 + KEY_BYTES :]
            secrets.append((tenant, secret[1 : 1 + KEY_BYTES]))
        return UnwrappedKeys(content, self.unwrap(content.index_key, INDEX_PLACE), tuple(secrets))


def decode_keys(generation: int, data: bytes) -> KeysContent:
    """A file's content, still wrapped.

    Raises:
        CopyDamagedError: damaged.
        UnknownFormatError: whole, but of another format.
    """
    if len(data) < _HEADER.size + _CRC.size or _CRC.unpack(data[-_CRC.size :])[0] != crc32c(data[: -_CRC.size]):
        raise CopyDamagedError("its checksum does not match")
    magic, version, said, length = _HEADER.unpack_from(data)
    payload = data[_HEADER.size : -_CRC.size]
    if magic != _MAGIC or said != generation or len(payload) != length:
        raise CopyDamagedError("it is not the keys file that its name says")
    if version != FORMAT_VERSION:
        raise UnknownFormatError(f"encryption keys of format {version}; this version reads format {FORMAT_VERSION}")
    try:
        content = msgspec.msgpack.decode(payload, type=KeysContent)
    except msgspec.MsgspecError as error:
        raise CopyDamagedError(f"it does not decode: {error}") from error
    return content


def encode_keys(generation: int, content: KeysContent) -> bytes:
    payload = msgspec.msgpack.encode(content)
    body = _HEADER.pack(_MAGIC, FORMAT_VERSION, generation, len(payload)) + payload
    return body + _CRC.pack(crc32c(body))


def key_files(state_dir: Path) -> TwoCopies:
    """The two files of the ring. None of them is ever kept in quarantine: what was destroyed must not live on there."""
    return TwoCopies(state_dir, KEYS_NAME, remove=_overwrite_and_remove, keep_damaged=False)


def has_keys(state_dir: Path) -> bool:
    """Whether a state directory is encrypted.

    Raises:
        KeysUnreadableError: it can't be told.
    """
    try:
        return bool(key_files(state_dir).files())
    except OSError as error:
        raise KeysUnreadableError(f"the encryption keys can't be listed: {error}") from error


def damaged_keys(state_dir: Path) -> list[str]:
    """What is wrong with the files, as far as it can be told without the master key."""
    try:
        return [str(damaged) for damaged in key_files(state_dir).read(decode_keys).damaged]
    except (OSError, UnknownFormatError) as error:
        return [f"the encryption keys can't be read: {error}"]


def read_keys(state_dir: Path, master: MasterKey) -> Found[UnwrappedKeys]:
    try:
        found = key_files(state_dir).read(master.decode)
    except OSError as error:
        raise KeysUnreadableError(f"the encryption keys can't be listed: {error}") from error
    if found.value is None:
        what = "; ".join(map(str, found.damaged)) or f"there is none in {state_dir / KEYS_NAME}"
        raise KeysUnreadableError(
            f"no file of the encryption keys can be read: {what}. Restore one; without it nothing that is encrypted can be read"
        )
    return found


def rewrap_keys(state_dir: Path, old_master: bytes, new_master: bytes) -> int:
    """Put the ring under another master key, both files durable on return; the number of keys. The state lock is held, nothing has the ring open.

    Raises:
        EncryptionKeyError: ``old_master`` is not the right one, or no file can be read.
        OSError: it could not be written; the old master key still is the right one, unless the new one opens the newest file.
    """
    old, new = MasterKey(old_master, os.urandom), MasterKey(new_master, os.urandom)
    found = read_keys(state_dir, old)
    unwrapped = found.value
    assert unwrapped is not None
    keys = tuple(
        StoredKey(stored.key_id, stored.reserved, new.wrap_key(stored.key_id, tenant, key))
        for stored, (tenant, key) in zip(unwrapped.content.keys, unwrapped.secrets, strict=True)
    )
    content = KeysContent(new.check, new.wrap(unwrapped.index_key, INDEX_PLACE), unwrapped.content.next_id, keys)
    files, first = key_files(state_dir), found.highest + 1
    files.write(first, lambda number: encode_keys(number, content))
    files.remove_before(first)
    return len(keys)


def _key_place(key_id: int) -> bytes:
    return b"kvd.data-key" + key_id.to_bytes(4, "little")


def _overwrite_and_remove(path: Path) -> None:
    """Unlink a file whose content must not come back, and overwrite it first, which helps where the file system writes in place.

    Under another name, durably, so that a crash or a power cut between the two leaves no damaged file of the ring.
    """
    gone = path.with_name(f".{path.name.lstrip('.')}.gone")
    path.rename(gone)
    sync_directory(path.parent)
    with contextlib.suppress(OSError):
        fd = os.open(gone, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes(os.fstat(fd).st_size), 0)
            os.fdatasync(fd)
        finally:
            os.close(fd)
    remove_any(gone)


def finish_removals(directory: Path) -> None:
    """Finish what a crash left between the renaming of an old file and its end."""
    with contextlib.suppress(OSError):
        for path in directory.glob(".*"):
            _overwrite_and_remove(path)
