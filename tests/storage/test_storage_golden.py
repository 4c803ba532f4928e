"""The golden files of every format that was ever written: this version reads them all (docs/storage-format.md, "Versions")."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from crc32c import crc32c
from storage_harness import World, prompt

from kvd.storage import schema
from kvd.storage.errors import UnknownFormatError
from kvd.storage.store import Store
from kvd.storage.tools import check_store, dump_store

pytestmark = pytest.mark.store

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def golden(tmp_path) -> Path:
    return Path(shutil.copytree(DATA / "store-v1", tmp_path / "state"))


def test_version_1_is_read_to_the_last_field(golden):
    expected = [json.loads(line) for line in (DATA / "store-v1.jsonl").read_text().splitlines()]
    assert list(dump_store(golden)) == expected
    report = check_store(golden)
    assert report["ok"]
    assert (report["recipes"], report["nodes"], report["blocks"], report["wal_records"], report["failed_starts"]) == (1, 6, 6, 2, 1)


def test_version_1_comes_back_warm(golden):
    world = World(golden, row_bytes=200)
    assert world.report.num_blocks == 6
    assert world.report.pins_pending == ()
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    assert world.storage.status()["nodes"] == 6 + 2
    assert world.ask(prompt(0, 49, shared=16)) == 48
    assert world.ask(prompt(9, 49)) == 48
    world.stop()


def test_a_store_of_a_later_format_is_refused_and_left_alone(golden):
    store = Store(golden / "kv" / "1", 1 << 24)
    txn = store.begin()
    txn.put_meta(store.meta)
    body = struct.pack("<I", schema.FORMAT_VERSION + 1) + schema.pack_meta(store.meta)[4:-4]
    txn._put(schema.META_KEY, body + struct.pack("<I", crc32c(body)), schema.DB_META)
    txn.commit()
    store.close()
    before = (golden / "kv" / "1" / "data.mdb").read_bytes()
    with pytest.raises(UnknownFormatError, match="format 2"):
        World(golden, row_bytes=200)
    assert (golden / "kv" / "1" / "data.mdb").read_bytes() == before
    assert not check_store(golden)["ok"]


def test_a_current_of_a_later_format_is_refused(golden):
    path = golden / "kv" / "CURRENT"
    body = path.read_text().rsplit(" ", 1)[0].replace("kvd-store 1 ", "kvd-store 2 ")
    path.write_text(f"{body} {crc32c(body.encode()):08x}\n")
    with pytest.raises(UnknownFormatError, match="format 2"):
        World(golden, row_bytes=200)
