"""``kvd store check`` and ``kvd store dump`` as functions: they read every record, node and block of a state directory.

Beside a live daemon they only read: the store through a read-only environment of this process, the log up to where it is valid. With a stopped daemon
``check_store(repair=True)`` does what a start would do, and removes what fails its checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvd.commands import Recipe
from kvd.storage import schema
from kvd.storage.beside_daemon import read_steadily
from kvd.storage.codec import Codec
from kvd.storage.encryption import master_key_of, reading_encryption, seeing_codec
from kvd.storage.errors import RecipesUnreadableError, StorageError, StoreBusyError, StoreDamagedError, StoreMovedError, UnknownFormatError
from kvd.storage.generations import CURRENT_NAME, STORE_NAME, Generations, read_current
from kvd.storage.keys import KeyRing
from kvd.storage.keys_file import damaged_keys
from kvd.storage.lock import StateLock, is_locked
from kvd.storage.pin_export import open_current, opened_store
from kvd.storage.recipes import RecipeFileError, list_recipe_files, read_recipe_file, read_recipes, restore_recipes
from kvd.storage.recovery import WAL_NAME
from kvd.storage.schema import BadRowError
from kvd.storage.sealing import BLOCK_OVERHEAD_BYTES, KEY_LOST, SealedCodec
from kvd.storage.start_guard import read_failed_starts
from kvd.storage.store import DATA_NAME, Store
from kvd.storage.two_copies import Found
from kvd.types import unpack_tokens
from kvd.wal.quarantine import QUARANTINE_NAME, discard
from kvd.wal.reader import SegmentEnd, read_segments
from kvd.wal.record import Forget, Insert, PayloadSeal, Pin, Record, WalFormatError
from kvd.wal.repair import repair_log

_QUARANTINE_MAX_BYTES = 1 << 28
_PAGE_HEADER_BYTES = schema.PAGE_HEADER_BYTES
_VALUE_BEGIN_BYTES = 64
"""Enough to tell values apart: a block's hash, or a nonce, is in it."""
_BLIND = "contents not checked: no key file given"


def check_store(state_dir: Path, *, repair: bool = False, key_file: str = "") -> dict[str, Any]:
    """Verify all of a state directory; a report as JSON-like data. ``ok`` is False if anything is damaged or unreadable, ``problems`` says what.

    A torn tail of the log and counted failed starts are not damage. Of an encrypted directory without ``key_file`` the structure is checked and no content.

    Raises:
        StateLockedError: ``repair`` beside a live daemon.
        StoreBusyError: a live daemon changed it faster than it could be read.
        EncryptionKeyError: the key is not the right one, there is nothing that it opens, or it is missing for a repair.
    """
    repaired: list[str] = []
    if repair:
        lock = StateLock(state_dir)
        try:
            repaired = _repair(state_dir, _sealing_codec(state_dir, key_file))
        finally:
            lock.release()
    report, problems = read_steadily(state_dir, lambda: _checked(state_dir, key_file), is_bad=lambda found: bool(found[1]))
    report["problems"] = problems
    if repair:
        report["repaired"] = repaired
    report["ok"] = not problems
    return report


def _checked(state_dir: Path, key_file: str) -> tuple[dict[str, Any], list[str]]:
    """The report without its ``problems``, and these."""
    problems: list[str] = []
    encryption = reading_encryption(state_dir, key_file)
    codec = encryption.codec
    problems += damaged_keys(state_dir) if codec.is_sealed else ()
    report: dict[str, Any] = {
        "ok": True,
        "state_dir": str(state_dir),
        "in_use": is_locked(state_dir),
        "failed_starts": read_failed_starts(state_dir),
        "encryption": _BLIND if encryption.is_blind else "checked with the key" if codec.is_sealed else "none",
        **_check_recipes(state_dir, codec, problems),
        **_check_generation(state_dir, codec, problems, is_blind=encryption.is_blind),
        **_check_log(state_dir, codec, problems),
    }
    return report, problems


def dump_store(state_dir: Path, *, key_file: str = "") -> Iterator[dict[str, Any]]:
    """Everything that is kept, without the bytes of blocks, one JSON-like entry each: ``kind`` says what.

    Raises:
        StoreBusyError: a live daemon changed it faster than it could be read.
        RecipesUnreadableError, StorageError, WalFormatError: a part that can't be read at all.
        EncryptionKeyError: the directory is encrypted and this is not its key.
    """
    codec, found = read_steadily(state_dir, lambda: _codec_and_recipes(state_dir, key_file))
    for recipe in (found.value or {}).values():
        yield {
            "kind": "recipe",
            "name": recipe.name,
            "tokens": len(recipe.token_ids) // 4,
            "priority": recipe.priority,
            "tenant_salt": recipe.tenant_salt.hex(),
            "created_unix_s": recipe.created_unix_s,
            "generation": found.generation,
            **({"expires_unix_s": recipe.expires_unix_s} if recipe.expires_unix_s else {}),
        }
    for segment, fault in read_segments(state_dir / WAL_NAME, None, _wal_seal(state_dir, codec)):
        yield {"kind": "wal_segment", "number": segment.number, "bytes": segment.size_bytes, "end": segment.end.value, "fault": fault}
        if not fault:
            for lsn, record in segment.records:
                yield {"kind": "wal_record", "lsn": lsn, **_describe(record)}
    store = read_steadily(state_dir, lambda: open_current(state_dir, seeing_codec(state_dir, key_file)))
    if store is not None:
        try:
            yield from _dump_rows(store)
        finally:
            store.close()


