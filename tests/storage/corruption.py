"""A small state directory, everything that may befall its files, and what a start makes of each.

As a script, ``corruption.py BASE FIRST STEP`` does every STEP-th damage from FIRST on to copies of BASE and prints a line of JSON for each: a process of its own,
for a damaged map may kill its reader.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c
from storage_harness import World, crash, prompt

from kvd.observe import failpoints
from kvd.storage.errors import StorageError
from kvd.storage.generations import encode_current
from kvd.storage.lock import is_locked
from kvd.storage.store import Store
from kvd.storage.tools import check_store
from kvd.wal.record import SEGMENT_HEADER_BYTES

DOCUMENT = Path(__file__).parents[2] / "docs" / "storage-format.md"
PAGE = 4096
SEGMENT_BYTES = 640
SETTINGS = {"row_bytes": 200, "wal_segment_bytes": SEGMENT_BYTES, "checkpoint_interval_s": 1000.0}
PINNED = prompt(9, 64)
HOT = tuple(prompt(number, 16 * 14 + 1) for number in (0, 1, 2))
LOGGED = prompt(5, 16 * 7 + 1)
NUM_SAMPLED = 120

Apply = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Damage:
    """``row`` is the id of the row of the document's table that says what must come of it."""

    row: str
    name: str
    apply: Apply
    raises: str = ""
    """A failpoint that is an I/O error during the start."""


# -------------------------------------------------------------------------------------------------- the document


def documented_rows() -> dict[str, tuple[str, ...]]:
    """For each row of the table "Damage" its outcomes: the words in bold."""
    table = DOCUMENT.read_text(encoding="utf-8").split("\n## Damage\n")[1].split("\n## ")[0]
    rows: dict[str, tuple[str, ...]] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] == "row" or set(line) <= set("|-"):
            continue
        row, outcomes = cells[0].strip("`"), tuple(re.findall(r"\*\*([a-z ]+)\*\*", cells[-1]))
        assert len(cells) == 4, f"a row has an id, a file, a damage and an outcome: {line}"
        assert row not in rows, f"two rows are called {row}"
        assert outcomes, f"row {row} names no outcome in bold"
        rows[row] = outcomes
    return rows


# -------------------------------------------------------------------------------------------------- the base


def build(state_dir: Path) -> None:
    """A pin, three hot prompts, and one that the log alone knows; a tree of several levels, freed pages, a log of several segments."""
    world = World(state_dir, **SETTINGS)
    assert world.pin("system", PINNED) == "recipe+bytes"
    for token_ids in HOT:
        for _ in range(2):
            world.ask(token_ids)
        assert not world.checkpoint().error
    world.ask(LOGGED)
    world.until_logged()
    crash(world)
    (state_dir / "starting").unlink()
    copy = state_dir.with_name("copy")
    shutil.copytree(state_dir, copy)
    world = World(copy, **SETTINGS)
    (state_dir / "whole").write_text(json.dumps([len(world.storage._running.recovered.index.nodes), world.report.num_blocks]))
    crash(world)
    shutil.rmtree(copy)


def segments(state_dir: Path) -> list[Path]:
    return sorted((state_dir / "wal").glob("*.wal"))


def recipes(state_dir: Path) -> list[Path]:
    """The newest first."""
    return sorted((state_dir / "recipes").iterdir(), key=lambda path: -int(path.suffix[1:]))


def data(state_dir: Path) -> Path:
    (path,) = (state_dir / "kv").glob("[0-9]*/data.mdb")
    return path


def current(state_dir: Path) -> Path:
    return state_dir / "kv" / "CURRENT"


# -------------------------------------------------------------------------------------------------- ways to damage


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path, length: int) -> None:
    os.truncate(path, length)


