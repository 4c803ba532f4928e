"""Storage over its whole life: what was hot comes back byte for byte, what is damaged does not come back at all."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from storage_harness import BLOCK_TOKENS, ROW_BYTES, World, chain_of, crash, prompt, row_of

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import tenant_salt
from kvd.commands import Recipe
from kvd.storage import persistence, planner, schema, store_thread
from kvd.storage.errors import StateLockedError, StoreFullError
from kvd.storage.store import Store
from kvd.storage.tools import block_extents, check_store, dump_store

pytestmark = pytest.mark.store


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def warm(state_dir: Path, *numbers: int, num_tokens: int = 81, **config) -> None:
    """A life in which each prompt was asked twice and checkpointed."""
    world = World(state_dir, **config)
    for number in numbers:
        world.ask(prompt(number, num_tokens, shared=32))
        world.ask(prompt(number, num_tokens, shared=32))
    assert not world.checkpoint().error
    assert world.stop()


def test_a_hot_prefix_comes_back_with_its_bytes(tmp_path):
    warm(tmp_path, 0, 1)
    world = World(tmp_path)
    assert world.report.num_blocks == 2 + 3 + 3
    assert world.report.num_tokens == 8 * BLOCK_TOKENS
    assert world.report.num_bytes == 8 * ROW_BYTES
    assert world.progress[-1] == (8, 8)
    assert world.ask(prompt(0, 81, shared=32)) == 80
    assert world.num_restored == 80
    assert world.ask(prompt(1, 81, shared=32)) == 80
    assert world.num_restored == 48
    world.stop()


def test_after_a_crash_what_a_checkpoint_promised_comes_back(tmp_path):
    world = World(tmp_path)
    for _ in range(2):
        world.ask(prompt(0, 81))
    done = world.checkpoint()
    assert (done.num_blocks, done.error) == (5, "")
    crash(world)
    world = World(tmp_path)
    assert world.report.num_blocks == 5
    assert world.ask(prompt(0, 81)) == 80
    world.stop()


def test_a_block_used_once_is_not_checkpointed_but_known_and_saved_at_shutdown(tmp_path):
    world = World(tmp_path)
    world.ask(prompt(0, 81))
    assert world.checkpoint().num_blocks == 0
    assert world.storage.status()["nodes"] == 5
    world.stop()
    world = World(tmp_path)
    assert world.report.num_blocks == 5
    world.stop()


def test_the_log_alone_makes_prefixes_known(tmp_path):
    world = World(tmp_path, checkpoint_interval_s=1000.0)
    world.ask(prompt(0, 81))
    world.until(lambda: world.storage._running.wal.durable_lsn == 5)
    crash(world)
    world = World(tmp_path, checkpoint_interval_s=1000.0)
    assert world.report.num_blocks == 0
    assert world.storage.status()["nodes"] == 5
    world.stop()


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


def test_bytes_of_another_model_are_never_used_and_are_collected(tmp_path):
    warm(tmp_path, 0)
    world = World(tmp_path, fingerprint=b"g" * 32)
    assert world.report.num_blocks == 0
    assert world.storage.status()["nodes"] == 0
    assert world.ask(prompt(0, 81, shared=32)) == 0
    world.stop()
    assert {entry["fingerprint"] for entry in dump_store(tmp_path) if entry["kind"] == "namespace"} == {(b"g" * 32).hex()}
    assert check_store(tmp_path)["blocks"] == 5


def test_tenants_do_not_share(tmp_path):
    world = World(tmp_path)
    tenant = Namespace(b"f" * 32, tenant_salt("", b"salt"))
    for _ in range(2):
        world.ask(prompt(0, 81), tenant)
    world.stop()
    world = World(tmp_path)
    assert world.report.num_blocks == 5
    assert world.ask(prompt(0, 81)) == 0
    assert world.ask(prompt(0, 81), tenant) == 80
    world.stop()


def test_what_0_1_0_kept_under_a_salt_is_collected_and_its_pin_belongs_to_requests_again(tmp_path):
    """It put the client's bytes into the namespace, where no request looks for them now, and no forget."""
    world = World(tmp_path)
    old, new = Namespace(b"f" * 32, b"night"), Namespace(b"f" * 32, tenant_salt("", b"night"))
    for _ in range(2):
        world.ask(prompt(0, 81), old)
    world.cache.pin("rules", prompt(0, 80), old)
    world.tick()
    world.storage.recipe_book.put(b"recipe", Recipe(name="rules", token_ids=prompt(0, 80), tokenizer_digest=b"", tenant_salt=b"night"))
    assert not world.wait_for(b"recipe").error
    assert not world.checkpoint().error
    assert world.stop()
    world = World(tmp_path)
    assert (world.report.num_blocks, world.report.pins_pending) == (0, ("rules",)), "to be computed under the new salt"
    recipe = world.storage.recipe_book.recipes()["rules"]
    assert recipe.tenant_salt == new.tenant_salt
    for _ in range(2):
        world.ask(prompt(0, 81), new)
    world.cache.pin("rules", recipe.token_ids, new)
    assert world.stop()
    assert {entry["tenant_salt"] for entry in dump_store(tmp_path) if entry["kind"] == "namespace"} == {new.tenant_salt.hex()}
    world = World(tmp_path)
    assert (world.report.num_blocks, world.report.pins_pending) == (5, ())
    world.stop()


