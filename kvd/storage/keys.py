"""The key ring: a data key for each tenant (docs/storage-format.md, "Encryption"). ``keys_file`` is how it stands on disk.

It is data, as recipes are: two files hold the same (``two_copies``). A key is durable before anything is sealed with it. Destroying a tenant's keys rewrites both
files without them and overwrites the older ones before they are unlinked; what was sealed with them can't be read from then on, wherever a copy of it may be.

Nonces are 96 random bits, so a key may seal 2^32 values at most (NIST SP 800-38D, 8.3). How many it has sealed is counted in reservations: the files say
up to which number it may have, and say so before it does. At half the bound the tenant gets another key; the old one stays for reading.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.storage.cipher import KEY_BYTES, NONCE_BYTES, Cipher
from kvd.storage.errors import StoreBlockedError
from kvd.storage.keys_file import INDEX_PLACE, STORE, KeysContent, MasterKey, StoredKey, encode_keys, finish_removals, key_files, read_keys
from kvd.storage.two_copies import COPIES
from kvd.wal.disk_faults import fault_sentence, is_passing

MAX_TENANTS = 8192
"""Tenants with a key. Beyond, those that have not been used for longest lose theirs, which is to say their cached blocks; never one that a pin needs."""
MAX_SEALED_PER_KEY = 1 << 31
_WERE_GONE = "files of the encryption keys were gone while the daemon ran; they are written anew from memory"
RESERVED_AT_ONCE = 1 << 20


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


class KeyRing:
    """May be used from any thread. ``notes`` says, as sentences, what was found damaged or gone; ``fault`` why the files are not as they should be.

    ``create``: make a ring where there is none; ``may_wait``: also on a disk that is full or read-only, for nothing is sealed before it is written. ``readonly``: for tools; nothing is written and nothing can be sealed.

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
        may_wait: bool = False,
        readonly: bool = False,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._files = key_files(state_dir)
        self._master = MasterKey(master_key, random)
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
            self._index_wrapped = self._master.wrap(self.index_key, INDEX_PLACE)
            self._next_id, self._generation = 1, 0
            try:
                self._write((), self._next_id)
            except OSError as error:
                if not (may_wait and is_passing(error)):
                    raise
                self.fault = f"{fault_sentence(error)}: the encryption keys can't be written"
        else:
            self._load(state_dir)

    def _load(self, state_dir: Path) -> None:
        found = read_keys(state_dir, self._master)
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
        finish_removals(self._files.directory)
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
            if self._may_differ or self._are_gone():
                self._durably(self._by_id.values(), self._next_id)
            key = self._by_tenant.get(tenant)
            if key is None or key.used + num_values > MAX_SEALED_PER_KEY:
                self._make([tenant])
                key = self._by_tenant[tenant]
            elif key.used + num_values > key.reserved:
                self._reserve(key)
            key.used += num_values
            self._tick += 1
            key.last_used = self._tick
            return key, [self._random(NONCE_BYTES) for _ in range(num_values)]

    def _are_gone(self) -> bool:
        """Whether somebody took a file of the ring away: what is sealed from now on could not be read after a restart. Two stats, far less than sealing takes."""
        if all(os.path.lexists(self._files.path(self._generation - copy)) for copy in range(COPIES)):
            return False
        if _WERE_GONE not in self.notes:
            self.notes += (_WERE_GONE,)
        return True

    def for_tenant(self, tenant_salt: bytes) -> DataKey:
        """The tenant's present key, made if need be, durable on return.

        Raises:
            StoreBlockedError: it can't be made durable.
        """
        return self.for_sealing(tenant_salt, 0)[0]

    def prepare(self, tenants: Collection[bytes]) -> None:
        """Make the keys that these tenants have none of, an eighth of the bound in one write of the files: each write is about ten syncs.

        Raises:
            StoreBlockedError: they can't all be made durable.
        """
        with self._lock:
            new = [tenant for tenant in dict.fromkeys(tenants) if tenant not in self._by_tenant]
            at_once = max(1, MAX_TENANTS // 8)
            for start in range(0, len(new), at_once):
                self._make(new[start : start + at_once])

    def _make(self, tenants: Sequence[bytes | None]) -> None:
        keys = [self._fresh(self._next_id + index, tenant) for index, tenant in enumerate(tenants)]
        superfluous = self._superfluous(len(keys))
        kept = [other for other in self._by_id.values() if other.tenant not in superfluous]
        self._durably([*kept, *keys], self._next_id + len(keys))
        self._replace(kept)
        self._tick += 1
        for key in keys:
            key.last_used = self._tick
            self._take(key)

    def _fresh(self, key_id: int, tenant: bytes | None) -> DataKey:
        secret = self._random(KEY_BYTES)
        return DataKey(key_id, tenant, Cipher(secret), self._master.wrap_key(key_id, tenant, secret), RESERVED_AT_ONCE, 0)

    def _superfluous(self, num_new: int) -> set[bytes | None]:
        """The tenants that yield to new ones: none below the bound, then an eighth of them at once."""
        if len(self._by_tenant) + num_new <= MAX_TENANTS:
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
            raise StoreBlockedError(f"{fault_sentence(error)}: the encryption keys can't be written") from error

    def _write(self, keys: Iterable[DataKey], next_id: int, *, must_unlink: bool = True) -> None:
        """Have both files hold ``keys``. ``must_unlink``: the older files must be gone, too."""
        assert not self._readonly, "tools seal nothing"
        stored = tuple(StoredKey(key.key_id, key.reserved, key.wrapped) for key in sorted(keys, key=lambda each: each.key_id))
        content = KeysContent(self._master.check, self._index_wrapped, next_id, stored)
        first = self._generation + 1
        self._generation += COPIES  # an attempt that failed may stand on disk all the same: its numbers are used up
        self._may_differ = True
        self._files.write(first, lambda number: encode_keys(number, content))
        self._next_id = next_id
        self.fault = ""
        with contextlib.nullcontext() if must_unlink else contextlib.suppress(OSError):
            self._files.remove_before(first)
        self._may_differ = False