def put(path: Path, kind: str) -> None:
    """Something that is no file, in a file's or folder's place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        (path / "something").write_bytes(b"x")
    elif kind == "dangling":
        path.symlink_to("no-such-folder/file")
    else:
        path.write_bytes(b"")


def _format_recipes(path: Path) -> None:
    body = path.read_bytes()[:-4]
    body = body[:8] + struct.pack("<I", 9) + body[12:]
    path.write_bytes(body + struct.pack("<I", crc32c(body)))


def _format_segment(path: Path) -> None:
    content = path.read_bytes()
    header = content[:8] + struct.pack("<H", 9) + content[10 : SEGMENT_HEADER_BYTES - 4]
    path.write_bytes(header + struct.pack("<I", crc32c(header)) + content[SEGMENT_HEADER_BYTES:])


def _format_current(path: Path) -> None:
    body = "kvd-store 9 " + path.read_text().split(" ", 2)[2].rsplit(" ", 1)[0]
    path.write_text(f"{body} {crc32c(body.encode()):08x}\n")


def _rewrite(state_dir: Path, database: bytes, change: Callable[[bytes], bytes]) -> None:
    """Change the first value of a database by lmdb's own means: its pages stay whole."""
    store = Store(data(state_dir).parent, 64 << 20)
    with store._env.begin(write=True, db=store._dbs[database]) as txn:
        key, value = next(iter(txn.cursor()))
        txn.put(key, change(bytes(value)))
    store.close()


def _bit(value: bytes, offset: int) -> bytes:
    return value[:offset] + bytes([value[offset] ^ 1]) + value[offset + 1 :]


def _other_format(value: bytes) -> bytes:
    body = struct.pack("<I", 9) + value[4:-4]
    return body + struct.pack("<I", crc32c(body))


def _other_store(state_dir: Path) -> None:
    from kvd.storage.generations import read_current

    found = read_current(state_dir)
    assert found is not None
    current(state_dir).write_bytes(encode_current(type(found)(found.generation, bytes(16))))


# -------------------------------------------------------------------------------------------------- the pages of LMDB 0.9


@dataclass(frozen=True, slots=True)
class Page:
    number: int
    kind: str
    database: str


_KINDS = {1: "branch", 2: "leaf", 4: "overflow"}
_NO_PAGE = (1 << 64) - 1