def _codec_and_recipes(state_dir: Path, key_file: str) -> tuple[Codec, Found[dict[str, Recipe]]]:
    codec = seeing_codec(state_dir, key_file)
    return codec, read_recipes(state_dir, codec)


def block_extents(state_dir: Path, *, key_file: str = "") -> Iterator[tuple[Path, int, int]]:
    """Where the bytes of stored blocks lie in the data file of a stopped store: (file, offset, length) of each value without the zeros behind.

    Found by the beginning of a value at that of a page run; a copy that lies in free pages may be among them, harmlessly.
    """
    codec = seeing_codec(state_dir, key_file)
    current = read_current(state_dir, codec)
    if current is None:
        return
    path = state_dir / STORE_NAME / str(current.generation) / DATA_NAME
    overhead_bytes = BLOCK_OVERHEAD_BYTES if codec.is_sealed else schema.BLOCK_HEADER_BYTES
    lengths: dict[bytes, int] = {}
    with opened_store(state_dir, codec) as store:
        if store is not None:
            with store.reading_blocks() as reader:
                for key, view in reader.items():
                    with suppress(BadRowError):
                        lengths[bytes(view[:_VALUE_BEGIN_BYTES])] = overhead_bytes + codec.verify_block(key, view)[2]
    size = path.stat().st_size
    with path.open("rb") as file:
        for page in range(0, size, schema.PAGE_BYTES):
            file.seek(page + _PAGE_HEADER_BYTES)
            length = lengths.get(file.read(_VALUE_BEGIN_BYTES))
            if length is not None:
                yield path, page + _PAGE_HEADER_BYTES, length


# -------------------------------------------------------------------------------------------------- recipes


def _check_recipes(state_dir: Path, codec: Codec, problems: list[str]) -> dict[str, Any]:
    try:
        found = read_recipes(state_dir, codec)
    except (RecipesUnreadableError, UnknownFormatError) as error:
        problems.append(str(error))
        return {"recipes": 0, "recipe_copies": 0, "recipe_generations": []}
    problems += [f"{damaged.path.name}: {damaged.reason}" for damaged in found.damaged]
    generations = []
    for generation, path in list_recipe_files(state_dir):
        entry: dict[str, Any] = {"generation": generation}
        try:
            entry["bytes"] = path.lstat().st_size
            entry["recipes"] = len(read_recipe_file(generation, path, codec))
        except (RecipeFileError, UnknownFormatError, OSError) as error:
            entry["error"] = str(error)
        generations.append(entry)
    return {"recipes": len(found.value or {}), "recipe_copies": found.num_copies, "recipe_generations": generations}


# -------------------------------------------------------------------------------------------------- store


def _check_generation(state_dir: Path, codec: Codec, problems: list[str], *, is_blind: bool) -> dict[str, Any]:
    report: dict[str, Any] = {
        "generation": None,
        "namespaces": 0,
        "nodes": 0,
        "blocks": 0,
        "block_bytes": 0,
        "orphan_nodes": 0,
        "orphan_blocks": 0,
        "bad_rows": 0,
        "forgotten_rows": 0,
        "bad_blocks": {},
    }
    try:
        with opened_store(state_dir, codec) as store:
            if store is not None and is_blind:
                _count_rows(store, report)
            elif store is not None:
                _check_rows(store, report, problems)
    except (StoreBusyError, StoreMovedError):
        raise
    except StorageError as error:
        problems.append(str(error))
    return report


def _count_rows(store: Store, report: dict[str, Any]) -> None:
    """What can be said without the key."""
    report |= _meta_facts(store)
    for name, database in (("namespaces", schema.DB_NAMESPACES), ("nodes", schema.DB_NODES), ("blocks", schema.DB_BLOCKS)):
        report[name] = store.num_rows(database)


def _meta_facts(store: Store) -> dict[str, Any]:
    meta = store.meta
    return {"generation": meta.generation, "applied_lsn": meta.applied_lsn, "clean": meta.clean, "file_bytes": store.file_bytes}


