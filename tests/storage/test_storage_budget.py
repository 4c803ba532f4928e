"""``store_max_bytes`` bounds what ``du`` counts under the state directory: while running, over damage and restarts, and after it was lowered; the least valuable go, and pins stay as recipes."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from storage_harness import BLOCK_TOKENS, World, chain_of, crash, prompt

from kvd.config import StorageConfig
from kvd.storage.budget import NODE_DISK_BYTES, plan_budget, quarantine_max_bytes, recipes_max_bytes
from kvd.storage.errors import StoreFullError
from kvd.storage.store import StoreTransaction
from kvd.storage.tools import check_store
from kvd.types import KvGroup

pytestmark = pytest.mark.store

MIB = 1 << 20
ROW_BYTES = 60_000


def du(folder: Path) -> int:
    """As ``du -s --block-size=1``, without a process for each look."""
    total = 0
    for path, _, names in os.walk(folder):
        for each in (path, *(f"{path}/{name}" for name in names)):
            try:
                total += os.lstat(each).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Watch:
    """The most that ``folder`` took while this was open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.max_bytes = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.001):
            self.max_bytes = max(self.max_bytes, du(self._folder))


def busy(world: World, first: int, num_prompts: int, *, num_pins: int = 1) -> None:
    """Prefixes that come and go, some hot, some pinned anew."""
    for number in range(first, first + num_prompts):
        world.ask(prompt(number, 81))
        if number % 3:
            world.ask(prompt(number, 81))
    for number in range(num_pins):
        world.pin(f"pin-{first}-{number}", prompt(first + number, 64))
    world.checkpoint()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damage(state_dir: Path, kind: int) -> None:
    """Something that a start sets aside, another kind each time."""
    segments = sorted((state_dir / "wal").glob("*.wal"))
    recipes = sorted((state_dir / "recipes").iterdir())
    if kind == 0:
        for segment in segments:
            flip(segment, 100)
        flip(recipes[-1], 30)
    elif kind == 1:
        data = max((state_dir / "kv").glob("*/data.mdb"))
        os.truncate(data, data.stat().st_size // 2)
    elif kind == 2:
        for segment in segments:
            flip(segment, 20)
        (state_dir / "wal" / "9999999999999990.wal").mkdir()
        (state_dir / "wal" / "9999999999999990.wal" / "inside").write_bytes(bytes(300_000))
    else:
        (state_dir / "kv" / "CURRENT").write_bytes(b"?")


def test_a_busy_life_stays_within_its_budget(tmp_path):
    total = 32 * MIB
    config = {"store_max_bytes": total, "num_blocks": 700, "row_bytes": ROW_BYTES, "wal_max_bytes": MIB // 4}
    with Watch(tmp_path) as watch:
        for life in range(5):
            world = World(tmp_path, **config)
            busy(world, 1000 * life, 110)
            assert list(world.storage.recipe_book.recipes()) == [f"pin-{1000 * each}-0" for each in range(life + 1)]
            world.stop() if life % 2 else crash(world)
            (tmp_path / "starting").unlink(missing_ok=True)
            damage(tmp_path, life % 4)
        world = World(tmp_path, **config)
        assert len(world.storage.recipe_book.recipes()) == 5
        world.stop()
    assert total // 2 < watch.max_bytes <= total
    assert int(
        subprocess.run(["du", "-s", "--block-size=1", tmp_path], capture_output=True, text=True, check=True).stdout.split()[0]
    ) == du(tmp_path)
    assert check_store(tmp_path)["ok"]


def fill(state_dir: Path, total: int, num_prompts: int) -> None:
    """A store that is used up, with a pin and a prefix of many uses that are not the newest."""
    world = World(state_dir, store_max_bytes=total, num_blocks=5 * num_prompts + 200, row_bytes=ROW_BYTES)
    assert world.pin("system", prompt(9000, 81)) == "recipe+bytes"
    for _ in range(9):
        world.ask(prompt(9001, 81))
    busy(world, 0, num_prompts, num_pins=0)
    world.stop()


@pytest.mark.parametrize(
    ("before", "after", "num_prompts"), [(80 * MIB, 32 * MIB, 180), pytest.param(256 * MIB, 64 * MIB, 600, marks=pytest.mark.full)]
)
def test_a_lowered_budget_is_kept_before_anything_is_served(tmp_path, before, after, num_prompts):
    fill(tmp_path, before, num_prompts)
    old_bytes = du(tmp_path)
    assert after < old_bytes <= before
    with Watch(tmp_path) as watch:
        world = World(tmp_path, store_max_bytes=after, num_blocks=5 * num_prompts + 200, row_bytes=ROW_BYTES)
    assert du(tmp_path) <= after
    assert watch.max_bytes <= old_bytes + after
    assert world.storage.status()["damage"] == []
    # the most valuable has stayed, and as much as fits
    assert world.report.pins_pending == ()
    for number in (9000, 9001):
        assert world.ask(prompt(number, 81)) == 80
    assert world.report.num_blocks * ROW_BYTES > after // 3
    with Watch(tmp_path) as watch:
        busy(world, 20_000, 100)
        world.stop()
        world = World(tmp_path, store_max_bytes=after, num_blocks=400, row_bytes=ROW_BYTES)
        world.stop()
    assert watch.max_bytes <= after
    assert check_store(tmp_path)["ok"]


@pytest.mark.parametrize("num_puts", [0, 50])
def test_a_lowered_budget_is_kept_on_a_full_disk_too(tmp_path, monkeypatch, num_puts):
    fill(tmp_path, 80 * MIB, 180)
    real, left = StoreTransaction.put_block, [num_puts]

    def put_block(self, *arguments) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoreFullError("enospc: the disk is full")
        real(self, *arguments)

    monkeypatch.setattr(StoreTransaction, "put_block", put_block)
    if not num_puts:  # not even the rows of nodes find room

        def put_node(self, *_) -> None:
            if left[0] >= 0:
                left[0] = -1
                raise StoreFullError("enospc: the disk is full")

        monkeypatch.setattr(StoreTransaction, "put_node", put_node)
    world = World(tmp_path, store_max_bytes=32 * MIB, num_blocks=400, row_bytes=ROW_BYTES)
    assert du(tmp_path) <= 32 * MIB
    assert bool(world.storage.status()["damage"]) is (num_puts == 0)
    assert 0 <= world.report.num_blocks <= num_puts
    monkeypatch.undo()
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    assert world.pin("more", prompt(1, 81)) == "recipe+bytes"
    crash(world)
    world = World(tmp_path, store_max_bytes=32 * MIB, num_blocks=400, row_bytes=ROW_BYTES)
    assert world.ask(prompt(1, 81)) == 80
    world.stop()
    assert check_store(tmp_path)["ok"]


def test_a_smaller_budget_bounds_what_lies_aside_and_in_quarantine(tmp_path):
    fill(tmp_path, 64 * MIB, 20)
    data = max((tmp_path / "kv").glob("*/data.mdb"))
    aside = tmp_path / "kv" / "0.aside"
    shutil.copytree(data.parent, aside)
    (tmp_path / "quarantine").mkdir()
    for number in range(8):
        (tmp_path / "quarantine" / f"piece.{number}").write_bytes(os.urandom(200_000))
    assert du(aside) > 32 * MIB // 8
    world = World(tmp_path, store_max_bytes=32 * MIB, num_blocks=400, row_bytes=ROW_BYTES)
    assert not aside.exists()
    assert 0 < du(tmp_path / "quarantine") <= quarantine_max_bytes(32 * MIB) + 4096
    world.stop()


@pytest.mark.parametrize("total", [32 * MIB, 33 * MIB + 1, 256 * MIB, 8 << 30])
@pytest.mark.parametrize("recipes_bytes", [0, MIB, 4 * MIB])
def test_the_parts_are_the_whole(tmp_path, total, recipes_bytes):
    config = StorageConfig(state_dir=tmp_path, store_max_bytes=total)
    budget = plan_budget(config, (KvGroup("target", ROW_BYTES, b"f" * 32),), recipes_bytes=recipes_bytes)
    parts = budget.map_bytes + budget.wal_max_bytes + budget.wal_segment_bytes + budget.quarantine_max_bytes + budget.aside_max_bytes
    assert parts + 4 * max(recipes_bytes, recipes_max_bytes(total)) < total or (total < 64 * MIB and recipes_bytes == 4 * MIB)
    assert budget.max_block_bytes < budget.map_bytes
    assert budget.wal_max_bytes >= 4 * budget.wal_segment_bytes


def test_the_blocks_of_a_pin_stay_counted_while_the_disk_is_full(tmp_path, monkeypatch):
    world = World(tmp_path)
    assert world.pin("system", prompt(9, 81)) == "recipe+bytes"
    for number in range(10):
        for _ in range(2):
            world.ask(prompt(number, 81))
    assert not world.checkpoint().error
    before = world.storage.status()
    assert before["blocks"] == 5 * 10

    def commit(self) -> None:
        raise StoreFullError("enospc: the disk is full")

    monkeypatch.setattr(StoreTransaction, "commit", commit)
    for _ in range(2):
        world.ask(prompt(77, 81))
    world.until(lambda: world.storage.status()["degraded"])
    status = world.storage.status()
    assert (status["blocks"], status["bytes"]) == (before["blocks"], before["bytes"])
    assert status["reason"].startswith("enospc: ")
    for key in chain_of(prompt(9, 81), world.namespace):
        assert world.storage.block_on_disk(key)[0]
    crash(world)
    monkeypatch.undo()
    world = World(tmp_path)
    assert world.report.num_blocks == 50
    assert world.report.num_tokens == 50 * BLOCK_TOKENS
    world.stop()


def test_rows_of_nodes_beyond_their_bound_take_their_room_from_the_blocks(tmp_path):
    world = World(tmp_path, num_blocks=2000, store_max_bytes=8 * MIB, write_policy="through", row_bytes=4000)
    index, limits = world.storage._running.recovered.index, world.storage._running.budget
    for number in range(15):
        world.ask(prompt(number, 16 * 90))
    world.until(lambda: len(index.nodes) == 15 * 90)
    num_beyond = 15 * 90 - limits.max_nodes
    assert num_beyond > 100, "memory holds more than the index may have on disk"
    room = limits.max_block_bytes - num_beyond * NODE_DISK_BYTES
    world.until(lambda: index.stored_bytes > room - 20 * limits.block_bytes)
    assert not world.checkpoint().error
    world.until(lambda: room - 20 * limits.block_bytes < index.stored_bytes <= room)
    world.stop()


def test_the_disk_budget_holds_and_the_least_valuable_go(tmp_path):
    row_bytes = 60_000
    config = {"store_max_bytes": 8 << 20, "num_blocks": 400, "row_bytes": row_bytes}
    world = World(tmp_path, **config)
    favourite = prompt(0, 81)
    for _ in range(20):
        world.ask(favourite)
    for number in range(1, 60):
        for _ in range(2):
            world.ask(prompt(number, 81))
        if number % 10 == 0:
            world.checkpoint()
    assert not world.checkpoint().error
    stats = world.storage.stats()
    assert stats["expired_bytes"] + stats["checkpoint_refused_blocks"] > 0
    assert stats["degradations"] == 0
    world.stop()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 8 << 20
    world = World(tmp_path, **config)
    assert world.ask(favourite) == 80
    budget = world.storage._running.budget
    assert world.report.num_blocks * budget.block_bytes >= 0.6 * budget.max_block_bytes, "room that is there is used"
    world.stop()


def test_a_smaller_budget_is_kept_after_the_next_start(tmp_path):
    row_bytes = 60_000
    world = World(tmp_path, store_max_bytes=32 << 20, num_blocks=400, row_bytes=row_bytes)
    for number in range(40):
        for _ in range(2):
            world.ask(prompt(number, 81))
    assert not world.checkpoint().error
    assert world.storage.status()["blocks"] == 200
    world.stop()
    config = {"store_max_bytes": 8 << 20, "num_blocks": 400, "row_bytes": row_bytes}
    world = World(tmp_path, **config)
    world.until(lambda: world.storage.status()["bytes"] < 6 << 20)
    world.stop()
    world = World(tmp_path, **config)
    assert sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*") if path.is_file()) <= 8 << 20
    assert 0 < world.report.num_blocks < 120
    world.stop()
    assert check_store(tmp_path)["ok"]


def test_pins_above_the_disk_budget_are_kept_as_recipes_alone(tmp_path):
    world = World(tmp_path, store_max_bytes=8 << 20, num_blocks=300, row_bytes=100_000)
    assert world.pin("fits", prompt(1, 320)) == "recipe+bytes"
    assert world.pin("too-much", prompt(2, 640)) == "recipe"
    assert world.storage.status()["degraded"] is False
    world.stop()
    world = World(tmp_path, store_max_bytes=8 << 20, num_blocks=300, row_bytes=100_000)
    assert world.report.pins_pending == ("too-much",)
    world.stop()
