"""``kvd store import``: the pins of a pin set into a state directory that no daemon holds.

A recipe is welcome everywhere. The bytes of its blocks are of use only under the fingerprint that they were computed with: a store that knows other
fingerprints refuses them, and one that knows none yet takes them and lets the next start decide.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from kvd.cache.hashing import Namespace
from kvd.commands import Recipe
from kvd.config import StorageConfig
from kvd.storage import schema
from kvd.storage.budget import plan_budget, recipes_max_bytes
from kvd.storage.codec import Codec
from kvd.storage.encryption import master_key_of, open_encryption
from kvd.storage.errors import StoreFullError
from kvd.storage.forget_intent import read_intent
from kvd.storage.generations import Generations
from kvd.storage.lock import StateLock
from kvd.storage.pin_export import store_namespaces
from kvd.storage.pin_set_checks import entry_refusal
from kvd.storage.pin_sets import PinSetBlock, PinSetEntry, PinSetError, PinSetNode, PinTransferError, read_pin_set
from kvd.storage.recipes import MAX_RECIPES, encode_recipes, read_recipes, recipe_files
from kvd.storage.schema import BadRowError, NodeRow
from kvd.storage.store import Store, StoreTransaction
from kvd.types import BlockHash, KvGroup
from kvd.wal.durable import make_directory


@dataclass(slots=True)
class _Done:
    added: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    num_blocks: int = 0
    num_known: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


def import_pins(config: StorageConfig, path: Path, *, replace_pins: bool = False, with_bytes: bool = True) -> dict[str, Any]:
    """Take the pins of the pin set ``path`` into ``config.state_dir``; a report as JSON-like data.

    The file is read and each of its entries checked before anything is changed. A pin whose name is taken by another is kept as it is unless ``replace_pins``.
    That bytes belong to their tokens can't be checked: import only what you trust.

    Raises:
        PinSetError, PinTransferError: nothing was changed.
        StateLockedError: a daemon holds the directory.
        EncryptionKeyError: the directory's key is missing or wrong.
        RecipesUnreadableError, UnknownFormatError, StorageError, OSError: it can't be read or written.
    """
    recipes: dict[str, Recipe] = {}
    row_bytes: dict[str, int] = {}
    for entry in _checked(path):
        if isinstance(entry, Recipe):
            recipes[entry.name] = entry
        elif isinstance(entry, PinSetBlock):
            row_bytes[entry.group] = max(row_bytes.get(entry.group, 0), len(entry.plain) - schema.BLOCK_HEADER_BYTES)
    master_key = master_key_of(config.store_encryption_key_file)
    make_directory(config.state_dir)
    lock = StateLock(config.state_dir)
    try:
        codec = open_encryption(config.state_dir, master_key, structlog.get_logger("storage")).codec
        if read_intent(config.state_dir, codec)[0]:  # what completes it would take pins that came after it
            raise PinTransferError("a forget is not completed yet; start the daemon until it is, then import")
        done = _Done()
        _import_recipes(config, recipes, done, replace_pins=replace_pins, codec=codec)
        if with_bytes and row_bytes:
            groups = [KvGroup(name, num_bytes, b"") for name, num_bytes in row_bytes.items()]
            budget = plan_budget(config, groups, codec)
            generations = Generations(config.state_dir, map_bytes=budget.map_bytes, max_aside_bytes=budget.aside_max_bytes, codec=codec)
            store = generations.open(int(time.time()))
            try:
                _Blocks(store, budget.max_block_bytes, budget.commit_bytes, done).take(_checked(path))
            finally:
                store.close()
    finally:
        lock.release()
    return {
        "file": str(path),
        "pins_added": done.added,
        "pins_replaced": done.replaced,
        "pins_kept": done.kept,
        "blocks_added": done.num_blocks,
        "blocks_known": done.num_known,
        "blocks_refused": done.refused,
    }


def _checked(path: Path) -> Iterator[PinSetEntry]:
    """As ``read_pin_set``.

    Raises:
        PinSetError: also for an entry that is out of bounds.
    """
    for number, entry in enumerate(read_pin_set(path)):
        if problem := entry_refusal(entry):
            raise PinSetError(f"{path}: its entry {number} can't be taken: {problem}")
        yield entry


def _import_recipes(config: StorageConfig, recipes: dict[str, Recipe], done: _Done, *, replace_pins: bool, codec: Codec) -> None:
    state_dir = config.state_dir
    found = read_recipes(state_dir, codec)
    merged = dict(found.value or {})
    for name, recipe in recipes.items():
        if name not in merged:
            done.added.append(name)
        elif replace_pins and merged[name] != recipe:
            done.replaced.append(name)
        else:
            done.kept.append(name)
            continue
        merged[name] = recipe
    if len(merged) > MAX_RECIPES:
        raise PinTransferError(f"{len(merged)} pins would be kept, the most is {MAX_RECIPES}; unpin some first")
    total_bytes, max_bytes = len(encode_recipes(0, merged)), recipes_max_bytes(config.store_max_bytes)
    if (done.added or done.replaced) and total_bytes > max_bytes:
        raise PinTransferError(f"the recipes of all pins would take {total_bytes} bytes; store_max_bytes leaves them {max_bytes}")
    if done.added or done.replaced or not found.is_settled:
        codec.hold_tenants({recipe.tenant_salt for recipe in merged.values()})
        files = recipe_files(state_dir)
        files.write(found.highest + 1, lambda number: encode_recipes(number, merged, codec))
        files.remove_before(found.highest + 1)


class _Blocks:
    """Puts a pin set's blocks into an open store, in bounded transactions, root first as they come, as far as the budget has room."""

    def __init__(self, store: Store, max_block_bytes: int, commit_bytes: int, done: _Done) -> None:
        self._store = store
        self._codec = store.codec
        self._commit_bytes = commit_bytes
        self._done = done
        self._namespaces = {namespace.root for namespace in store_namespaces(store)}
        self._fingerprints = {namespace.fingerprint for namespace in store_namespaces(store)}
        self._refused: dict[BlockHash, str] = {}
        """Roots, and blocks with what hangs below them, and why."""
        self._nodes: dict[BlockHash, PinSetNode] = {}
        self._depths: dict[BlockHash, int] = {}
        self._max_block_bytes = max_block_bytes
        self._num_stored = store.num_rows(schema.DB_BLOCKS)
        self._txn: StoreTransaction | None = None
        self._num_in_txn = 0

    def take(self, entries: Iterator[PinSetEntry]) -> None:
        try:
            for entry in entries:
                if isinstance(entry, Namespace):
                    self._namespace(entry)
                elif isinstance(entry, PinSetNode):
                    self._nodes[entry.block_hash] = entry
                elif isinstance(entry, PinSetBlock):
                    self._block(entry)
            self._commit()
        except BaseException:
            if self._txn is not None:
                self._txn.abort()
            raise

    def _namespace(self, namespace: Namespace) -> None:
        if self._fingerprints and namespace.fingerprint not in self._fingerprints:
            self._refused[namespace.root] = "fingerprint"
        elif namespace.root not in self._namespaces:
            self._namespaces.add(namespace.root)
            self._begun().put_namespace(namespace)

    def _block(self, entry: PinSetBlock) -> None:
        node = self._nodes.pop(entry.block_hash, None)
        if node is None or node.root != entry.root:
            self._refuse(entry, "identity")
            return
        reason = self._refused.get(node.root) or self._refused.get(node.parent)
        if reason:
            self._refuse(entry, reason)
            return
        if node.root not in self._namespaces or (node.parent != node.root and node.parent not in self._depths):
            self._refuse(entry, "identity")
            return
        depth = self._depths[entry.block_hash] = 0 if node.parent == node.root else self._depths[node.parent] + 1
        if self._store.has_block(entry.group, entry.block_hash):
            self._done.num_known += 1
            return
        try:
            value = self._codec.block_value(entry.group, entry.block_hash, entry.root, entry.plain)
        except BadRowError as error:
            self._refuse(entry, error.reason)
            return
        if (self._num_stored + 1) * (len(value) + schema.PAGE_HEADER_BYTES) > self._max_block_bytes:
            self._refuse(entry, "no_room")
            return
        try:
            self._put(entry, node, depth, value)
        except StoreFullError:
            self._abort()
            self._refuse(entry, "no_room")

    def _put(self, entry: PinSetBlock, node: PinSetNode, depth: int, value: bytes) -> None:
        txn = self._begun()
        if self._store.row(schema.DB_NODES, self._codec.node_key(entry.block_hash)) is None:
            now = int(time.time())
            txn.put_node(NodeRow(entry.block_hash, node.root, node.parent, node.token_ids, depth, node.uses, now, "computed"))
        txn.put_block(entry.group, entry.block_hash, memoryview(value))
        self._num_stored += 1
        self._num_in_txn += 1
        if txn.num_bytes >= self._commit_bytes:
            self._commit()

    def _refuse(self, entry: PinSetBlock, reason: str) -> None:
        self._done.refuse(reason)
        self._refused[entry.block_hash] = reason

    def _begun(self) -> StoreTransaction:
        if self._txn is None:
            self._txn = self._store.begin()
        return self._txn

    def _commit(self) -> None:
        if self._txn is not None:
            self._txn.commit()
            self._txn = None
        self._done.num_blocks += self._num_in_txn
        self._num_in_txn = 0

    def _abort(self) -> None:
        """The transaction found no room: what it held is not there."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None
        self._done.refused["no_room"] = self._done.refused.get("no_room", 0) + self._num_in_txn
        self._num_stored = self._store.num_rows(schema.DB_BLOCKS)
        self._max_block_bytes = 0
        self._num_in_txn = 0
