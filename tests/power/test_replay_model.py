"""The model of a disk that loses its power, by what it may and may not leave."""

from __future__ import annotations

from pathlib import Path

from replay import Disk, Op, Record, mark, materialise, read_log

SECTOR = 512


def disk_after(*records: Record) -> list:
    """The choices and trees of the interval after all records."""
    (last,) = [*Disk().intervals(iter(records))][-1:]
    return [(choices, last.tree(choices)) for choices in last.choices(seed=1)]


def create(path: str, inode: int) -> Record:
    return Record(Op.CREATE, False, path, "", inode, 0, b"")


def write(inode: int, data: bytes, offset: int = 0, *, durable: bool = False) -> Record:
    return Record(Op.WRITE, durable, "", "", inode, offset, data)


def sync(inode: int) -> Record:
    return Record(Op.SYNC, False, "", "", inode, 0, b"")


ROOT = 1


def trees(*records: Record) -> list[dict]:
    return [tree for _, tree in disk_after(*records)]


def test_what_is_not_synced_may_be_there_or_not():
    found = trees(create("/a", 2), write(2, b"x"))
    assert {} in found
    assert {"a": b""} in found
    assert {"a": b"x"} in found
    assert all(tree in ({}, {"a": b""}, {"a": b"x"}, {"a": b"\0"}) for tree in found)


def test_a_synced_file_without_its_name_is_lost():
    found = trees(create("/a", 2), write(2, b"x"), sync(2))
    assert {} in found
    assert {"a": b"x"} in found
    assert {"a": b""} not in found


def test_a_synced_name_stays_whatever_follows():
    found = trees(create("/a", 2), sync(ROOT), write(2, b"x"), sync(2), write(2, b"y"))
    assert all(tree in ({"a": b"x"}, {"a": b"y"}) for tree in found)


def test_a_rename_is_old_or_new():
    records = [create("/a", 2), write(2, b"old"), sync(2), create("/b", 3), write(3, b"new"), sync(3), sync(ROOT)]
    found = trees(*records, Record(Op.RENAME, False, "/b", "/a", 3, 0, b""))
    assert {"a": b"old", "b": b"new"} in found
    assert {"a": b"new"} in found
    assert len(found) == 2


def test_a_rename_between_folders_brings_what_came_before_it():
    records = [Record(Op.MKDIR, False, "/d", "", 4, 0, b""), sync(ROOT), create("/a", 2), sync(2)]
    renamed = Record(Op.RENAME, False, "/a", "/d/a", 2, 0, b"")
    assert {"d": None, "d/a": b""} in trees(*records, renamed)
    assert trees(*records, renamed, sync(4)) == [{"d": None, "d/a": b""}]
    assert trees(*records, renamed, sync(ROOT)) == [{"d": None, "d/a": b""}]


def test_a_removal_may_reach_the_disk_without_the_change_before_it():
    records = [create("/a", 2), sync(2), sync(ROOT), create("/b", 3), sync(3)]
    found = trees(*records, Record(Op.UNLINK, False, "/a", "", 0, 0, b""))
    assert {} in found
    assert {"a": b"", "b": b""} in found


def test_a_write_is_torn_at_sectors():
    old, new = b"o" * 3 * SECTOR, b"n" * (2 * SECTOR)
    found = trees(create("/a", 2), sync(ROOT), write(2, old), sync(2), write(2, new, SECTOR // 2))
    for tree in found:
        assert tree["a"][: SECTOR // 2] == old[: SECTOR // 2]
        for start, end in ((SECTOR // 2, SECTOR), (SECTOR, 2 * SECTOR), (2 * SECTOR, 5 * SECTOR // 2)):
            assert len(set(tree["a"][start:end])) == 1  # a sector is old or new
    assert len({tree["a"] for tree in found}) == 2**3


def test_a_write_through_a_synchronous_descriptor_is_durable_alone():
    found = trees(create("/a", 2), sync(ROOT), sync(2), write(2, b"12345678"), write(2, b"M", 600, durable=True))
    assert {tree["a"][600:] for tree in found} == {b"M"}
    assert {tree["a"][:8] for tree in found} == {bytes(8), b"12345678"}


def test_a_sector_with_a_later_write_has_the_earlier_ones_too():
    found = trees(create("/a", 2), sync(ROOT), sync(2), write(2, b"1"), write(2, b"2", 1))
    assert {tree["a"] for tree in found} == {b"", b"1", b"12", b"\0", bytes(2), b"1\0"}


def test_a_later_write_may_be_there_without_an_earlier_one():
    found = trees(create("/a", 2), sync(ROOT), sync(2), write(2, b"1"), write(2, b"2", SECTOR))
    assert {"a": bytes(SECTOR) + b"2"} in found
    assert {"a": b"1"} in found


def test_the_log_holds_marks_in_their_order_and_a_tree_can_be_made(tmp_path: Path):
    log = tmp_path / "log"
    mark(log, done="a")
    mark(log, done="b")
    disk = Disk()
    (interval,) = disk.intervals(read_log(log))
    assert [each["done"] for each in interval.marks] == ["a", "b"]
    materialise({"d": None, "d/a": b"x"}, tmp_path)
    assert (tmp_path / "d" / "a").read_bytes() == b"x"
