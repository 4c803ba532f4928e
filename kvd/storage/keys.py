r"""The key ring: a data key for each tenant, wrapped by the master key, in ``keys/keys.<n>`` (docs/storage-format.md, "Encryption").

    8 bytes "KVDKEY\r\n", u32 format version, u64 generation, u64 length, msgpack, u32 crc32c of all before

It is data, as recipes are: two files hold the same (``two_copies``). A key is durable before anything is sealed with it. Destroying a tenant's keys rewrites both
files without them and overwrites the older ones before they are unlinked; what was sealed with them can't be read from then on, wherever a copy of it may be.

Nonces are 96 random bits, so a key may seal 2^32 values at most (NIST SP 800-38D, 8.3). How many it has sealed is counted in reservations: the files say
up to which number it may have, and say so before it does. At half the bound the tenant gets another key; the old one stays for reading.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from crc32c import crc32c

from kvd.observe.failpoints import declare
from kvd.storage.cipher import KEY_BYTES, NONCE_BYTES, Cipher, SealBrokenError
from kvd.storage.errors import EncryptionKeyError, KeysUnreadableError, StoreBlockedError, UnknownFormatError
from kvd.storage.two_copies import COPIES, CopyDamagedError, Found, TwoCopies
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
MAX_TENANTS = 8192
"""Tenants with a key. Beyond, those that have not been used for longest lose theirs, which is to say their cached blocks; never one that a pin needs."""
MAX_SEALED_PER_KEY = 1 << 31
RESERVED_AT_ONCE = 1 << 20
STORE = None
"""In a tenant's place: what belongs to no tenant, such as the names of pins."""
_MAGIC = b"KVDKEY\r\n"
_HEADER = struct.Struct("<8sIQQ")
_CRC = struct.Struct("<I")
_OF_STORE, _OF_TENANT = b"\0", b"\1"
_INDEX_PLACE = b"kvd.index-key"


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A key as it stands in the file: ``wrapped`` is nonce, ciphertext and tag of (kind, key, tenant salt) under the master key."""

    key_id: int
    reserved: int
    wrapped: bytes


class _Content(msgspec.Struct, frozen=True, array_like=True):
    check: bytes
    index_key: bytes
    next_id: int
    keys: tuple[_Stored, ...]


@dataclass(slots=True)
class DataKey:
    """One key of the ring. ``tenant`` is its salt, or ``STORE``."""

    key_id: int
    tenant: bytes | None
    cipher: Cipher
    wrapped: bytes
    reserved: int
    used: int
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class _Unwrapped:
    content: _Content
    index_key: bytes
    secrets: tuple[tuple[bytes | None, bytes], ...]
    """(tenant, key) of each of the content's keys."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unwrapped) and self.content == other.content

    __hash__ = None  # type: ignore[assignment]


class _Master:
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

    def decode(self, generation: int, data: bytes) -> _Unwrapped:
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
        return _Unwrapped(content, self.unwrap(content.index_key, _INDEX_PLACE), tuple(secrets))


def decode_keys(generation: int, data: bytes) -> _Content:
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
        content = msgspec.msgpack.decode(payload, type=_Content)
    except msgspec.MsgspecError as error:
        raise CopyDamagedError(f"it does not decode: {error}") from error
    return content


def encode_keys(generation: int, content: _Content) -> bytes:
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


def _read(state_dir: Path, master: _Master) -> Found[_Unwrapped]:
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
    old, new = _Master(old_master, os.urandom), _Master(new_master, os.urandom)
    found = _read(state_dir, old)
    unwrapped = found.value
    assert unwrapped is not None
    keys = tuple(
        _Stored(stored.key_id, stored.reserved, new.wrap_key(stored.key_id, tenant, key))
        for stored, (tenant, key) in zip(unwrapped.content.keys, unwrapped.secrets, strict=True)
    )
    content = _Content(new.check, new.wrap(unwrapped.index_key, _INDEX_PLACE), unwrapped.content.next_id, keys)
    files, first = key_files(state_dir), found.highest + 1
    files.write(first, lambda number: encode_keys(number, content))
    files.remove_before(first)
    return len(keys)


