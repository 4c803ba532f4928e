"""What a start makes of the state directory: the store generation, the node table and the log become one index.

Everything here is cache: whatever can't be read is set aside and reported, and the start goes on with less. Only an unknown format stops it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.cache.hashing import Namespace
from kvd.commands import Recipe
from kvd.storage import schema
from kvd.storage.budget import Budget
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.errors import StoreBlockedError, StoreDamagedError, UnknownFormatError
from kvd.storage.forget_intent import chain_of
from kvd.storage.generations import Generations
from kvd.storage.node_index import NodeIndex
from kvd.storage.schema import BadRowError, NodeRow
from kvd.storage.shrinking import shrink
from kvd.storage.store import Store
from kvd.types import BlockHash, KvGroup
from kvd.wal.disk_faults import fault_sentence
from kvd.wal.quarantine import QUARANTINE_NAME, make_folder
from kvd.wal.record import Record, WalFormatError
from kvd.wal.repair import RepairReport, repair_log
from kvd.wal.writer import LogPosition

WAL_NAME = "wal"


@dataclass(slots=True)
class Recovered:
    """The state directory as found. ``store`` None: no generation could be opened or made, ``store_error`` says why.

    ``is_unread``: there is one, and nothing is wrong with it, but it can't even be read at the moment (no descriptors, no memory). It may be later.
    """

    generations: Generations
    store: Store | None
    store_error: str
    is_unread: bool
    index: NodeIndex
    applied_lsn: int
    log: RepairReport
    num_bad_rows: int
    damage: list[str]

    def log_position(self) -> LogPosition:
        return LogPosition(max(self.applied_lsn, self.log.last_lsn) + 1, self.log.next_segment, self.log.num_bytes, self.log.last_lsns)


def recover(
    state_dir: Path,
    budget: Budget,
    groups: Sequence[KvGroup],
    *,
    set_store_aside: bool,
    now_unix_s: int,
    uses_half_life_s: float,
    codec: Codec = PLAIN,
) -> Recovered:
    """Open the store, load the index from it, and replay the log onto the index.

    Raises:
        UnknownFormatError: CURRENT, the store or the log is of another format.
    """
    generations = Generations(
        state_dir,
        map_bytes=budget.map_bytes,
        max_aside_bytes=budget.aside_max_bytes,
        max_quarantine_bytes=budget.quarantine_max_bytes,
        codec=codec,
    )
    damage: list[str] = []
    if set_store_aside:
        damage.append("the last starts died early: the store was set aside unread")
    store, store_error, is_unread = _open(generations, now_unix_s, set_aside=set_store_aside)
    index, num_bad_rows = NodeIndex(budget.block_bytes, uses_half_life_s=uses_half_life_s, now_unix_s=now_unix_s), 0
    if store is not None:
        try:
            num_bad_rows = load_index(index, store, groups)
        except (StoreBlockedError, StoreDamagedError) as error:
            store.close()
            if isinstance(error, StoreBlockedError):
                store, store_error, is_unread = None, str(error), True
            else:
                damage.append(str(error))
                store, store_error, is_unread = _open(generations, now_unix_s, set_aside=True)
            index = NodeIndex(budget.block_bytes, uses_half_life_s=uses_half_life_s, now_unix_s=now_unix_s)
    applied_lsn = store.meta.applied_lsn if store is not None else 0

    def apply(lsn: int, record: Record) -> None:
        if lsn > applied_lsn:
            index.apply(record)

    log = _replay(state_dir, generations, apply, budget, damage)
    damage += generations.damage
    return Recovered(generations, store, store_error, is_unread, index, applied_lsn, log, num_bad_rows, damage)


def keep_budget(recovered: Recovered, budget: Budget, groups: Sequence[KvGroup], *, now_unix_s: int) -> None:
    """Have the store that was opened keep within a budget that has become smaller. One that can only be read is left as it is until it can be written."""
    store = recovered.store
    if store is None or store.readonly or store.file_bytes <= budget.map_bytes:
        return
    recovered.store, recovered.store_error = shrink(recovered.generations, store, recovered.index, budget, groups, now_unix_s=now_unix_s)
    recovered.applied_lsn = recovered.store.meta.applied_lsn if recovered.store is not None else 0
    recovered.damage += [note for note in recovered.generations.damage if note not in recovered.damage]


def load_index(index: NodeIndex, store: Store, groups: Sequence[KvGroup]) -> int:
    """Fill ``index`` from the store; the number of rows that failed their checks and are marked for removal.

    Raises:
        StoreDamagedError: the store can't be read.
        StoreBlockedError: not at the moment.
    """
    codec, bad = store.codec, index.dropped_keys
    num_bad_before = len(bad)

    def namespaces() -> Iterator[Namespace]:
        for key, value in store.rows(schema.DB_NAMESPACES):
            try:
                yield codec.unpack_namespace(key, value)
            except BadRowError:
                bad.add((schema.DB_NAMESPACES, key))

    def nodes() -> Iterator[NodeRow]:
        for key, value in store.rows(schema.DB_NODES):
            try:
                yield codec.unpack_node(key, value)
            except BadRowError:
                bad.add((schema.DB_NODES, key))

    def pins() -> Iterator[tuple[str, BlockHash]]:
        for key, value in store.rows(schema.DB_PINS):
            try:
                yield codec.unpack_pin(key, value)
            except BadRowError:
                bad.add((schema.DB_PINS, key))

    num_orphans = index.load(namespaces(), nodes(), pins())
    num_bad = len(bad) - num_bad_before
    index.load_stored(store.block_keys(), groups, codec)
    return num_orphans + num_bad


def absorb(index: NodeIndex, stored: NodeIndex) -> None:
    """Put into ``index``, which has gone on meanwhile, what was loaded from a store that could not be read at the start. Pins are as the recipes had them."""
    for namespace in stored.namespaces.values():
        index.add_namespace(namespace)
    for node in sorted(stored.nodes.values(), key=lambda each: each.depth):
        is_new = node.block_hash not in index.nodes
        mine = index.insert(*node.names())
        if mine is None:  # another block has this hash by now
            index.dropped_bytes.add(node.block_hash)
            continue
        if is_new:
            mine.uses, mine.last_use_unix_s, mine.origin = node.uses, node.last_use_unix_s, node.origin
        if node.stored_bytes:
            index.set_stored(mine, node.stored_bytes)
    index.dropped_keys |= stored.dropped_keys
    index.dropped_bytes |= stored.dropped_bytes
    index.removed |= stored.removed - index.nodes.keys()


def adopt_recipes(index: NodeIndex, recipes: dict[str, Recipe], fingerprint: bytes, block_bytes: int) -> list[list[BlockHash]]:
    """Make the index's pins those of the recipes, which are the truth; the chains of blocks that the recipes stand for, by priority.

    ``block_bytes`` is the length of a block's packed tokens.
    """
    for name in [name for name in index.pins if name not in recipes]:
        index.unpin(name)
    chains = []
    for recipe in sorted(recipes.values(), key=lambda each: (-each.priority, each.created_unix_s)):
        chain = list(chain_of(Namespace(fingerprint, recipe.tenant_salt, recipe.adapter), recipe.token_ids, block_bytes))
        chains.append(chain)
        if chain and chain[-1] in index.nodes:
            index.pin(recipe.name, chain[-1])
        else:
            index.unpin(recipe.name)
    return chains


def _open(generations: Generations, now_unix_s: int, *, set_aside: bool) -> tuple[Store | None, str, bool]:
    """The store or why there is none, and whether there is one that can't be read yet."""
    try:
        if set_aside:
            generations.set_aside()
        store = generations.open(now_unix_s)
    except (StoreBlockedError, StoreDamagedError) as error:
        return None, str(error), isinstance(error, StoreBlockedError) and not set_aside and generations.has_current
    except OSError as error:
        return None, fault_sentence(error), False
    return store, store.blocked_by, False


def _replay(
    state_dir: Path, generations: Generations, apply: Callable[[int, Record], None], budget: Budget, damage: list[str]
) -> RepairReport:
    directory = state_dir / WAL_NAME
    if note := make_folder(directory, state_dir / QUARANTINE_NAME, budget.quarantine_max_bytes):
        damage.append(note)
    try:
        log = repair_log(
            directory,
            generations.current.store_uuid,
            apply,
            quarantine=state_dir / QUARANTINE_NAME,
            quarantine_max_bytes=budget.quarantine_max_bytes,
            seal=generations.codec.wal_seal(generations.current.store_uuid),
        )
    except WalFormatError as error:
        raise UnknownFormatError(str(error)) from error
    except OSError as error:
        damage.append(f"the write-ahead log can't be read: {error}; it was dropped")
        shutil.rmtree(directory, ignore_errors=True)
        return RepairReport()
    damage += log.damage
    return log
