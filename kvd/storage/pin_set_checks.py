"""What an entry of a pin set may say: everything that a store, a start or an unpin relies on. The rules of a pin are those of the edge (kvd.transport.validation).

A file that is whole may still have been made by anybody; what is refused here is refused before anything is changed.
"""

from __future__ import annotations

import math
from typing import assert_never

from kvd.cache.hashing import HASH_BYTES, Namespace
from kvd.cache.tenants import MAX_CACHE_SALT_BYTES, PIN_NAME, is_pin_name, pin_tenant
from kvd.commands import Recipe
from kvd.storage import schema
from kvd.storage.pin_sets import PinSetBlock, PinSetEntry, PinSetNode
from kvd.storage.recipes import refusal
from kvd.types import TOKEN_BYTES

MAX_PRIORITY = 100
_MAX_UNIX_S = 253402300799.0
"""The end of the year 9999."""
_MAX_DIGEST_BYTES = 64
_MAX_USES = (1 << 32) - 1
_MAX_NODE_TOKENS = 4096
"""Of a block: far more than any daemon is configured with."""


def entry_refusal(entry: PinSetEntry) -> str:
    """Why an entry can't be taken; empty if it can."""
    match entry:
        case Recipe():
            problem = _of_recipe(entry)
            return f"the pin {entry.name[:200]!r} can't be kept: {problem}" if problem else ""
        case Namespace():
            return _of_namespace(entry)
        case PinSetNode():
            return _of_node(entry)
        case PinSetBlock():
            return _of_block(entry)
        case _:
            assert_never(entry)


def _of_recipe(recipe: Recipe) -> str:
    if not is_pin_name(recipe.name):
        return "that is no pin's name"
    if problem := _of_tokens(recipe.token_ids):
        return problem
    if recipe.messages is not None and recipe.text is not None:
        return "it is made of messages and of text"
    if not 0 <= recipe.priority <= MAX_PRIORITY:
        return f"priority is {recipe.priority}; it must be from 0 to {MAX_PRIORITY}"
    for name, value in (("created_unix_s", recipe.created_unix_s), ("expires_unix_s", recipe.expires_unix_s)):
        if not math.isfinite(value) or not 0 <= value <= _MAX_UNIX_S:
            return f"{name} is {value}"
    if len(recipe.tenant_salt) > MAX_CACHE_SALT_BYTES:
        return f"tenant_salt has {len(recipe.tenant_salt)} bytes"
    if pin_tenant(recipe.name) and not recipe.tenant_salt:
        return "it is a tenant's and has no tenant's salt"
    if recipe.adapter_name and not PIN_NAME.fullmatch(recipe.adapter_name):
        return "that is no adapter's name"
    if max(len(recipe.tokenizer_digest), len(recipe.adapter)) > _MAX_DIGEST_BYTES:
        return f"a digest has more than {_MAX_DIGEST_BYTES} bytes"
    return refusal(recipe)


def _of_namespace(namespace: Namespace) -> str:
    if len(namespace.fingerprint) != HASH_BYTES:
        return f"a fingerprint has {len(namespace.fingerprint)} bytes"
    if len(namespace.tenant_salt) > MAX_CACHE_SALT_BYTES or len(namespace.adapter_digest) > _MAX_DIGEST_BYTES:
        return "a namespace's salt or digest is too long"
    return ""


def _of_node(node: PinSetNode) -> str:
    if len(node.root) != HASH_BYTES or len(node.parent) != HASH_BYTES:
        return "a hash has another length than hashes have"
    if not 0 <= node.uses <= _MAX_USES:
        return f"a node was used {node.uses} times"
    if not 0 < len(node.token_ids) <= _MAX_NODE_TOKENS * TOKEN_BYTES:
        return f"a node has {len(node.token_ids)} bytes of tokens"
    return _of_tokens(node.token_ids)


def _of_block(block: PinSetBlock) -> str:
    if len(block.block_hash) != HASH_BYTES or len(block.root) != HASH_BYTES:
        return "a hash has another length than hashes have"
    if not 0 < len(block.group.encode()) <= schema.MAX_GROUP_BYTES or "\0" in block.group:
        return f"{block.group[:200]!r} is no KV group's name"
    if len(block.plain) <= schema.BLOCK_HEADER_BYTES:
        return f"a block has {len(block.plain)} bytes"
    return ""


def _of_tokens(token_ids: bytes) -> str:
    return f"{len(token_ids)} bytes are no whole tokens" if len(token_ids) % TOKEN_BYTES else ""