def test_a_pin_is_durable_with_its_bytes_and_comes_first(tmp_path):
    world = World(tmp_path)
    for number in range(3):
        for _ in range(5):
            world.ask(prompt(number, 81))
    assert world.pin("system", prompt(9, 64)) == "recipe+bytes"
    crash(world)
    world = World(tmp_path, num_blocks=10, rehydrate_max_fraction=0.5)
    assert world.report.num_blocks == 5
    assert world.report.pins_pending == ()
    assert world.ask(prompt(9, 65)) == 64
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    world.stop()


def test_a_pin_without_bytes_is_pending(tmp_path):
    world = World(tmp_path)
    world.pin("system", prompt(9, 64))
    world.stop()
    shutil.rmtree(tmp_path / "kv")
    shutil.rmtree(tmp_path / "wal")
    world = World(tmp_path)
    assert world.report.pins_pending == ("system",)
    assert world.report.as_dict()["pins_pending"] == 1
    world.stop()


def test_the_time_for_rehydration_is_a_bound(tmp_path):
    warm(tmp_path, 0)
    world = World(tmp_path, deadline_s=-1.0)
    assert world.report.num_blocks == 0
    assert world.cache.num_free == 64
    world.cache.check_invariants()
    world.stop()


def test_two_daemons_on_one_state_are_refused_by_name(tmp_path):
    import os

    world = World(tmp_path)
    with pytest.raises(StateLockedError, match=str(os.getpid())):
        World(tmp_path)
    world.stop()
    World(tmp_path).stop()


def test_the_governor_holds_copies_back_while_requests_wait(tmp_path):
    world = World(tmp_path, checkpoint_pause_queue_depth=2)
    world.storage.set_queue_depth(3)
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: world.storage.status()["waiting_blocks"] == 5 and world.storage.status()["governor"] == "queue")
    for _ in range(20):
        world.tick()
    assert world.storage.stats()["checkpoint_copied_bytes"] == 0
    assert world.storage.status()["governor"] == "queue"
    world.until(lambda: world.storage.idle_delay_s() > 0.1)  # as soon as the planner has done what it had begun
    world.storage.set_queue_depth(2)
    world.until(lambda: world.storage.status()["blocks"] == 5)
    world.stop()


def test_somebody_who_waits_for_a_checkpoint_is_not_held_back(tmp_path):
    world = World(tmp_path, checkpoint_pause_queue_depth=2)
    world.storage.set_queue_depth(100)
    for _ in range(2):
        world.ask(prompt(0, 81))
    assert world.checkpoint().num_blocks == 5
    world.stop()


