"""Every directory that a power cut may leave behind: a model of a file system, fed with what ``record_io.c`` recorded. Pure Python.

What a cut keeps and what it may lose (stricter than a journaling file system, which keeps changes of names in their order):

* What was synced is there. ``fsync`` and ``fdatasync`` of a file make all its earlier writes and sizes durable; a write through an ``O_DSYNC`` or ``O_SYNC``
  descriptor is durable when it returns, with what lay under it. Neither makes the file's *name* durable.
* ``fsync`` of a directory makes the creations, renames and removals in it durable. A rename within a directory is one change: old or new, never both, never
  neither. One between two directories is durable when either of them is synced, and brings the earlier changes of both with it.
* Everything else may be there or not, each change for itself: a later write without an earlier one, a removal without the rename before it, a name without its
  file's content, a size without its data (then zeros). A write may be torn at the disk's sectors of 512 bytes, any of them there or not. A sector is never mixed, and
  is written as it was in memory at some moment: if a write's part of it is there, so are the parts of the writes before.
* What a sync made durable stays as it is; a directory whose own name is lost is lost with all it holds.

A *sync interval* lies between two syncs. Right before the second, everything since is pending, so the subsets of that are all that a cut within the interval can leave.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

SECTOR_BYTES = 512
_MAX_CUTS = 8
_MAGIC = 0x504D4B52
_RECORD = struct.Struct("<IBBHHHQQQ")
_DURABLE = 1


class Op(IntEnum):
    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7
    LINK = 8
    MARK = 9
    UNKNOWN = 10


@dataclass(frozen=True, slots=True)
class Record:
    op: Op
    is_durable: bool
    path: str
    path2: str
    inode: int
    offset: int
    data: bytes


def mark(log: Path, **what: object) -> None:
    """Note in the log that this has happened: what was recorded before, was done before."""
    data = json.dumps(what).encode()
    with log.open("ab", buffering=0) as file:
        file.write(_RECORD.pack(_MAGIC, Op.MARK, 0, 0, 0, 0, 0, 0, len(data)) + data)


def read_log(log: Path) -> Iterator[Record]:
    """What was recorded, in order. A record that is still being written ends it."""
    data = log.read_bytes()
    offset = 0
    while offset + _RECORD.size <= len(data):
        magic, op, flags, path_bytes, path2_bytes, _, inode, position, length = _RECORD.unpack_from(data, offset)
        assert magic == _MAGIC, f"no record at byte {offset} of {log}"
        offset += _RECORD.size
        ends = list(itertools.accumulate((path_bytes, path2_bytes, length if op in {Op.WRITE, Op.MARK} else 0), initial=offset))
        path, path2, payload = (data[start:end] for start, end in itertools.pairwise(ends))
        offset = ends[-1]
        if offset > len(data):
            return
        yield Record(Op(op), bool(flags & _DURABLE), path.decode(), path2.decode(), inode, position, payload)


@dataclass(eq=False, slots=True)
class File:
    durable: bytearray = field(default_factory=bytearray)


@dataclass(eq=False, slots=True)
class Folder:
    durable: dict[str, Node] = field(default_factory=dict)
    now: dict[str, Node] = field(default_factory=dict)


Node = File | Folder


@dataclass(eq=False, slots=True)
class Write:
    """Bytes of a file that are not synced."""

    file: File
    offset: int
    data: bytes

    @property
    def sectors(self) -> range:
        """Of the file, that it touches."""
        return range(self.offset // SECTOR_BYTES, (self.offset + len(self.data) - 1) // SECTOR_BYTES + 1)

    def put(self, content: bytearray, present: Collection[int]) -> None:
        """Write what falls into the sectors ``present``; the size is there in any case."""
        end = self.offset + len(self.data)
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        if len(present) == len(self.sectors):
            content[self.offset : end] = self.data
            return
        for sector in present:
            start, stop = max(sector * SECTOR_BYTES, self.offset), min((sector + 1) * SECTOR_BYTES, end)
            content[start:stop] = self.data[start - self.offset : stop - self.offset]


@dataclass(eq=False, slots=True)
class Resize:
    """A file's new size, not synced."""

    file: File
    size: int

    def put(self, content: bytearray) -> None:
        if len(content) > self.size:
            del content[self.size :]
        else:
            content.extend(bytes(self.size - len(content)))


@dataclass(eq=False, slots=True)
class Naming:
    """Names that change together; None removes."""

    edits: tuple[tuple[Folder, str, Node | None], ...]


