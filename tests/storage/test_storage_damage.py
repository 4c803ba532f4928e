"""What is damaged does not come back at all and costs nothing beside it; one life heals the store, and the tools find and repair the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from corruption import flip
from storage_harness import ROW_BYTES, World, chain_of, prompt, warm

from kvd.cache.hashing import Namespace
from kvd.storage.tools import block_extents, check_store, dump_store

pytestmark = pytest.mark.store


def test_a_hot_prefix_without_bytes_is_to_be_recomputed(tmp_path):
    warm(tmp_path, 0)
    for path, offset, length in block_extents(tmp_path):
        flip(path, offset + length - 1)
    world = World(tmp_path)
    assert world.report.num_blocks == 0
    assert world.report.dropped == {"checksum": 1, "behind_bad_block": 4}
    assert [submit.token_ids for submit in world.report.recompute] == [prompt(0, 80, shared=32)]
    assert world.storage.status()["nodes"] == 5
    world.stop()


def test_a_store_with_a_bad_bit_in_every_block_heals_in_one_life(tmp_path):
    warm(tmp_path, 0, 1)
    for path, offset, length in block_extents(tmp_path):
        flip(path, offset + length // 2)
    warm(tmp_path, 0, 1)
    world = World(tmp_path)
    assert world.report.dropped == {}
    assert world.report.num_blocks == 8
    world.stop()


@pytest.mark.parametrize(
    ("where", "reason"), [(1, "header"), (20, "header"), (90, "header"), (100, "checksum"), (96 + ROW_BYTES - 1, "checksum")]
)
def test_a_flipped_bit_in_a_block_is_a_miss_and_counted(tmp_path, where, reason):
    warm(tmp_path, 0)
    extents = list(block_extents(tmp_path))
    assert len(extents) == 5
    chain = chain_of(prompt(0, 81, shared=32), Namespace(b"f" * 32))
    third = next(extent for extent in extents if chain[2] in extent[0].read_bytes()[extent[1] : extent[1] + 96])
    flip(third[0], third[1] + where, bit=3)
    world = World(tmp_path)
    assert world.report.dropped == {reason: 1, "behind_bad_block": 2}
    assert world.report.num_blocks == 2
    assert world.ask(prompt(0, 81, shared=32)) == 32
    assert not world.checkpoint().error
    world.stop()
    world = World(tmp_path)
    assert world.report.dropped == {}
    assert world.report.num_blocks == 5
    world.stop()


def test_blocks_behind_a_bad_one_are_counted_wherever_they_branch_off(tmp_path):
    """Two prompts share two blocks, and have three more each; the second shared block is bad."""
    warm(tmp_path, 0, 1)
    shared = chain_of(prompt(0, 81, shared=32), Namespace(b"f" * 32))[1]
    bad = next(extent for extent in block_extents(tmp_path) if shared in extent[0].read_bytes()[extent[1] : extent[1] + 96])
    flip(bad[0], bad[1] + 200)
    world = World(tmp_path)
    assert world.report.dropped == {"checksum": 1, "behind_bad_block": 6}
    assert world.report.num_blocks == 1
    world.stop()


def test_a_truncated_data_file_is_set_aside_and_never_kills_the_process(tmp_path):
    warm(tmp_path, 0)
    path = tmp_path / "kv" / "1" / "data.mdb"
    whole = path.read_bytes()
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "kv", kept)
    num_whole = 0
    for size in [0, 1, 100, 4095, 4096, 4200, 8191, 8192, *range(12288, len(whole), 16384), len(whole) - 1]:
        shutil.rmtree(tmp_path / "kv")
        shutil.copytree(kept, tmp_path / "kv")
        path.write_bytes(whole[:size])
        world = World(tmp_path)
        # what ends at a page and lacks free pages alone may come from a power cut, and lacks nothing
        is_whole = size % 4096 == 0 and world.report.num_blocks == 5
        assert is_whole or world.report.num_blocks == 0
        assert world.storage.status()["degraded"] is False
        assert bool(world.log.named("storage.damage")) is not is_whole
        num_whole += is_whole
        world.stop(clean=False)
    assert num_whole <= 2


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "flipped"])
def test_a_damaged_current_begins_an_empty_store(tmp_path, damage):
    warm(tmp_path, 0)
    path = tmp_path / "kv" / "CURRENT"
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        flip(path, 20)
    else:
        path.write_bytes(b"" if damage == "empty" else b"garbage\n" * 9)
    world = World(tmp_path)
    assert world.report.num_blocks == 0
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.stop()
    world = World(tmp_path)
    assert world.report.num_blocks == 5
    assert len([path for path in (tmp_path / "kv").iterdir() if path.name.isdigit()]) == 1
    world.stop()


def test_a_flipped_bit_in_the_newest_recipes_costs_no_pin_and_one_clean_life_mends_it(tmp_path):
    world = World(tmp_path)
    for name in ("first", "second"):
        assert world.pin(name, prompt(len(name), 64)) == "recipe+bytes"
    assert world.storage.status()["damage"] == []
    world.stop()
    newest = max((tmp_path / "recipes").iterdir(), key=lambda path: int(path.suffix[1:]))
    flip(newest, newest.stat().st_size // 2)
    report = check_store(tmp_path)
    assert (report["ok"], report["recipes"], report["recipe_copies"]) == (False, 2, 1)
    world = World(tmp_path)
    assert list(world.storage.recipe_book.recipes()) == ["first", "second"]
    assert newest.name in str(world.storage.status()["damage"])
    assert world.storage.status()["degraded"] is False
    world.stop()
    report = check_store(tmp_path)
    assert (report["ok"], report["recipes"], report["recipe_copies"], report["quarantined_files"]) == (True, 2, 2, 1)


def test_the_repair_restores_a_damaged_file_of_the_recipes(tmp_path):
    world = World(tmp_path)
    world.pin("a", prompt(1, 64))
    world.stop()
    newest = max((tmp_path / "recipes").iterdir(), key=lambda path: int(path.suffix[1:]))
    flip(newest, 40)
    report = check_store(tmp_path, repair=True)
    assert (report["ok"], report["recipes"], report["recipe_copies"]) == (True, 1, 2)
    assert newest.name in str(report["repaired"])


def test_what_the_tools_say_of_a_healthy_store(tmp_path):
    world = World(tmp_path)
    world.pin("system", prompt(9, 64))
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.checkpoint()
    beside = check_store_elsewhere(tmp_path)
    assert beside["ok"]
    assert beside["in_use"]
    world.stop()
    report = check_store(tmp_path)
    assert report["ok"]
    assert not report["in_use"]
    assert (report["nodes"], report["blocks"], report["orphan_blocks"], report["recipes"], report["clean"]) == (9, 9, 0, 1, True)
    kinds = [entry["kind"] for entry in dump_store(tmp_path)]
    assert kinds.count("node") == 9
    assert kinds.count("block") == 9
    assert kinds.count("pin") == 1
    assert kinds.count("recipe") == 1


def check_store_elsewhere(state_dir: Path) -> dict:
    import json
    import subprocess
    import sys

    code = "import json, sys; from pathlib import Path; from kvd.storage.tools import check_store; print(json.dumps(check_store(Path(sys.argv[1]))))"
    done = subprocess.run([sys.executable, "-c", code, str(state_dir)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_tools_find_damage_and_repair_it(tmp_path):
    warm(tmp_path, 0)
    path, offset, length = next(iter(block_extents(tmp_path)))
    flip(path, offset + length - 1)
    report = check_store(tmp_path)
    assert not report["ok"]
    assert report["bad_blocks"] == {"checksum": 1}
    report = check_store(tmp_path, repair=True)
    assert report["ok"]
    assert report["blocks"] == 4
    assert report["repaired"]