def pages(content: bytes) -> dict[str, list[Page]]:
    """The pages of the newest tree, found from its meta page, by database; ``free`` is the list of free pages."""
    meta = max((0, PAGE), key=lambda at: int.from_bytes(content[at + 16 + 128 : at + 16 + 136], "little"))
    found: dict[str, list[Page]] = {}

    def root_of(record: int) -> int:
        return int.from_bytes(content[record + 40 : record + 48], "little")

    def walk(number: int, database: str) -> None:
        if number == _NO_PAGE:
            return
        start = number * PAGE
        flags, lower = struct.unpack_from("<HH", content, start + 10)
        found.setdefault(database, []).append(Page(number, _KINDS[flags & 7], database))
        for index in range((lower - 16) // 2):
            node = start + struct.unpack_from("<H", content, start + 16 + 2 * index)[0]
            low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", content, node)
            if flags & 1:
                walk(low | high << 16 | node_flags << 32, database)
                continue
            value = node + 8 + key_bytes
            if node_flags & 2:
                name = content[node + 8 : value].decode()
                walk(root_of(value), name)
            elif node_flags & 1:
                found[database].append(Page(int.from_bytes(content[value : value + 8], "little"), "overflow", database))

    walk(root_of(meta + 16 + 24), "free")
    walk(root_of(meta + 16 + 24 + 48), "main")
    return found


_PAGE_FIELDS = {"number": 0, "flags": 10, "lower": 12, "upper": 14}
_QUIET_PAGE_FIELDS = {"upper"}
_META_FIELDS = {
    "page number": 0,
    "page flags": 10,
    "magic": 16,
    "version": 20,
    "page size": 40,
    "free list's depth": 46,
    "free list's root": 80,
    "main's depth": 94,
    "main's entries": 120,
    "main's root": 128,
    "last page": 136,
    "transaction": 144,
}
"""Offsets in a meta page: the page's header, then MDB_meta with its two MDB_db records."""
_LOUD_META_FIELDS = {"magic", "version", "page size"}


def _page_damages(base: Path) -> Iterator[Damage]:
    content = data(base).read_bytes()
    for number in (0, 1):
        for field, offset in _META_FIELDS.items():
            row = "data-bad" if field in _LOUD_META_FIELDS else "data-silent"
            yield Damage(row, f"meta page {number}, {field}", lambda root, at=number * PAGE + offset: flip(data(root), at, 1))
    tree = pages(content)
    for database, found in sorted(tree.items()):
        for kind in ("branch", "leaf"):
            page = next((each for each in found if each.kind == kind), None)
            if page is None:
                continue
            for field, offset in _PAGE_FIELDS.items():
                yield Damage(
                    "data-silent" if database == "free" or field in _QUIET_PAGE_FIELDS else "data-bad",
                    f"{kind} page of {database}, {field}",
                    lambda root, at=page.number * PAGE + offset: flip(data(root), at, 1),
                )
    overflow = [each for each in tree["blocks"] if each.kind == "overflow"]
    for field, offset in {"number": 0, "flags": 10, "pages": 12}.items():
        yield Damage("data-bad", f"overflow page, {field}", lambda root, at=overflow[0].number * PAGE + offset: flip(data(root), at, 1))
    for field, offset in {
        "magic": 16,
        "version": 20,
        "length": 24,
        "hash": 32,
        "fingerprint": 64,
        "row's checksum": 96,
        "row": 16 + 96 + 7,
    }.items():
        yield Damage("data-block", f"block, {field}", lambda root, at=overflow[1].number * PAGE + offset: flip(data(root), at, 1))
    used = sorted(each.number for found in tree.values() for each in found)
    rng = random.Random(2026)
    for _ in range(NUM_SAMPLED):
        offset, bit = rng.choice(used) * PAGE + rng.randrange(PAGE), rng.randrange(8)
        yield Damage("data-silent", f"bit {bit} of byte {offset}", lambda root, at=offset, bit=bit: flip(data(root), at, bit))
    # Behind the last page that is in use a cut may take nothing away.
    for number in range(max(used)):
        yield Damage("data-bad", f"cut to {number} pages", lambda root, length=number * PAGE: cut(data(root), length))
    yield Damage("data-bad", "cut within a page", lambda root: cut(data(root), len(content) - 1))


# -------------------------------------------------------------------------------------------------- all of it


def damages(base: Path) -> list[Damage]:
    """Everything that is done to whole state directories, in a fixed order. (What is exhaustive is done to the files' readers, in the test.)"""
    return [*_file_damages(base), *_page_damages(base)]


def _file_damages(base: Path) -> Iterator[Damage]:
    yield Damage("none", "nothing", lambda _: None)
    for name, content in {"missing": None, "empty": b"", "text": b"what is this", "zeros": bytes(5000)}.items():
        for path in ("lock", "kv/1/lock.mdb"):
            yield Damage(
                "lock-any" if path == "lock" else "lmdb-lock",
                f"{path} {name}",
                lambda root, path=path, content=content: (
                    (root / path).unlink(missing_ok=True) if content is None else (root / path).write_bytes(content)
                ),
            )
    for offset in range(0, 64, 3):
        yield Damage("lmdb-lock", f"lock.mdb, byte {offset}", lambda root, at=offset: flip(root / "kv" / "1" / "lock.mdb", at, 1))
    for content in (b"", b"what is this", b"\xff" * 100):
        yield Damage("marker-unreadable", f"starting: {content!r}", lambda root, content=content: (root / "starting").write_bytes(content))
    for kind in ("fifo", "folder", "dangling"):
        yield Damage("marker-unreadable", f"starting is a {kind}", lambda root, kind=kind: put(root / "starting", kind))
        for index in (0, 1):
            yield Damage(
                "recipes-one-bad", f"recipes {index} is a {kind}", lambda root, index=index, kind=kind: put(recipes(root)[index], kind)
            )
        yield Damage("wal-unreadable", f"first segment is a {kind}", lambda root, kind=kind: put(segments(root)[0], kind))
        yield Damage("current-bad", f"CURRENT is a {kind}", lambda root, kind=kind: put(current(root), kind))
        yield Damage("data-bad", f"data.mdb is a {kind}", lambda root, kind=kind: put(data(root), kind))
        yield Damage("data-bad", f"the generation is a {kind}", lambda root, kind=kind: put(data(root).parent, kind))
        if kind != "folder":
            for name in ("wal", "kv"):
                yield Damage("no-folder", f"{name} is a {kind}", lambda root, name=name, kind=kind: put(root / name, kind))
            yield Damage("recipes-unlistable", f"recipes is a {kind}", lambda root, kind=kind: put(root / "recipes", kind))
    for index in (0, 1):
        size = recipes(base)[index].stat().st_size
        for length in (0, 1, 27, 28, 29, size // 2, size - 1):
            yield Damage(
                "recipes-one-bad",
                f"recipes {index} cut to {length}",
                lambda root, index=index, length=length: cut(recipes(root)[index], length),
            )
        for offset in (0, 8, 12, 20, 28, 60, size - 1):
            yield Damage(
                "recipes-one-bad", f"recipes {index}, byte {offset}", lambda root, index=index, at=offset: flip(recipes(root)[index], at)
            )
        yield Damage(
            "recipes-one-bad",
            f"recipes {index} renamed",
            lambda root, index=index: recipes(root)[index].rename(root / "recipes" / "recipes.90"),
        )
        yield Damage("recipes-one-missing", f"recipes {index} missing", lambda root, index=index: recipes(root)[index].unlink())
    yield Damage("recipes-all-bad", "both recipes cut", lambda root: [cut(path, 20) for path in recipes(root)])
    yield Damage("recipes-format", "both recipes of a later format", lambda root: [_format_recipes(path) for path in recipes(root)])
    yield Damage("recipes-none", "no recipes", lambda root: shutil.rmtree(root / "recipes"))
    yield Damage("recipes-none", "recipes empty", lambda root: [path.unlink() for path in recipes(root)])
    yield Damage("wal-torn", "garbage behind the last record", lambda root: _append(segments(root)[-1], b"\1\2\3\4\5"))
    yield Damage("wal-damaged", "first record of the first segment", lambda root: flip(segments(root)[0], SEGMENT_HEADER_BYTES + 30))
    for offset in range(0, SEGMENT_HEADER_BYTES, 5):
        yield Damage("wal-header", f"header of the first segment, byte {offset}", lambda root, at=offset: flip(segments(root)[0], at))
    yield Damage("wal-header", "a segment missing in the middle", lambda root: segments(root)[1].unlink())
    yield Damage("wal-header", "a segment of another store", _foreign_segment)
    yield Damage("wal-format", "a segment of a later format", lambda root: _format_segment(segments(root)[-1]))
    yield Damage("wal-missing", "no log", lambda root: shutil.rmtree(root / "wal"))
    yield Damage(
        "wal-uncuttable", "a torn tail that can't be cut", lambda root: _append(segments(root)[-1], b"\1\2\3"), "wal.repair.before_cut"
    )
    size = current(base).stat().st_size
    for length in range(size):
        yield Damage("current-bad", f"CURRENT cut to {length}", lambda root, length=length: cut(current(root), length))
    yield Damage("current-bad", "CURRENT missing", lambda root: current(root).unlink())
    yield Damage("current-format", "CURRENT of a later format", lambda root: _format_current(current(root)))
    yield Damage("data-bad", "data.mdb missing", lambda root: data(root).unlink())
    yield Damage("data-bad", "data.mdb is text", lambda root: data(root).write_bytes(b"what is this" * 2000))
    for offset in (0, 4, 20, 30, 44, 50):
        yield Damage(
            "data-meta", f"meta row, byte {offset}", lambda root, at=offset: _rewrite(root, b"meta", lambda value: _bit(value, at))
        )
    yield Damage("data-meta", "another store's", _other_store)
    yield Damage("data-format", "a store of a later format", lambda root: _rewrite(root, b"meta", _other_format))
    for offset in (0, 33, 64, 70, 88, 100, -1):
        yield Damage(
            "data-row",
            f"node row, byte {offset}",
            lambda root, at=offset: _rewrite(root, b"nodes", lambda value: _bit(value, at % len(value))),
        )
    for offset in (2, -1):
        yield Damage(
            "data-row",
            f"namespace, byte {offset}",
            lambda root, at=offset: _rewrite(root, b"namespaces", lambda value: _bit(value, at % len(value))),
        )
    yield Damage("data-pin", "pin row", lambda root: _rewrite(root, b"pins", lambda value: _bit(value, 3)))
    yield Damage("deleted", "no store, no log", lambda root: [shutil.rmtree(root / name) for name in ("kv", "wal")])
    yield Damage("store-deleted", "no store", lambda root: shutil.rmtree(root / "kv"))
    yield Damage("lock-impossible", "lock is a dangling link", lambda root: put(root / "lock", "dangling"))
    yield Damage("marker-unwritable", "the marker can't be written", lambda _: None, "store.marker.before_sync")


def _append(path: Path, piece: bytes) -> None:
    """Behind the last record, at a record's place."""
    used = path.read_bytes().rstrip(b"\0")
    path.write_bytes(used + bytes(-len(used) % 8) + piece)


def _foreign_segment(state_dir: Path) -> None:
    path = segments(state_dir)[-1]
    content = path.read_bytes()
    header = content[:16] + bytes(16) + content[32 : SEGMENT_HEADER_BYTES - 4]
    path.write_bytes(header + struct.pack("<I", crc32c(header)) + content[SEGMENT_HEADER_BYTES:])


# -------------------------------------------------------------------------------------------------- what comes of it


def observe(state_dir: Path, raises: str = "") -> tuple[str, str]:
    """Start over ``state_dir``, hold the start to the promises, and (its outcome in one or two words, why)."""
    failpoints._armed.clear()
    failpoints._armed.update(failpoints._parse(f"{raises}=raise" if raises else ""))
    try:
        world = World(state_dir, **SETTINGS)
    except (StorageError, OSError) as error:
        assert not is_locked(state_dir) if (state_dir / "lock").exists() else True
        return "refused", f"{type(error).__name__}: {error}"
    outcome = _outcome(world, state_dir)
    pins = set(world.storage.recipe_book.recipes())
    assert pins == ({"system"} if (state_dir / "had_pins").exists() else set()), f"pins {pins}"
    for token_ids in (PINNED, *HOT, LOGGED):
        world.ask(token_ids)  # every block that is hit holds the right bytes
        assert world.ask(token_ids) >= len(token_ids) // 4 - 16
    assert world.pin("more", prompt(20, 48)) == "recipe+bytes"
    world.storage.mark_served()
    world.until(lambda: not world.storage.status()["degraded"])
    assert world.stop()
    report = check_store(state_dir)
    assert report["ok"], report["problems"]
    return outcome


def _outcome(world: World, state_dir: Path) -> tuple[str, str]:
    damage = world.storage.status()["damage"]
    quarantine = state_dir / "quarantine"
    has_pieces = quarantine.is_dir() and any(quarantine.iterdir())
    if any(path.name.endswith(".aside") for path in (state_dir / "kv").iterdir()):
        assert damage, "what is set aside is reported"
        return "set aside", damage[0]
    if damage and has_pieces and "can't be cut" not in str(damage):
        return "quarantined", damage[0]
    if damage:
        return "reported", damage[0]
    if has_pieces:
        return "cut", ""
    if world.storage.status()["degraded"]:
        return "degraded", world.storage.status()["reason"]
    if world.report.dropped:
        return "miss", str(world.report.dropped)
    if world.storage._running.recovered.num_bad_rows:
        return "forgotten", str(world.storage._running.recovered.num_bad_rows)
    if world.report.failed_starts:
        return "counted", str(world.report.failed_starts)
    nodes, blocks = len(world.storage._running.recovered.index.nodes), world.report.num_blocks
    whole = json.loads((state_dir / "whole").read_text()) if (state_dir / "whole").exists() else [nodes, blocks]
    return ("taken" if [nodes, blocks] == whole else "cold"), f"{nodes} nodes, {blocks} blocks"


def run(base: Path, first: int, step: int) -> None:
    every = damages(base)
    work = base.with_name(f"{base.name}.work{first % step}")
    for index in range(first, len(every), step):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        every[index].apply(work)
        if every[index].row != "recipes-none":
            (work / "had_pins").touch()
        print(json.dumps([index, "begun", ""]), flush=True)
        try:
            outcome = observe(work, every[index].raises)
        except AssertionError as error:
            outcome = ("a broken promise", str(error))
        print(json.dumps([index, *outcome]), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
