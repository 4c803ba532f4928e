"""Forgetting on a disk that refuses: it is not told as done before it is, it is tried again until it is, and the store begins anew where it can't be copied."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from forget_world import (
    ACME,
    ACME_SALTED,
    KEPT,
    OTHERS,
    OWN,
    OWN_ROWS,
    PREFIX,
    SALTED,
    SECRET,
    TEXT,
    WHOLE,
    clutter,
    forget,
    found_in,
    live,
    needles,
)
from storage_harness import World, crash, prompt

from kvd.cache.tenants import Selection
from kvd.commands import Recipe
from kvd.storage import forgetting as forget_module
from kvd.storage import recipes as recipes_module
from kvd.storage import store_thread as store_module
from kvd.storage.errors import StoreDamagedError, StoreFullError, StoreMapFullError
from kvd.storage.forget_intent import INTENT_NAME, Mark, write_intent
from kvd.storage.recipes import read_recipes
from kvd.storage.store import Store
from kvd.storage.two_copies import TwoCopies

pytestmark = pytest.mark.store


def test_without_room_for_a_copy_the_store_begins_anew_from_memory(tmp_path, monkeypatch):
    world = World(tmp_path)
    live(world)
    generations = world.storage._running.recovered.generations
    monkeypatch.setattr(generations, "_map_bytes", 4096)
    monkeypatch.setattr(generations, "_max_aside_bytes", 0)
    before = generations.current.generation
    generations_map = world.storage._running.budget.map_bytes
    original = generations.replaced_by_empty

    def replaced(old, now):
        monkeypatch.setattr(generations, "_map_bytes", generations_map)
        return original(old, now)

    monkeypatch.setattr(generations, "replaced_by_empty", replaced)
    assert forget(world, WHOLE).error == ""
    assert generations.current.generation > before
    assert found_in(tmp_path, OWN | OWN_ROWS) == set()
    world.until(lambda: world.storage.status()["blocks"] >= 6)
    world.stop()
    again = World(tmp_path)
    assert again.ask(KEPT, OTHERS) == 96
    assert again.num_restored == 96
    again.stop()


def test_a_disk_that_fails_is_told_and_the_next_forget_does_both(tmp_path, monkeypatch):
    world = World(tmp_path)
    live(world)
    book = world.storage.recipe_book
    monkeypatch.setattr(book, "forget", lambda takes: "the disk is on fire")
    assert "on fire" in forget(world, PREFIX).error
    assert (tmp_path / INTENT_NAME).exists()
    monkeypatch.undo()
    assert forget(world, Selection("acme", ACME_SALTED.tenant_salt), b"second").error == ""
    assert found_in(tmp_path, OWN | needles(ACME_SALTED, SALTED)) == set()
    assert not (tmp_path / INTENT_NAME).exists()
    world.stop()


def test_a_forget_that_failed_is_tried_again_and_would_take_a_pin_until_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(forget_module, "_RETRY_MIN_S", 0.05)
    monkeypatch.setattr(forget_module, "_RETRY_MAX_S", 0.1)
    world = World(tmp_path)
    live(world)
    storage, book = world.storage, world.storage.recipe_book
    own, other = (Recipe(name="new", token_ids=SECRET, tokenizer_digest=b"", tenant_salt=each.tenant_salt) for each in (ACME, OTHERS))
    assert not storage.is_forgetting(own)
    with monkeypatch.context() as patched:
        patched.setattr(book, "forget", lambda takes: "the disk is on fire")
        assert "on fire" in forget(world, PREFIX).error
        assert "on fire" in forget(world, PREFIX, b"again").error
        assert len(storage._forgetting.unfinished) == 1, "the same once more is no other"
        assert (storage.is_forgetting(own), storage.is_forgetting(other)) == (True, False)
    world.until(lambda: not (tmp_path / INTENT_NAME).exists(), 30)
    world.until(lambda: not storage.is_forgetting(own))
    assert found_in(tmp_path, OWN) == set()
    assert len(world.log.named("forget.failed")) == 1
    world.stop()


def test_a_forget_whose_intent_could_not_even_be_written_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(forget_module, "_RETRY_MIN_S", 0.05)
    monkeypatch.setattr(forget_module, "_RETRY_MAX_S", 0.1)
    world = World(tmp_path)
    live(world)
    real, tries = forget_module.write_intent, []

    def full_disk(state_dir, marks, *codec):
        tries.append(list(marks))
        if len(tries) <= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(state_dir, marks, *codec)

    monkeypatch.setattr(forget_module, "write_intent", full_disk)
    assert forget(world, PREFIX).error.startswith("enospc: the disk is full")
    world.until(lambda: not world.storage._forgetting.unfinished, 30)
    assert len(tries) == 5
    assert tries[0] == tries[3] != tries[4] == [], "it is written down before anything is done"
    assert found_in(tmp_path, OWN) == set()
    assert not (tmp_path / INTENT_NAME).exists()
    world.stop()


@pytest.mark.parametrize("kind", ["full", "broken"])
def test_a_copy_that_fails_leaves_the_store_or_begins_anew(tmp_path, monkeypatch, kind):
    world = World(tmp_path)
    live(world)
    monkeypatch.setattr(store_module, "_RETRY_MIN_S", 0.01)
    error = StoreFullError("no room") if kind == "full" else StoreDamagedError("EIO")

    def fail(*_):
        raise error

    monkeypatch.setattr(Store, "copy_rows", fail)
    done = forget(world, WHOLE)
    assert (done.error == "") == (kind == "full"), "a full disk begins anew, a broken one is told"
    monkeypatch.undo()
    world.until(lambda: not world.storage._running.planner.degraded_reason, timeout_s=30)
    if kind == "broken":
        assert forget(world, WHOLE, b"again").error == ""
    assert found_in(tmp_path, OWN | OWN_ROWS) == set()
    world.until(lambda: world.storage.status()["blocks"] >= 6)
    world.stop()
    again = World(tmp_path)
    assert again.ask(KEPT, OTHERS) == 96
    assert again.num_restored == 96
    again.stop()


def test_a_disk_that_is_too_full_for_a_folder_costs_the_forget_not_the_store(tmp_path, monkeypatch):
    world = World(tmp_path)
    live(world)
    monkeypatch.setattr(store_module, "_RETRY_MIN_S", 0.01)
    generations = world.storage._running.recovered.generations
    before = generations.current.generation

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generations, "_created", fail)
    assert forget(world, WHOLE).error.startswith("enospc")
    monkeypatch.undo()
    world.until(lambda: world.log.named("storage.resumed") and not world.storage._running.planner.degraded_reason, timeout_s=30)
    assert [entry["generation_lost"] for entry in world.log.named("storage.degraded")] == [False]
    assert generations.current.generation == before
    assert world.storage.status()["blocks"] >= 6
    assert forget(world, WHOLE, b"again").error == ""
    assert found_in(tmp_path, OWN | OWN_ROWS) == set()
    world.stop()


def test_a_store_that_can_not_be_written_gives_way_to_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_RETRY_MIN_S", 1000.0)  # it does so by the forget, and not by itself before
    world = World(tmp_path)
    live(world)
    before = world.storage._running.recovered.generations.current.generation
    begin = Store.begin

    def fail(store):
        if store.meta.generation == before:
            raise StoreMapFullError("map_full")
        return begin(store)

    monkeypatch.setattr(Store, "begin", fail)
    for _ in range(2):
        world.ask(prompt(11, 97), OTHERS)
    assert world.checkpoint().error
    assert forget(world, WHOLE).error == ""
    assert world.storage._running.recovered.generations.current.generation > before
    assert found_in(tmp_path, OWN | OWN_ROWS) == set()
    assert not world.checkpoint().error
    world.stop()
    again = World(tmp_path)
    assert again.ask(KEPT, OTHERS) == 96
    assert again.num_restored == 96
    again.stop()


@pytest.mark.parametrize("may_be_emptied", [True, False])
def test_it_is_not_told_as_done_while_an_old_file_holds_it(tmp_path, monkeypatch, may_be_emptied):
    world = World(tmp_path)
    live(world)
    clutter(tmp_path)
    with monkeypatch.context() as patched:
        unlink, open_file = os.unlink, os.open

        def no_unlink(path, *args, **kwargs):
            if Path(os.fsdecode(path)).name in {"data.mdb", "0000000000000001.wal"} and "wal/" not in os.fsdecode(path):
                raise OSError(errno.EIO, "Input/output error")
            unlink(path, *args, **kwargs)

        def no_truncate(path, flags, *args, **kwargs):
            if flags & os.O_TRUNC:
                raise OSError(errno.EIO, "Input/output error")
            return open_file(path, flags, *args, **kwargs)

        patched.setattr(os, "unlink", no_unlink)
        if not may_be_emptied:
            patched.setattr(os, "open", no_truncate)
        done = forget(world, WHOLE)
        assert (done.error == "") == may_be_emptied
        assert (tmp_path / INTENT_NAME).exists() != may_be_emptied
        assert bool(found_in(tmp_path, OWN | OWN_ROWS)) != may_be_emptied
    assert forget(world, WHOLE, b"again").error == ""
    assert found_in(tmp_path, OWN | OWN_ROWS) == set()
    world.stop()


def test_a_start_on_a_disk_that_takes_no_recipes_serves_nothing_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(forget_module, "_RETRY_MIN_S", 0.05)
    world = World(tmp_path)
    live(world)
    crash(world)
    write_intent(tmp_path, [Mark("acme")])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(TwoCopies, "write", full)
        world = World(tmp_path)
        assert list(world.storage.recipe_book.recipes()) == ["rules"]
        assert world.cache.match(SECRET, ACME).num_tokens == 0
        assert (tmp_path / INTENT_NAME).exists()
    world.until(lambda: not (tmp_path / INTENT_NAME).exists(), timeout_s=30)
    assert found_in(tmp_path, OWN | OWN_ROWS) == set()
    world.stop()


def test_what_a_pin_was_replaced_for_in_vain_is_forgotten_too(tmp_path, monkeypatch):
    world = World(tmp_path)
    live(world)
    book = world.storage.recipe_book

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(TwoCopies, "write", full)
        with book._wake:  # both in one write
            book.put(b"put", Recipe(name="acme/safe", token_ids=KEPT, tokenizer_digest=b"", tenant_salt=ACME.tenant_salt))
            book._pending.append(
                recipes_module._Change(b"", "", None, must_sync=True, on_done=print, takes=lambda recipe: recipe.text == TEXT)
            )
        assert world.wait_for(b"put").error
        assert list(book.recipes()) == ["rules"]
    assert book.forget(lambda _: False) == ""
    assert list(read_recipes(tmp_path).value) == ["rules"]
    world.stop()


def test_forgets_that_are_not_done_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(forget_module, "MAX_UNFINISHED", 2)
    world = World(tmp_path)
    live(world)
    with monkeypatch.context() as patched:
        patched.setattr(world.storage.recipe_book, "forget", lambda takes: "the disk is on fire")
        for number, selection in enumerate((PREFIX, Selection("rival"))):
            assert world.storage.may_forget
            assert forget(world, selection, b"%d" % number).error
        assert not world.storage.may_forget
    assert forget(world, PREFIX, b"again").error == ""
    assert world.storage.may_forget
    monkeypatch.setattr(forget_module, "MAX_UNFINISHED_BYTES", 32)
    with monkeypatch.context() as patched:
        patched.setattr(world.storage.recipe_book, "forget", lambda takes: "the disk is on fire")
        assert forget(world, PREFIX, b"long").error
    assert not world.storage.may_forget
    world.stop()
