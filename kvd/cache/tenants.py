"""Tenant salts: how a tenant's name and a client's ``cache_salt`` become the namespace's salt, and whose a salt is.

    no tenant, no salt     empty: shared by all such clients
    else                   H("d" len domain ‖ "t" len tenant)[:16] ‖ H("d" len domain ‖ "t" len tenant ‖ "s" len cache_salt)

Every ``len`` is a u64. The first sixteen bytes are the tenant's own, so a client's salt narrows within its tenant and reaches no other's, and everything
of a tenant can be found without knowing the salts that its clients chose.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from kvd.types import PackedTokens

PIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")
"""Of a pin, as its tenant knows it."""
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
"""Of a CURVE key's tenant. Without a colon, so that no name is a uid's; without a slash, which parts tenant and pin."""
MAX_CACHE_SALT_BYTES = 64
"""Of what a client chooses."""

_UID_TENANT = re.compile(r"uid:[0-9]{1,10}")
_DOMAIN = b"kvd.tenant-salt.v1"
_GROUP_BYTES = 16
_SALT_BYTES = _GROUP_BYTES + 32


def tenant_salt(tenant: str, cache_salt: bytes) -> bytes:
    """The namespace's salt for requests of ``tenant`` (empty: of none) with ``cache_salt``."""
    if not tenant and not cache_salt:
        return b""
    return _group(tenant) + _digest((b"t", tenant.encode()), (b"s", cache_salt))


def is_of_tenant(salt: bytes, tenant: str) -> bool:
    """Whether a namespace's salt is one of the tenant's, whatever its clients' salts."""
    return (not salt and not tenant) or salt[:_GROUP_BYTES] == _group(tenant)


def may_be_asked(salt: bytes) -> bool:
    """Whether a request can have this salt: one of another length is a client's own bytes, as 0.1.0 kept them."""
    return len(salt) in {0, _SALT_BYTES}


def pin_salt(name: str, salt: bytes) -> bytes:
    """The salt of a pin of this name whose recipe states ``salt``: 0.1.0 stated the client's own bytes."""
    tenant = pin_tenant(name)
    return salt if not salt or is_of_tenant(salt, tenant) else tenant_salt(tenant, salt)


def pin_tenant(name: str) -> str:
    """The tenant in a pin's name as the engine knows it (``TENANT/NAME``, or ``NAME`` without a tenant)."""
    return name.rpartition("/")[0]


def is_pin_name(name: str) -> bool:
    """Whether a pin may have this name as the engine knows it: any other could not be unpinned."""
    tenant, slash, label = name.rpartition("/")
    is_tenant = TENANT_NAME.fullmatch(tenant) is not None or _UID_TENANT.fullmatch(tenant) is not None
    return PIN_NAME.fullmatch(label) is not None and (is_tenant or not slash)


def pin_label(name: str) -> str:
    """A pin's name as its tenant knows it."""
    return name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to be forgotten: everything of a tenant, of one salt, or below a prefix under one salt.

    ``token_ids`` are whole blocks; empty: everything. ``salt`` None: every salt of the tenant.
    """

    tenant: str
    salt: bytes | None = None
    token_ids: PackedTokens = b""

    def has_salt(self, salt: bytes) -> bool:
        """Whether something under this salt may be in it."""
        return is_of_tenant(salt, self.tenant) if self.salt is None else salt == self.salt

    def holds(self, salt: bytes, token_ids: bytes | bytearray) -> bool:
        """Whether a sequence is in it: it begins with the prefix."""
        return self.has_salt(salt) and token_ids[: len(self.token_ids)] == self.token_ids

    def may_hold(self, salt: bytes, token_ids: bytes | bytearray) -> bool:
        """Whether a sequence is in it, or may grow into it."""
        num_bytes = min(len(token_ids), len(self.token_ids))
        return self.has_salt(salt) and token_ids[:num_bytes] == self.token_ids[:num_bytes]


def _group(tenant: str) -> bytes:
    return _digest((b"t", tenant.encode()))[:_GROUP_BYTES]


def _digest(*fields: tuple[bytes, bytes]) -> bytes:
    digest = hashlib.sha256()
    for tag, value in ((b"d", _DOMAIN), *fields):
        digest.update(tag + len(value).to_bytes(8, "little") + value)
    return digest.digest()
