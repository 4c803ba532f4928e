r"""What is being forgotten, on disk before anything else of it is: a start that finds it goes on where the crash came.

    8 bytes "KVDFGT\r\n", u32 format version, u64 length, msgpack list of marks, u32 crc32c of all before

A mark names no token and no text: the tenant, its salt, and for a prefix the hashes of its blocks. In an encrypted store the list is sealed under the store's own key.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from crc32c import crc32c

from kvd.cache.hashing import Namespace, block_hash
from kvd.cache.tenants import Selection, is_of_tenant
from kvd.commands import Recipe
from kvd.observe.failpoints import declare
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.schema import BadRowError, check_format
from kvd.types import BlockHash
from kvd.wal.durable import read_regular, remove_file, replace_file

INTENT_NAME = "forgetting"
FORMAT_VERSION = 1
_MAGIC = b"KVDFGT\r\n"
_HEADER = struct.Struct("<8sIQ")
_CRC = struct.Struct("<I")
_POINTS = ("forget.intent.before_sync", "forget.intent.before_rename", "forget.intent.after_rename")

declare(*_POINTS)


class Mark(msgspec.Struct, frozen=True):
    """``salt`` None: every salt of the tenant. ``chains``: a prefix's block hashes, root first, once for each namespace; none: everything."""

    tenant: str
    salt: bytes | None = None
    chains: tuple[tuple[bytes, ...], ...] = ()

    def has_salt(self, salt: bytes) -> bool:
        return is_of_tenant(salt, self.tenant) if self.salt is None else salt == self.salt

    def takes(self, recipe: Recipe, fingerprint: bytes, block_bytes: int) -> bool:
        """Whether a pin is below it, by the tokens that its recipe states."""
        if not self.has_salt(recipe.tenant_salt):
            return False
        if not self.chains:
            return True
        namespace = Namespace(fingerprint, recipe.tenant_salt, recipe.adapter)
        hashes = set(chain_of(namespace, recipe.token_ids, block_bytes))
        return any(chain[-1] in hashes for chain in self.chains)


def mark_of(selection: Selection, namespaces: Iterable[Namespace], block_bytes: int) -> Mark:
    """The mark of a selection; for a prefix in those of ``namespaces`` that may hold it."""
    assert selection.salt is not None or not selection.token_ids, "a prefix is one salt's"
    own = [each for each in namespaces if selection.has_salt(each.tenant_salt)] if selection.token_ids else []
    return Mark(selection.tenant, selection.salt, tuple(chain_of(each, selection.token_ids, block_bytes) for each in own))


def chain_of(namespace: Namespace, token_ids: bytes, block_bytes: int) -> tuple[BlockHash, ...]:
    """The hashes of the full blocks of ``token_ids``, root first."""
    parent, chain = namespace.root, []
    for start in range(0, len(token_ids) - block_bytes + 1, block_bytes):
        parent = block_hash(parent, token_ids[start : start + block_bytes])
        chain.append(parent)
    return tuple(chain)


def write_intent(state_dir: Path, marks: Sequence[Mark], codec: Codec = PLAIN) -> None:
    """Have the file say what is being forgotten, durably; without marks it is gone.

    Raises:
        OSError: it could not be written or removed.
    """
    path = state_dir / INTENT_NAME
    if not marks:
        remove_file(path)
        return
    payload = codec.pack_private(_MAGIC, msgspec.msgpack.encode(list(marks)))
    body = _HEADER.pack(_MAGIC, codec.format_of(FORMAT_VERSION), len(payload)) + payload
    replace_file(path, body + _CRC.pack(crc32c(body)), points=_POINTS)


def read_intent(state_dir: Path, codec: Codec = PLAIN) -> tuple[list[Mark], str]:
    """What a start has to forget yet, and a sentence on a file that can't be read (nobody was told that it was forgotten).

    Raises:
        UnknownFormatError: the file is whole and of another format.
    """
    path = state_dir / INTENT_NAME
    try:
        data = read_regular(path)
    except OSError as error:
        return [], "" if not os.path.lexists(path) else f"{path} can't be read: {error}; a forget that was under way is not completed"
    damage = f"{path} is damaged; a forget that was under way is not completed"
    if len(data) < _HEADER.size + _CRC.size or _CRC.unpack(data[-_CRC.size :])[0] != crc32c(data[: -_CRC.size]):
        return [], damage
    magic, version, length = _HEADER.unpack_from(data)
    payload = data[_HEADER.size : -_CRC.size]
    if magic != _MAGIC or len(payload) != length:
        return [], damage
    if version == FORMAT_VERSION:
        codec = PLAIN  # of the last start before this one encrypted the directory
    check_format(f"{path}: an intent to forget", version, codec.format_of(FORMAT_VERSION))
    try:
        return msgspec.msgpack.decode(codec.unpack_private(_MAGIC, payload), type=list[Mark]), ""
    except (msgspec.MsgspecError, BadRowError):
        return [], damage