def test_a_block_evicted_and_refilled_before_its_copy_is_not_written_under_the_old_name(tmp_path):
    world = World(tmp_path, num_blocks=8, checkpoint_pause_queue_depth=1)
    world.storage.set_queue_depth(2)
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: world.storage.stats()["blocks_under_way"] == 5)
    for number in range(1, 4):  # the pool is small: the wanted blocks are evicted, their rows hold other prompts now
        world.ask(prompt(number, 113))
    world.storage.set_queue_depth(0)
    world.until(lambda: world.storage.stats()["blocks_under_way"] == 0)
    world.stop()
    report = check_store(tmp_path)
    assert report["ok"], report
    world = World(tmp_path)
    world.ask(prompt(0, 81))  # asserts the bytes of every block it hits
    for number in range(1, 4):
        world.ask(prompt(number, 113))
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


def test_a_failing_executor_ends_checkpoints_with_an_error_and_persists_nothing_of_it(tmp_path):
    world = World(tmp_path)
    world.runner.fail_reads = True
    for _ in range(2):
        world.ask(prompt(0, 81))
    done = world.checkpoint()
    assert "could not copy" in done.error or done.num_blocks == 0
    world.stop(clean=False)
    assert check_store(tmp_path)["blocks"] == 0


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


def test_two_starts_that_died_set_the_store_aside_and_three_leave_the_pins_too(tmp_path):
    world = World(tmp_path)
    world.pin("system", prompt(9, 64))
    world.stop()
    reports = []
    for _ in range(4):
        world = World(tmp_path)
        reports.append(world.report)
        crash(world)
    assert [report.failed_starts for report in reports] == [0, 1, 2, 3]
    assert [report.num_blocks for report in reports] == [4, 4, 0, 0]
    assert [report.recompute_pins for report in reports] == [True, True, True, False]
    world = World(tmp_path)
    assert "system" in world.storage.recipe_book.recipes()
    world.stop()
    world = World(tmp_path)
    assert world.report.failed_starts == 0
    world.stop()


@pytest.mark.parametrize("served", [False, True])
def test_a_start_counts_as_good_ten_seconds_after_ready_or_when_it_has_served(tmp_path, monkeypatch, served):
    assert persistence.STABLE_AFTER_S == 10.0
    monkeypatch.setattr(persistence, "STABLE_AFTER_S", 1000.0 if served else 0.0)
    world = World(tmp_path)
    world.storage.mark_ready()
    if served:
        assert (tmp_path / "starting").exists()
        world.storage.mark_served()
    end = time.monotonic() + 60
    while (tmp_path / "starting").exists():
        assert time.monotonic() < end
        time.sleep(0.001)
    crash(world)
    world = World(tmp_path)
    assert world.report.failed_starts == 0
    world.stop()


def test_a_start_that_ends_in_order_but_not_well_leaves_the_count_as_it_found_it(tmp_path):
    world = World(tmp_path)
    world.stop(clean=False)
    assert not (tmp_path / "starting").exists()
    for _ in range(2):
        crash(World(tmp_path))
    for _ in range(3):
        world = World(tmp_path)
        assert world.report.failed_starts == 2
        world.stop(clean=False)
    world = World(tmp_path)
    world.storage.mark_served()
    end = time.monotonic() + 60
    while (tmp_path / "starting").exists():
        assert time.monotonic() < end
        time.sleep(0.001)
    world.stop(clean=False)
    assert not (tmp_path / "starting").exists(), "a good start stays good, whatever its end"


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


def test_without_persistence_only_the_recipes_are_kept(tmp_path):
    world = World(tmp_path, persist=False)
    for _ in range(2):
        world.ask(prompt(0, 81))
    assert "persist" in world.checkpoint().error
    assert world.pin("a", prompt(1, 64)) == "recipe"
    world.stop()
    assert not (tmp_path / "kv").exists()
    world = World(tmp_path, persist=False)
    assert world.report.pins_pending == ("a",)
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


