"""``kvd store stat``: how big each part of a state directory is and what it counts, without reading what is stored. Also beside a live daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvd.storage import schema
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.errors import RecipesUnreadableError, StorageError, StoreBusyError, StoreMovedError, UnknownFormatError
from kvd.storage.generations import read_current
from kvd.storage.lock import is_locked
from kvd.storage.pin_export import opened_store
from kvd.storage.recipes import read_recipes
from kvd.storage.start_guard import read_failed_starts
from kvd.wal.disk_faults import disk_bytes


def stat_store(state_dir: Path, codec: Codec = PLAIN) -> dict[str, Any]:
    """Sizes as ``du`` sees them, in bytes, and counts; what can't be read is said under ``problems``."""
    problems: list[str] = []
    report: dict[str, Any] = {
        "state_dir": str(state_dir),
        "in_use": is_locked(state_dir),
        "failed_starts": read_failed_starts(state_dir),
        "disk_bytes": disk_bytes(state_dir),
        "disk_bytes_of": {path.name: disk_bytes(path) for path in sorted(state_dir.iterdir())},
        "pins": 0,
        "generation": None,
    }
    try:
        report["pins"] = len(read_recipes(state_dir, codec).value or {})
    except (RecipesUnreadableError, UnknownFormatError) as error:
        problems.append(str(error))
    try:
        current = read_current(state_dir, codec)
        report["generation"] = current.generation if current is not None else None
        with opened_store(state_dir, codec) as store:
            if store is not None:
                report |= {
                    "applied_lsn": store.meta.applied_lsn,
                    "clean": store.meta.clean,
                    "file_bytes": store.file_bytes,
                    "used_bytes": store.used_bytes,
                    "namespaces": store.num_rows(schema.DB_NAMESPACES),
                    "nodes": store.num_rows(schema.DB_NODES),
                    "blocks": store.num_rows(schema.DB_BLOCKS),
                }
    except (StoreBusyError, StoreMovedError):
        raise
    except StorageError as error:
        problems.append(str(error))
    return report | {"problems": problems}
