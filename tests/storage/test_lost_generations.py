"""Which faults of the disk cost the store's generation and which leave it as it is; persistence heals after either."""

from __future__ import annotations

import pytest
from storage_harness import World, crash, prompt, warm

from kvd.storage import store_thread
from kvd.storage.errors import StoreFullError
from kvd.storage.store import Store

pytestmark = pytest.mark.store


@pytest.mark.parametrize(
    "point", ["store.before_commit", "store.before_put", "checkpoint.before_nodes", "checkpoint.between_blocks", "store.after_commit"]
)
def test_an_io_error_sets_the_generation_aside_and_persistence_heals(tmp_path, arm, monkeypatch, point):
    monkeypatch.setattr(store_thread, "_RETRY_MIN_S", 0.01)
    world = World(tmp_path)
    arm(f"{point}=raise")
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: world.storage.stats()["degradations"] == 1)
    assert world.ask(prompt(0, 81)) == 80  # serving goes on
    world.until(lambda: not world.storage.status()["degraded"])
    assert not world.checkpoint().error
    world.until(lambda: world.storage.status()["blocks"] == 5)
    assert world.log.named("storage.degraded")[0]["generation_lost"]
    assert [path.name for path in (tmp_path / "kv").glob("*.aside")] == ["1.aside"]
    crash(world)
    world = World(tmp_path)
    assert world.report.num_blocks == 5
    world.stop()


def test_a_full_disk_keeps_the_generation_and_heals(tmp_path, monkeypatch):
    warm(tmp_path, 0)
    monkeypatch.setattr(store_thread, "_RETRY_MIN_S", 0.01)
    world = World(tmp_path)
    full = {"times": 3}
    real = store_thread.StoreTransaction.commit

    def commit(self) -> None:
        if full["times"]:
            full["times"] -= 1
            raise StoreFullError("enospc: No space left on device")
        real(self)

    monkeypatch.setattr(store_thread.StoreTransaction, "commit", commit)
    for _ in range(2):
        world.ask(prompt(1, 81, shared=32))
    world.until(lambda: world.storage.stats()["degradations"] >= 1)
    world.until(lambda: full["times"] == 0 and not world.storage.status()["degraded"])
    assert not world.checkpoint().error
    assert not world.log.named("storage.degraded")[0]["generation_lost"]
    world.stop()
    world = World(tmp_path)
    assert world.report.num_blocks == 8
    world.stop()


def test_the_short_write_of_a_full_disk_is_no_damage(tmp_path, arm, monkeypatch):
    monkeypatch.setattr(store_thread, "_RETRY_MIN_S", 0.01)
    world = World(tmp_path)
    has_room = {"yes": False}
    monkeypatch.setattr(Store, "disk_has_room", lambda _self, _num_bytes: has_room["yes"])
    arm("store.before_commit=raise")
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: world.storage.stats()["degradations"] == 1)
    world.until(lambda: world.storage.status()["blocks"] == 5)
    faults = world.log.named("storage.degraded")
    assert [fault["generation_lost"] for fault in faults] == [False]
    assert "full" in faults[0]["reason"]
    assert world.storage.status()["degraded"], "what became free took them; the disk is still full"
    has_room["yes"] = True
    world.until(lambda: not world.storage.status()["degraded"])
    assert world.log.named("storage.resumed")
    world.stop()
    assert [path.name for path in (tmp_path / "kv").iterdir() if path.is_dir()] == ["1"]


def test_a_checkpoint_while_degraded_fails_with_the_reason(tmp_path, arm, monkeypatch):
    monkeypatch.setattr(store_thread, "_RETRY_MIN_S", 1000.0)
    world = World(tmp_path)
    arm("store.before_commit=raise")
    for _ in range(2):
        world.ask(prompt(0, 81))
    done = world.checkpoint()
    assert "degraded" in done.error
    assert world.storage.status()["degraded"]
    assert not world.stop()


def test_the_lock_file_has_its_blocks_before_it_is_mapped(tmp_path):
    world = World(tmp_path)
    found = (tmp_path / "kv" / "1" / "lock.mdb").stat()
    assert found.st_blocks * 512 >= found.st_size == 8192
    world.stop()