def test_an_unpinned_recipe_is_gone_and_its_blocks_are_no_longer_first(tmp_path):
    world = World(tmp_path)
    world.pin("a", prompt(1, 64))
    world.storage.recipe_book.remove(b"gone", "a")
    assert not world.wait_for(b"gone").error
    world.cache.unpin("a")
    world.tick()
    assert not world.checkpoint().error
    world.stop()
    assert [entry for entry in dump_store(tmp_path) if entry["kind"] in {"recipe", "pin"}] == []


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


def test_a_row_of_the_harness_is_a_function_of_its_block():
    assert row_of(b"a") != row_of(b"b")


def test_a_recipe_of_another_tokenizer_does_not_disturb(tmp_path):
    world = World(tmp_path)
    world.storage.recipe_book.put(b"1", Recipe(name="odd", token_ids=b"\1\2\3", tokenizer_digest=b"x"))
    assert not world.wait_for(b"1").error
    world.stop()
    world = World(tmp_path)
    assert world.report.pins_pending == ()
    world.stop()


def test_steps_go_on_and_leased_blocks_stay_while_a_copy_hangs(tmp_path):
    world = World(tmp_path, num_blocks=16, checkpoint_bytes_per_step=3 * ROW_BYTES)
    world.runner.gate.clear()
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: world.storage._running.copy_out._copies)
    for number in range(1, 9):  # far more than the pool holds: everything that is not leased is evicted
        world.ask(prompt(number, 113))
    leased = world.storage._running.copy_out._copies[0].wanted
    assert len(leased) == 3
    for each in leased:
        assert bytes(world.runner.row(each.block_id)) == row_of(each.block_hash)
    world.runner.gate.set()
    world.until(lambda: world.storage.stats()["blocks_under_way"] == 0 and world.storage.status()["blocks"] >= 3)
    world.stop()
    assert check_store(tmp_path)["ok"]


def test_events_beyond_the_bound_are_dropped_and_counted_and_a_pin_of_them_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "MAX_WAITING_EVENTS", -1)
    world = World(tmp_path)
    assert world.pin("system", prompt(9, 64)) == "recipe"
    assert world.storage.stats()["lost_events"] > 0
    assert world.storage.status()["nodes"] == 0
    world.stop()


def test_pins_above_the_disk_budget_are_kept_as_recipes_alone(tmp_path):
    world = World(tmp_path, store_max_bytes=8 << 20, num_blocks=300, row_bytes=100_000)
    assert world.pin("fits", prompt(1, 320)) == "recipe+bytes"
    assert world.pin("too-much", prompt(2, 640)) == "recipe"
    assert world.storage.status()["degraded"] is False
    world.stop()
    world = World(tmp_path, store_max_bytes=8 << 20, num_blocks=300, row_bytes=100_000)
    assert world.report.pins_pending == ("too-much",)
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


def test_the_lock_file_has_its_blocks_before_it_is_mapped(tmp_path):
    world = World(tmp_path)
    found = (tmp_path / "kv" / "1" / "lock.mdb").stat()
    assert found.st_blocks * 512 >= found.st_size == 8192
    world.stop()


def test_two_groups_are_kept_together_or_not_at_all(tmp_path):
    warm(tmp_path, 0)
    store = Store(tmp_path / "kv" / "1", 1 << 24)
    keys = list(store.block_keys())
    txn = store.begin()
    for key in keys:
        txn.put_block("draft", key[-32:], memoryview(bytes(schema.value_bytes(10))))
    txn.commit()
    store.close()
    world = World(tmp_path)  # there is no draft model now: its rows are removed, the target's used
    assert world.report.num_blocks == 5
    world.stop()
    assert {entry["group"] for entry in dump_store(tmp_path) if entry["kind"] == "block"} == {"target"}
