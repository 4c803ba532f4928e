"""``kvd store export``: the pins of a state directory, and the bytes of their blocks, as a pin set for another machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvd.cache.hashing import Namespace
from kvd.commands import Recipe
from kvd.storage import schema
from kvd.storage.beside_daemon import read_steadily
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.errors import StoreMovedError
from kvd.storage.generations import STORE_NAME, read_current
from kvd.storage.lock import is_locked
from kvd.storage.pin_sets import NoSuchPinError, PinSetBlock, PinSetNode, PinSetWriter, new_pin_set
from kvd.storage.recipes import read_recipes
from kvd.storage.schema import BadRowError, NodeRow
from kvd.storage.sealing import KEY_LOST
from kvd.storage.store import DATA_NAME, BlockReader, Store
from kvd.types import BlockHash

_MISSING = "missing"
_MAP_BYTES = 1 << 36
"""Of address space: room for a live daemon's file to grow while it is read."""
_GROUP = "target"
"""Rows of other groups are filled again when their model next runs; they never shorten a hit."""


def export_pins(
    state_dir: Path,
    path: Path,
    *,
    names: Collection[str] = (),
    with_bytes: bool = True,
    open_codec: Callable[[], Codec] = lambda: PLAIN,
) -> dict[str, Any]:
    """Write the pins ``names`` (all, if none are named) to the pin set ``path``; a report as JSON-like data. Reads only, also beside a live daemon.

    A pin whose blocks are not all on disk is exported with those that are, from its first block on. Beside a daemon that replaces its store meanwhile it begins anew,
    with what ``open_codec`` then gives.

    Raises:
        StoreBusyError: the daemon replaced it each time.
        NoSuchPinError: there is no pin of such a name, or none at all.
        RecipesUnreadableError, UnknownFormatError, OSError: it can't be read or written.
    """
    return read_steadily(
        state_dir,
        lambda: _export(state_dir, path, names=names, with_bytes=with_bytes, codec=open_codec()),
        is_bad=lambda report: bool(report["bad_blocks"]),
    )


def _export(state_dir: Path, path: Path, *, names: Collection[str], with_bytes: bool, codec: Codec) -> dict[str, Any]:
    recipes = read_recipes(state_dir, codec).value or {}
    if unknown := sorted(set(names) - set(recipes)):
        raise NoSuchPinError(f"no pin is named {unknown[0]!r}")
    chosen = [recipes[name] for name in names] if names else list(recipes.values())
    if not chosen:
        raise NoSuchPinError(f"there are no pins in {state_dir}")
    report: dict[str, Any] = {"file": str(path), "pins": len(chosen), "pins_without_all_bytes": [], "blocks": 0, "bad_blocks": 0}
    with new_pin_set(path) as writer:
        for recipe in chosen:
            writer.add(recipe)
        if with_bytes:
            with opened_store(state_dir, codec) as store:
                _export_blocks(store, writer, chosen, report)
        else:
            report["pins_without_all_bytes"] = sorted(recipe.name for recipe in chosen)
    report["bytes"] = writer.num_bytes
    return report


@contextmanager
def opened_store(state_dir: Path, codec: Codec) -> Iterator[Store | None]:
    """The current generation, read-only, also beside a live daemon; None if there is none yet.

    Raises:
        StoreBusyError: the daemon replaced it each time before it was open.
        StorageError: it can't be opened.
    """
    store = read_steadily(state_dir, lambda: open_current(state_dir, codec))
    try:
        yield store
    finally:
        if store is not None:
            store.close()


def open_current(state_dir: Path, codec: Codec) -> Store | None:
    """As ``opened_store``, at the first try.

    Raises:
        StoreMovedError: the daemon replaced it meanwhile.
        StorageError: it can't be opened.
    """
    current = read_current(state_dir, codec)
    if current is None:
        return None
    directory = state_dir / STORE_NAME / str(current.generation)
    if not directory.is_dir():
        if read_current(state_dir, codec) != current:
            raise StoreMovedError(f"{directory} was replaced")
        return None
    # A live daemon's file changes under a structural check: only the map's own guarantees hold there.
    size = 0
    with contextlib.suppress(OSError):  # ``Store`` says what is wrong with it
        size = (directory / DATA_NAME).stat().st_size
    map_bytes = max(_MAP_BYTES, 2 * size)
    return Store(directory, map_bytes, codec=codec, readonly=True, verify=not is_locked(state_dir))


def _export_blocks(store: Store | None, writer: PinSetWriter, recipes: list[Recipe], report: dict[str, Any]) -> None:
    if store is None:
        report["pins_without_all_bytes"] = sorted(recipe.name for recipe in recipes)
        return
    leaves = dict(_store_pins(store))
    namespaces = {namespace.root: namespace for namespace in store_namespaces(store)}
    written: set[BlockHash] = set()
    for recipe in recipes:
        chain = _chain(store, leaves.get(recipe.name))
        whole = bool(chain)
        for row in chain:
            if row.block_hash in written:
                continue
            block = _block(store, row, report) if row.root in namespaces else None
            if block is None:
                whole = False
                break
            if row.root not in written:
                written.add(row.root)
                writer.add(namespaces[row.root])
            written.add(row.block_hash)
            writer.add(PinSetNode(row.root, row.parent, row.token_ids, row.uses))
            writer.add(block)
            report["blocks"] += 1
        if not whole:
            report["pins_without_all_bytes"].append(recipe.name)


def _store_pins(store: Store) -> Iterator[tuple[str, BlockHash]]:
    """Where the pins end, as far as their rows are good: the recipes say what is pinned."""
    for key, value in store.rows(schema.DB_PINS):
        try:
            yield store.codec.unpack_pin(key, value)
        except BadRowError:
            continue


def _block(store: Store, row: NodeRow, report: dict[str, Any]) -> PinSetBlock | None:
    """A block's bytes, if they are there and good."""
    with store.reading_blocks() as reader:
        try:
            return PinSetBlock(_GROUP, row.block_hash, row.root, _plain(store.codec, reader, row.block_hash))
        except BadRowError as error:  # here: behind the transaction's end it would be the whole store's damage
            report["bad_blocks"] += error.reason not in {_MISSING, KEY_LOST}
            return None


def _plain(codec: Codec, reader: BlockReader, block_hash: BlockHash) -> bytes:
    value = reader.get(_GROUP, block_hash)
    if value is None:
        raise BadRowError(_MISSING)
    return codec.plain_block(codec.block_key(_GROUP, block_hash), value, block_hash)


def _chain(store: Store, leaf: BlockHash | None) -> list[NodeRow]:
    """The rows from a prompt's first block to ``leaf``; empty if one of them is missing or bad."""
    rows: list[NodeRow] = []
    while leaf is not None:
        key = store.codec.node_key(leaf)
        value = store.row(schema.DB_NODES, key)
        try:
            row = store.codec.unpack_node(key, value or b"")
        except BadRowError:
            return []
        rows.append(row)
        leaf = None if row.parent == row.root else row.parent
    return rows[::-1]


def store_namespaces(store: Store) -> Iterator[Namespace]:
    """The namespaces that a store knows; damaged rows are passed over."""
    for key, value in store.rows(schema.DB_NAMESPACES):
        try:
            yield store.codec.unpack_namespace(key, value)
        except BadRowError:
            continue
