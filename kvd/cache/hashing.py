"""Block identity: a chained SHA-256 over a typed, length-prefixed root (docs/storage-format.md, "Identity").

``H(parent || tokens as little-endian u32)``; the root is ``H(domain || fingerprint || tenant salt || adapter digest)``. The tree
compares tokens besides, so that a collision is a miss and not a wrong token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvd.types import BlockHash, PackedTokens

HASH_BYTES = 32
_DOMAIN = b"kvd.block-root.v1"
_digest = hashlib.sha256
"""Of blocks. The tests put a weak one in its place."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a prefix's KV depends on besides its tokens. Equal namespaces may share blocks; others never do."""

    fingerprint: bytes
    """Of the target model's KV: weights, config, dtype, layout, format version (executor/models/fingerprint.py)."""
    tenant_salt: bytes = b""
    adapter_digest: bytes = b""
    root: BlockHash = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", _root_hash(self.fingerprint, self.tenant_salt, self.adapter_digest))


def _root_hash(fingerprint: bytes, tenant_salt: bytes, adapter_digest: bytes) -> BlockHash:
    digest = hashlib.sha256()
    for tag, value in ((b"d", _DOMAIN), (b"f", fingerprint), (b"t", tenant_salt), (b"a", adapter_digest)):
        digest.update(tag + len(value).to_bytes(8, "little") + value)
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, token_ids: PackedTokens) -> BlockHash:
    """Identity of the full block holding ``token_ids`` after the prefix that ends with ``parent``."""
    return BlockHash(_digest(parent + token_ids).digest())
