"""Storage over its whole life: what was hot comes back byte for byte, to those whose it is, and pins come first."""

from __future__ import annotations

import shutil

import pytest
from storage_harness import BLOCK_TOKENS, ROW_BYTES, World, crash, prompt, row_of, warm

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import tenant_salt
from kvd.commands import Recipe
from kvd.storage import planner, schema
from kvd.storage.store import Store
from kvd.storage.tools import check_store, dump_store

pytestmark = pytest.mark.store


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


def test_events_beyond_the_bound_are_dropped_and_counted_and_a_pin_of_them_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "MAX_WAITING_EVENTS", -1)
    world = World(tmp_path)
    assert world.pin("system", prompt(9, 64)) == "recipe"
    assert world.storage.stats()["lost_events"] > 0
    assert world.storage.status()["nodes"] == 0
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