Change = Write | Resize | Naming
Choice = bool | tuple[int, ...]
"""Of a pending change: there, not there, or the sectors of a write that are there (none: its size alone)."""
Choices = tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A moment before a sync. Valid until the next one is asked for."""

    number: int
    disk: Disk
    pending: tuple[Change, ...]
    marks: tuple[dict, ...]
    """All so far."""

    def tree(self, choices: Choices) -> dict[str, bytes | None]:
        """Path (relative) → content, None for a directory, if ``choices`` of what was pending reached the disk."""
        return self.disk.tree(self.pending, choices)

    def choices(self, seed: int, num_subsets: int = 200) -> list[Choices]:
        """None, all, each alone, each missing, each torn, and seeded subsets (or all, if they are not more); without repetition."""
        rng = random.Random(f"{seed}:{self.number}")
        count = len(self.pending)
        found: dict[Choices, None] = {(False,) * count: None, (True,) * count: None}
        for index, change in enumerate(self.pending):
            for rest in (False, True):
                row: list[Choice] = [rest] * count
                row[index] = not rest
                found[tuple(row)] = None
                for torn in _tears(change, rng):
                    row[index] = torn
                    found[tuple(row)] = None
        if 2**count <= num_subsets:
            found |= dict.fromkeys(itertools.product((False, True), repeat=count))
        for _ in range(num_subsets if count else 0):
            likelihood, tearing = rng.choice((0.1, 0.5, 0.9)), rng.choice((0.0, 0.25, 1.0))
            found[tuple(_drawn(change, likelihood, tearing, rng) for change in self.pending)] = None
        return list(found)


def _tears(change: Change, rng: random.Random) -> list[Choice]:
    if not isinstance(change, Write):
        return []
    sectors = range(len(change.sectors))
    cuts = sectors[1:] if len(sectors) <= _MAX_CUTS else sorted(rng.sample(sectors[1:], _MAX_CUTS))
    tears = [tuple(sectors[:cut]) for cut in cuts] + [tuple(sectors[cut:]) for cut in cuts]
    return [(), *tears, *(tuple(each for each in sectors if each != missing) for missing in cuts)]


def _drawn(change: Change, likelihood: float, tearing: float, rng: random.Random) -> Choice:
    if isinstance(change, Write) and rng.random() < tearing:
        return tuple(sector for sector in range(len(change.sectors)) if rng.random() < 0.5)
    return rng.random() < likelihood


class Disk:
    """The state of the disk after the records so far: what is durable, and what is pending."""

    def __init__(self, *, is_ignored=lambda path: False) -> None:
        self.root = Folder()
        self.pending: list[Change] = []
        self._nodes: dict[int, Node] = {}
        self._is_ignored = is_ignored

    def intervals(self, records: Iterator[Record]) -> Iterator[Interval]:
        """Play all ``records``, stopping right before each sync and at the end."""
        marks: list[dict] = []
        number = 0
        for record in records:
            if record.op is Op.MARK:
                marks.append(json.loads(record.data))
                continue
            if record.op is Op.SYNC or record.is_durable:
                yield Interval(number, self, tuple(self.pending), tuple(marks))
                number += 1
            self.play(record)
        yield Interval(number, self, tuple(self.pending), tuple(marks))

    def play(self, record: Record) -> None:
        match record.op:
            case Op.CREATE | Op.MKDIR:
                node = File() if record.op is Op.CREATE else Folder()
                self._nodes[record.inode] = node
                self._name((record.path, node))
            case Op.WRITE:
                self._change(record, lambda file: Write(file, record.offset, record.data))
            case Op.TRUNCATE:
                self._change(record, lambda file: Resize(file, record.offset))
            case Op.SYNC:
                node = self._nodes.get(record.inode, self.root)  # the recorded directory itself was made before the recording
                self._flush(lambda change: _touches(change, node))
            case Op.RENAME:
                self._name((record.path, None), (record.path2, self._at(record.path)))
            case Op.LINK:
                self._name((record.path2, self._nodes[record.inode]))
            case Op.UNLINK:
                self._name((record.path, None))
            case _:
                raise AssertionError(f"can't be replayed: {record}")

    def tree(self, pending: tuple[Change, ...] = (), choices: Choices = ()) -> dict[str, bytes | None]:
        chosen = [(change, choice) for change, choice in zip(pending, choices, strict=True) if choice is not False]
        found: dict[str, bytes | None] = {}

        def walk(folder: Folder, path: str) -> None:
            entries: dict[str, Node | None] = dict(folder.durable)
            for change, _ in chosen:
                if isinstance(change, Naming):
                    entries.update({name: node for where, name, node in change.edits if where is folder})
            for name, node in entries.items():
                if isinstance(node, Folder):
                    found[f"{path}{name}"] = None
                    walk(node, f"{path}{name}/")
                elif isinstance(node, File) and not self._is_ignored(f"{path}{name}"):
                    found[f"{path}{name}"] = _content(node, pending, choices)

        walk(self.root, "")
        return found

    # ---------------------------------------------------------------- within

    def _change(self, record: Record, make) -> None:
        file = self._nodes.get(record.inode)
        if not isinstance(file, File):
            return  # made under an ignored name
        change = make(file)
        if record.is_durable:
            self._flush(lambda each: isinstance(each, Resize | Write) and each.file is file and _overlaps(each, change))
            _put_whole(change, file.durable)
        else:
            self.pending.append(change)

    def _name(self, *edits: tuple[str, Node | None]) -> None:
        found = []
        for path, node in edits:
            *folders, name = path.strip("/").split("/")
            folder = self.root
            for each in folders:
                folder = folder.now[each]
            if self._is_ignored(path.strip("/")):
                self._nodes = {inode: each for inode, each in self._nodes.items() if each is not node}
                return
            if node is None:
                folder.now.pop(name, None)
            else:
                folder.now[name] = node
            found.append((folder, name, node))
        self.pending.append(Naming(tuple(found)))

    def _at(self, path: str) -> Node:
        node: Node = self.root
        for each in path.strip("/").split("/"):
            node = node.now[each]
        return node

    def _flush(self, is_synced) -> None:
        """Make durable, in their order, the pending changes that ``is_synced`` names, and with a rename between directories what came before it in both."""
        taken = {index for index, change in enumerate(self.pending) if is_synced(change)}
        while True:
            folders = {
                (id(folder), index)
                for index in taken
                if isinstance(change := self.pending[index], Naming) and len({id(edit[0]) for edit in change.edits}) > 1
                for folder, _, _ in change.edits
            }
            more = {
                index
                for index, change in enumerate(self.pending)
                if isinstance(change, Naming)
                and any(id(edit[0]) == folder and index < before for edit in change.edits for folder, before in folders)
            }
            if more <= taken:
                break
            taken |= more
        for index in sorted(taken):
            change = self.pending[index]
            if isinstance(change, Naming):
                for folder, name, node in change.edits:
                    if node is None:
                        folder.durable.pop(name, None)
                    else:
                        folder.durable[name] = node
            else:
                _put_whole(change, change.file.durable)
        self.pending = [change for index, change in enumerate(self.pending) if index not in taken]


def _put_whole(change: Write | Resize, content: bytearray) -> None:
    if isinstance(change, Write):
        change.put(content, change.sectors)
    else:
        change.put(content)


def _content(file: File, pending: tuple[Change, ...], choices: Choices) -> bytes:
    """A file's bytes if ``choices`` of what was pending reached the disk."""
    mine = [
        (change, choice)
        for change, choice in zip(pending, choices, strict=True)
        if isinstance(change, Write | Resize) and change.file is file
    ]
    present: list[Collection[int]] = []
    later: set[int] = set()
    for change, choice in reversed(mine):
        sectors: Collection[int] = ()
        if isinstance(change, Write):
            own = change.sectors
            sectors = own if choice is True else {own[each] for each in choice or ()} | later.intersection(own)
            later.update(sectors)
        present.append(sectors)
    content = bytearray(file.durable)
    for (change, choice), sectors in zip(mine, reversed(present), strict=True):
        if isinstance(change, Resize):
            if choice is True:
                change.put(content)
        elif choice is not False or sectors:
            change.put(content, sectors)
    return bytes(content)


def _touches(change: Change, node: Node) -> bool:
    return any(edit[0] is node for edit in change.edits) if isinstance(change, Naming) else change.file is node


def _overlaps(change: Write | Resize, other: Write | Resize) -> bool:
    if isinstance(change, Resize) or isinstance(other, Resize):
        return True
    return change.offset < other.offset + len(other.data) and other.offset < change.offset + len(change.data)


def materialise(tree: dict[str, bytes | None], directory: Path) -> None:
    """Make ``tree`` anew in the empty folder ``directory``."""
    for path, content in tree.items():
        if content is None:
            (directory / path).mkdir(mode=0o700)
        else:
            (directory / path).write_bytes(content)