class KeyRing:
    """May be used from any thread. ``notes`` says, as sentences, what was found damaged at the start; ``fault`` why the files are not as they should be.

    ``create``: make a ring where there is none. ``readonly``: for tools; nothing is written and nothing can be sealed.

    Raises:
        EncryptionKeyError: ``master_key`` is not the one that the ring was made with.
        KeysUnreadableError: there are files, and none can be read.
        OSError: a new ring can't be written.
    """

    def __init__(
        self,
        state_dir: Path,
        master_key: bytes,
        *,
        create: bool = False,
        readonly: bool = False,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._files = key_files(state_dir)
        self._master = _Master(master_key, random)
        self._random = random
        self._readonly = readonly
        self._lock = threading.RLock()
        self._by_id: dict[int, DataKey] = {}
        self._by_tenant: dict[bytes | None, DataKey] = {}
        self._held: frozenset[bytes] = frozenset()
        self._tick = 0
        self._has_reserved = False
        self._may_differ = False
        """A write that failed may have left files without a key that is in the ring: they are written anew before anything is sealed."""
        self.notes: tuple[str, ...] = ()
        self.fault = ""
        if create:
            self.index_key = random(KEY_BYTES)
            self._index_wrapped = self._master.wrap(self.index_key, _INDEX_PLACE)
            self._next_id, self._generation = 1, 0
            self._write((), self._next_id)
        else:
            self._load(state_dir)

    def _load(self, state_dir: Path) -> None:
        found = _read(state_dir, self._master)
        unwrapped = found.value
        assert unwrapped is not None
        content = unwrapped.content
        self.index_key, self._index_wrapped = unwrapped.index_key, content.index_key
        self._next_id, self._generation = content.next_id, found.highest
        for stored, (tenant, key) in zip(content.keys, unwrapped.secrets, strict=True):
            self._take(DataKey(stored.key_id, tenant, Cipher(key), stored.wrapped, stored.reserved, stored.reserved))
        self.notes = tuple(f"a file of the encryption keys was removed: {damaged}" for damaged in found.damaged)
        if self._readonly:
            return
        _sweep(self._files.directory)
        if not found.is_settled:
            try:
                self._files.restore(found, lambda number: encode_keys(number, content))
            except OSError as error:
                self.fault = f"the encryption keys on disk are not as they should be: {error}"
            self._generation += COPIES

    def _take(self, key: DataKey) -> None:
        self._by_id[key.key_id] = key
        current = self._by_tenant.get(key.tenant)
        if current is None or current.key_id < key.key_id:
            self._by_tenant[key.tenant] = key

    # -------------------------------------------------------------------------------- reading

    def by_id(self, key_id: int) -> DataKey | None:
        """The key with that number; None if it was destroyed or never issued."""
        return self._by_id.get(key_id)

    def was_issued(self, key_id: int) -> bool:
        """Whether a key with that number was ever in this ring: what is sealed with another one is not of this ring, or newer than its files."""
        return 0 < key_id < self._next_id

    def is_current(self, key_id: int) -> bool:
        """Whether its tenant's values are sealed with this key, and not with a later one."""
        key = self._by_id.get(key_id)
        return key is not None and self._by_tenant[key.tenant] is key

    @property
    def num_tenants(self) -> int:
        return len(self._by_tenant)

    def tenants(self) -> list[bytes]:
        """The salts of the tenants that have a key."""
        with self._lock:
            return [tenant for tenant in self._by_tenant if tenant is not None]

    # -------------------------------------------------------------------------------- sealing

    def for_sealing(self, tenant: bytes | None, num_values: int = 1) -> tuple[DataKey, list[bytes]]:
        """The tenant's key, durable, and a nonce for each of ``num_values`` values that are about to be sealed with it.

        Raises:
            StoreBlockedError: the key, or its reservation, can't be made durable; it may be tried again.
        """
        with self._lock:
            if self._may_differ:
                self._durably(self._by_id.values(), self._next_id)
            key = self._by_tenant.get(tenant)
            if key is None or key.used + num_values > MAX_SEALED_PER_KEY:
                key = self._make(tenant)
            elif key.used + num_values > key.reserved:
                self._reserve(key)
            key.used += num_values
            self._tick += 1
            key.last_used = self._tick
            return key, [self._random(NONCE_BYTES) for _ in range(num_values)]

    def for_tenant(self, tenant_salt: bytes) -> DataKey:
        """The tenant's present key, made if need be, durable on return.

        Raises:
            StoreBlockedError: it can't be made durable.
        """
        return self.for_sealing(tenant_salt, 0)[0]

    def _make(self, tenant: bytes | None) -> DataKey:
        key = self._fresh(self._next_id, tenant)
        superfluous = self._superfluous()
        kept = [other for other in self._by_id.values() if other.tenant not in superfluous]
        self._durably([*kept, key], self._next_id + 1)
        self._replace(kept)
        self._take(key)
        return key

    def _fresh(self, key_id: int, tenant: bytes | None) -> DataKey:
        secret = self._random(KEY_BYTES)
        return DataKey(key_id, tenant, Cipher(secret), self._master.wrap_key(key_id, tenant, secret), RESERVED_AT_ONCE, 0)

    def _superfluous(self) -> set[bytes | None]:
        """The tenants that yield to a new one: none below the bound, then an eighth of them at once."""
        if len(self._by_tenant) < MAX_TENANTS:
            return set()
        idle = [key for tenant, key in self._by_tenant.items() if tenant is not STORE and tenant not in self._held]
        return {key.tenant for key in sorted(idle, key=lambda each: each.last_used)[: MAX_TENANTS // 8]}

    def _reserve(self, key: DataKey) -> None:
        """Reserve for every tenant at once the first time: each restart gives up what was reserved and not used."""
        chosen = [key] if self._has_reserved else list(self._by_tenant.values())
        before = [(each, each.reserved) for each in chosen]
        for each in chosen:
            each.reserved = max(each.reserved, each.used) + RESERVED_AT_ONCE
        try:
            self._durably(self._by_id.values(), self._next_id)
        except StoreBlockedError:
            for each, reserved in before:
                each.reserved = reserved
            raise
        self._has_reserved = True

    # -------------------------------------------------------------------------------- ending

    def hold_tenants(self, tenant_salts: Collection[bytes]) -> None:
        """These tenants have pins: their keys never yield to the bound."""
        self._held = frozenset(tenant_salts)

    def destroy(self, tenant_salt: bytes) -> bool:
        """Destroy every key of a tenant, durably; whether there was one. What comes of this tenant from now on is sealed with a fresh one.

        Raises:
            OSError: it could not be done; the keys still are there.
        """
        return self._drop({tenant_salt}) > 0

    def renew(self, tenant_salts: Collection[bytes]) -> None:
        """Seal what comes of these tenants with fresh keys, durable on return. The old ones stay for reading until ``drop_superseded``.

        Raises:
            StoreBlockedError: it could not be done; the keys are as they were.
        """
        with self._lock:
            made: list[DataKey] = []
            for tenant in tenant_salts:
                if tenant in self._by_tenant:
                    made.append(self._fresh(self._next_id + len(made), tenant))
            if made:
                self._durably([*self._by_id.values(), *made], self._next_id + len(made))
                for key in made:
                    self._take(key)

    def drop_superseded(self, tenant_salts: Collection[bytes]) -> None:
        """Destroy every key of these tenants but the one that seals, durably.

        Raises:
            OSError: as ``destroy``.
        """
        with self._lock:
            kept = [key for key in self._by_id.values() if key.tenant not in tenant_salts or self.is_current(key.key_id)]
            if len(kept) < len(self._by_id):
                self._write(kept, self._next_id)
                self._replace(kept)

    def retain(self, tenant_salts: Collection[bytes]) -> int:
        """Destroy the keys of all tenants but these: nothing is left of the others. The number of tenants.

        Raises:
            OSError: as ``destroy``.
        """
        with self._lock:
            return self._drop({tenant for tenant in self._by_tenant if tenant is not STORE and tenant not in tenant_salts})

    def _drop(self, tenants: Collection[bytes | None]) -> int:
        with self._lock:
            present = {tenant for tenant in tenants if tenant in self._by_tenant}
            if present:
                kept = [key for key in self._by_id.values() if key.tenant not in present]
                self._write(kept, self._next_id)
                self._replace(kept)
            return len(present)

    def _replace(self, keys: Iterable[DataKey]) -> None:
        by_id, self._by_id, self._by_tenant = list(keys), {}, {}
        for key in by_id:
            self._take(key)

    # -------------------------------------------------------------------------------- the files

    def _durably(self, keys: Iterable[DataKey], next_id: int) -> None:
        try:
            self._write(keys, next_id, must_unlink=False)
        except OSError as error:
            raise StoreBlockedError(f"the encryption keys can't be written: {error}") from error

    def _write(self, keys: Iterable[DataKey], next_id: int, *, must_unlink: bool = True) -> None:
        """Have both files hold ``keys``. ``must_unlink``: the older files must be gone, too."""
        assert not self._readonly, "tools seal nothing"
        stored = tuple(_Stored(key.key_id, key.reserved, key.wrapped) for key in sorted(keys, key=lambda each: each.key_id))
        content = _Content(self._master.check, self._index_wrapped, next_id, stored)
        first = self._generation + 1
        self._generation += COPIES  # an attempt that failed may stand on disk all the same: its numbers are used up
        self._may_differ = True
        self._files.write(first, lambda number: encode_keys(number, content))
        self._next_id = next_id
        self.fault = ""
        with contextlib.nullcontext() if must_unlink else contextlib.suppress(OSError):
            self._files.remove_before(first)
        self._may_differ = False


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


def _sweep(directory: Path) -> None:
    """Finish what a crash left between the renaming of an old file and its end."""
    with contextlib.suppress(OSError):
        for path in directory.glob(".*"):
            _overwrite_and_remove(path)