def _count_bad(report: dict[str, Any], error: BadRowError) -> None:
    """What a destroyed key had sealed is no damage."""
    report["forgotten_rows" if error.reason == KEY_LOST else "bad_rows"] += 1


def _check_rows(store: Store, report: dict[str, Any], problems: list[str]) -> None:
    report |= _meta_facts(store)
    roots = set()
    for key, value in store.rows(schema.DB_NAMESPACES):
        try:
            roots.add(store.codec.unpack_namespace(key, value).root)
        except BadRowError as error:
            _count_bad(report, error)
    parents: dict[bytes, tuple[bytes, bytes]] = {}
    for key, value in store.rows(schema.DB_NODES):
        try:
            row = store.codec.unpack_node(key, value)
            parents[row.block_hash] = (row.root, row.parent)
        except BadRowError as error:
            _count_bad(report, error)
    orphans = [key for key, (root, parent) in parents.items() if root not in roots or (parent != root and parent not in parents)]
    with store.reading_blocks() as reader:
        for key, view in reader.items():
            try:
                _, block_hash, row_bytes = store.codec.verify_block(key, view)
                report["block_bytes"] += row_bytes
            except BadRowError as error:
                if error.reason == KEY_LOST:
                    report["forgotten_rows"] += 1
                    continue
                report["bad_blocks"][error.reason] = report["bad_blocks"].get(error.reason, 0) + 1
                continue
            report["blocks"] += 1
            if block_hash not in parents:
                report["orphan_blocks"] += 1
    report |= {"namespaces": len(roots), "nodes": len(parents), "orphan_nodes": len(orphans)}
    if report["bad_rows"]:
        problems.append(f"{report['bad_rows']} rows of the store fail their checks")
    for reason, count in report["bad_blocks"].items():
        problems.append(f"{count} blocks fail their checks: {reason}")


def _dump_rows(store: Store) -> Iterator[dict[str, Any]]:
    meta = store.meta
    yield {
        "kind": "store",
        "generation": meta.generation,
        "store_uuid": meta.store_uuid.hex(),
        "applied_lsn": meta.applied_lsn,
        "clean": meta.clean,
    }
    for root, value in store.rows(schema.DB_NAMESPACES):
        try:
            namespace = store.codec.unpack_namespace(root, value)
        except BadRowError as error:
            yield {"kind": "namespace", "root": root.hex(), "error": error.reason}
            continue
        yield {
            "kind": "namespace",
            "root": namespace.root.hex(),
            "fingerprint": namespace.fingerprint.hex(),
            "tenant_salt": namespace.tenant_salt.hex(),
            "adapter_digest": namespace.adapter_digest.hex(),
        }
    for key, value in store.rows(schema.DB_NODES):
        try:
            row = store.codec.unpack_node(key, value)
        except BadRowError as error:
            yield {"kind": "node", "hash": key.hex(), "error": error.reason}
            continue
        yield {
            "kind": "node",
            "hash": row.block_hash.hex(),
            "root": row.root.hex(),
            "parent": row.parent.hex(),
            "depth": row.depth,
            "uses": row.uses,
            "last_use_unix_s": row.last_use_unix_s,
            "origin": row.origin,
            "token_ids": list(unpack_tokens(row.token_ids)),
        }
    for key, value in store.rows(schema.DB_PINS):
        try:
            name, leaf = store.codec.unpack_pin(key, value)
        except BadRowError as error:
            yield {"kind": "pin", "key": key.hex(), "error": error.reason}
            continue
        yield {"kind": "pin", "name": name, "leaf": leaf.hex()}
    with store.reading_blocks() as reader:
        for key, view in reader.items():
            entry: dict[str, Any] = {"kind": "block", "bytes": len(view)}
            try:
                group, block_hash, row_bytes = store.codec.verify_block(key, view)
                entry |= {"group": group, "hash": block_hash.hex(), "row_bytes": row_bytes}
            except BadRowError as error:
                entry["error"] = error.reason
            yield entry


# -------------------------------------------------------------------------------------------------- log


def _check_log(state_dir: Path, codec: Codec, problems: list[str]) -> dict[str, Any]:
    num_segments = num_records = num_bytes = torn_bytes = last_lsn = 0
    try:
        store_uuid = _store_uuid(state_dir, codec)
        for segment, fault in read_segments(state_dir / WAL_NAME, store_uuid, _wal_seal(state_dir, codec)):
            num_segments += 1
            num_bytes += segment.size_bytes
            if fault:
                problems.append(f"{segment.path.name}: {fault}")
                continue
            num_records += segment.num_records
            last_lsn = max(last_lsn, segment.last_lsn)
            if segment.end is SegmentEnd.DAMAGED:
                problems.append(f"{segment.path.name}: damaged at byte {segment.valid_bytes}")
            elif segment.end is SegmentEnd.TORN:
                torn_bytes += segment.size_bytes - segment.valid_bytes
    except (WalFormatError, OSError) as error:
        problems.append(f"write-ahead log: {error}")
    quarantine = state_dir / QUARANTINE_NAME
    return {
        "wal_segments": num_segments,
        "wal_records": num_records,
        "wal_bytes": num_bytes,
        "wal_torn_bytes": torn_bytes,
        "wal_last_lsn": last_lsn,
        "quarantined_files": len(list(quarantine.iterdir())) if quarantine.is_dir() else 0,
    }


