"""A power cut between a commit and the lengthening of the data file that follows it."""

from __future__ import annotations

import os

import pytest
from storage_harness import World, crash, prompt

from kvd.storage import schema
from kvd.storage.errors import StoreDamagedError
from kvd.storage.generations import STORE_NAME
from kvd.storage.schema import PAGE_BYTES
from kvd.storage.store import DATA_NAME, Store, check_data_file

pytestmark = pytest.mark.store

MAP_BYTES = 32 << 20


def store_with_blocks(state_dir):
    world = World(state_dir)
    world.pin("system", prompt(9, 64))
    crash(world)
    return state_dir / STORE_NAME / "1"


def test_a_last_page_that_was_counted_and_never_written_is_no_damage(tmp_path, monkeypatch):
    directory = store_with_blocks(tmp_path)
    monkeypatch.setattr(Store, "cover_last_page", lambda _: None)
    store = Store(directory, MAP_BYTES)
    keys = list(store.block_keys())
    txn = store.begin()
    for number in range(100):
        txn.put_block("target", bytes([number]) * 32, memoryview(bytes(5 * PAGE_BYTES - schema.PAGE_HEADER_BYTES)))
    for number in range(100):
        txn.delete_block("target", bytes([number]) * 32)
    txn.commit()
    store.close()
    monkeypatch.undo()
    size = (directory / DATA_NAME).stat().st_size
    assert check_data_file(directory / DATA_NAME) > size
    world = World(tmp_path)
    assert world.storage.status()["damage"] == []
    assert list(world.storage._running.recovered.store.block_keys()) == keys
    assert world.ask(prompt(9, 64) + bytes(4)) == 64
    assert world.num_restored == 64
    world.stop()


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_a_page_that_holds_something_and_is_cut_off_is_damage(tmp_path, num_pages):
    directory = store_with_blocks(tmp_path)
    store = Store(directory, MAP_BYTES)
    txn = store.begin()
    value = memoryview(b"v" * (4 * PAGE_BYTES - schema.PAGE_HEADER_BYTES))
    for number in range(50):
        txn.put_block("target", bytes([number]) * 32, value)
    txn.commit()
    store.close()
    data = directory / DATA_NAME
    last = data.read_bytes().rstrip(b"\0")
    end = -(-len(last) // PAGE_BYTES) * PAGE_BYTES
    os.truncate(data, end - num_pages * PAGE_BYTES)
    with pytest.raises(StoreDamagedError):
        Store(directory, MAP_BYTES)