def _store_uuid(state_dir: Path, codec: Codec) -> bytes | None:
    try:
        current = read_current(state_dir, codec)
    except StorageError:
        return None
    return current.store_uuid if current is not None else None


def _wal_seal(state_dir: Path, codec: Codec) -> PayloadSeal | None:
    return codec.wal_seal(_store_uuid(state_dir, codec) or bytes(16))


def _describe(record: Record) -> dict[str, Any]:
    if isinstance(record, Insert):
        return {
            "type": "insert",
            "root": record.root.hex(),
            "parent": record.parent.hex(),
            "token_ids": list(unpack_tokens(record.token_ids)),
        }
    if isinstance(record, Pin):
        return {"type": "pin", "name": record.name, "leaf": record.leaf.hex()}
    if isinstance(record, Forget):
        return {"type": "forget", "hashes": [each.hex() for each in record.block_hashes]}
    return {"type": "unpin", "name": record.name}


# -------------------------------------------------------------------------------------------------- repair


def _repair(state_dir: Path, codec: Codec) -> list[str]:
    """What a start would set aside, and the removal of rows and blocks that fail their checks; what was done, as sentences."""
    done = _repair_recipes(state_dir, codec)
    done += _repair_current(state_dir, codec)
    log = repair_log(
        state_dir / WAL_NAME,
        _store_uuid(state_dir, codec),
        lambda _lsn, _record: None,
        quarantine=state_dir / QUARANTINE_NAME,
        quarantine_max_bytes=_QUARANTINE_MAX_BYTES,
        seal=_wal_seal(state_dir, codec),
    )
    return done + log.damage


def _repair_recipes(state_dir: Path, codec: Codec) -> list[str]:
    try:
        found = read_recipes(state_dir, codec)
    except RecipesUnreadableError:
        return []  # the report names it: people decide
    try:
        restore_recipes(state_dir, found, codec)
    except OSError as error:
        return [f"the recipes (pins) can't be written: {error}"]
    return [f"{damaged}; set aside, the pins of generation {found.generation} stand in two files" for damaged in found.damaged]


def _repair_current(state_dir: Path, codec: Codec) -> list[str]:
    if not (state_dir / STORE_NAME).is_dir():
        return []
    try:
        current = read_current(state_dir, codec)
    except StoreDamagedError as error:
        failure = discard(state_dir / STORE_NAME / CURRENT_NAME, state_dir / QUARANTINE_NAME, _QUARANTINE_MAX_BYTES)
        return [failure or f"{error}; set aside, the next start begins an empty store"]
    if current is None:
        return []
    directory = state_dir / STORE_NAME / str(current.generation)
    try:
        store = Store(directory, 0, codec=codec)
    except StoreDamagedError as error:
        Generations(state_dir, map_bytes=1 << 20, max_aside_bytes=1 << 62, codec=codec).set_aside()
        return [f"{error}; set aside"]
    try:
        return _remove_bad(store)
    finally:
        store.close()


def _remove_bad(store: Store) -> list[str]:
    bad_blocks: list[bytes] = []
    with store.reading_blocks() as reader:
        for key, view in reader.items():
            try:
                store.codec.verify_block(key, view)
            except BadRowError:
                bad_blocks.append(key)
    bad_nodes = [key for key, value in store.rows(schema.DB_NODES) if _is_bad(store.codec, key, value)]
    if not (bad_blocks or bad_nodes):
        return []
    txn = store.begin()
    for key in bad_blocks:
        txn.delete_key(schema.DB_BLOCKS, key)
    for key in bad_nodes:
        txn.delete_key(schema.DB_NODES, key)
    txn.commit()
    return [f"removed {len(bad_blocks)} blocks and {len(bad_nodes)} nodes that fail their checks"]


def _is_bad(codec: Codec, key: bytes, value: bytes) -> bool:
    try:
        codec.unpack_node(key, value)
    except BadRowError:
        return True
    return False


# -------------------------------------------------------------------------------------------------- encryption


def _sealing_codec(state_dir: Path, key_file: str) -> Codec:
    """As ``seeing_codec``, for a repair, which may have to seal."""
    codec = seeing_codec(state_dir, key_file)
    master_key = master_key_of(key_file)
    return SealedCodec(KeyRing(state_dir, master_key)) if master_key is not None else codec
