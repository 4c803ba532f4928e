"""Recipes where they may stay unsynced for a while: the file of the newest state, and when it counts."""

from __future__ import annotations

import errno
import os
import struct
import time
from pathlib import Path

import pytest
from crc32c import crc32c
from test_storage_recipes import Inbox, Log, recipe

from kvd.storage import two_copies
from kvd.storage.errors import RecipesUnreadableError, UnknownFormatError
from kvd.storage.recipes import RecipeStore, encode_recipes, list_recipe_files, read_recipes

TIMEOUT_S = 30.0


class Book(RecipeStore):
    """One that stays unsynced until it is closed."""

    def __init__(self, state_dir, **more) -> None:
        self.inbox = Inbox()
        super().__init__(state_dir, inbox=self.inbox, log=Log(), **({"unsynced_max_s": 1000.0} | more))

    def change(self, name: str, *, remove: bool = False, **more) -> str:
        """Pin or unpin ``name``; the error of the answer."""
        self.inbox.commands.clear()
        self.remove(b"op", name, **more) if remove else self.put(b"op", recipe(name))
        until(lambda: self.inbox.find(b"op"))
        return self.inbox.find(b"op").error


def until(condition) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def unsynced(state_dir):
    return state_dir / "recipes" / "recipes.unsynced"


def test_a_change_is_read_without_a_sync_and_the_state_before_stands(tmp_path):
    book = Book(tmp_path)
    assert book.change("a", remove=False) == ""
    assert list_recipe_files(tmp_path) == []
    assert set(read_recipes(tmp_path).value) == {"a"}  # as after SIGKILL
    assert book.close(60)
    assert len(list_recipe_files(tmp_path)) == 2
    assert not unsynced(tmp_path).exists()
    book = Book(tmp_path)
    before = list_recipe_files(tmp_path)
    assert book.change("b") == ""
    assert book.change("a", remove=True) == ""
    assert list_recipe_files(tmp_path) == before
    assert set(read_recipes(tmp_path).value) == {"b"}
    assert book.close(60)
    assert set(read_recipes(tmp_path).value) == {"b"}


def test_a_change_waits_for_no_sync(tmp_path, monkeypatch):
    book = Book(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("synced"))
    assert book.change("a") == ""
    assert book.change("a", remove=True) == ""
    monkeypatch.undo()
    assert book.close(60)
    assert read_recipes(tmp_path).value == {}


def test_changes_are_synced_in_time(tmp_path):
    book = Book(tmp_path, unsynced_max_s=0.05)
    assert book.change("a") == ""
    until(lambda: len(list_recipe_files(tmp_path)) == 2)
    until(lambda: not unsynced(tmp_path).exists())
    assert book.close(60)


def test_a_removal_that_must_last_is_synced_at_once(tmp_path):
    book = Book(tmp_path)
    assert book.change("a") == ""
    assert book.change("a", remove=True, must_sync=True) == ""
    assert len(list_recipe_files(tmp_path)) == 2
    assert not unsynced(tmp_path).exists()
    assert book.close(60)


@pytest.mark.parametrize("content", [b"", b"garbage", "cut", "zeros"])
@pytest.mark.parametrize("has_older", [True, False])
def test_what_a_power_cut_left_of_the_unsynced_file_is_no_damage(tmp_path, content, has_older):
    if has_older:
        book = Book(tmp_path)
        book.change("a")
        book.close(10)
    unsynced(tmp_path).parent.mkdir(exist_ok=True)
    whole = encode_recipes(99, {"b": recipe("b")})
    content = {"cut": whole[:-1], "zeros": whole[:20] + bytes(len(whole) - 20)}.get(content, content)
    unsynced(tmp_path).write_bytes(content)
    book = Book(tmp_path)
    assert book.notes == ()
    assert not book.fault
    assert set(book.recipes()) == ({"a"} if has_older else set())
    book.close(10)
    assert not unsynced(tmp_path).exists()


def test_an_unsynced_file_older_than_the_others_does_not_count(tmp_path):
    book = Book(tmp_path)
    book.change("a")
    kept = unsynced(tmp_path).read_bytes()
    book.change("a", remove=True)
    book.close(10)
    unsynced(tmp_path).write_bytes(kept)
    assert read_recipes(tmp_path).value == {}
    Book(tmp_path).close(10)
    assert read_recipes(tmp_path).value == {}
    assert not unsynced(tmp_path).exists()


def test_the_unsynced_file_serves_where_the_others_are_damaged(tmp_path):
    book = Book(tmp_path)
    book.change("a")
    book.close(10)
    for _, path in list_recipe_files(tmp_path):
        path.write_bytes(b"damaged")
    with pytest.raises(RecipesUnreadableError):
        read_recipes(tmp_path)
    unsynced(tmp_path).write_bytes(encode_recipes(1000, {"a": recipe("a"), "b": recipe("b")}))
    book = Book(tmp_path)
    assert set(book.recipes()) == {"a", "b"}
    assert len(book.notes) == 2
    book.close(10)


def test_an_unsynced_file_of_an_unknown_format_is_refused(tmp_path):
    body = bytearray(encode_recipes(5, {})[:-4])
    body[8] = 77
    unsynced(tmp_path).parent.mkdir()
    unsynced(tmp_path).write_bytes(bytes(body) + struct.pack("<I", crc32c(body)))
    with pytest.raises(UnknownFormatError):
        Book(tmp_path)


def test_while_syncs_fail_nothing_is_acknowledged_unsynced(tmp_path, monkeypatch):
    book = Book(tmp_path, unsynced_max_s=0.02)
    assert book.change("a") == ""
    until(lambda: not unsynced(tmp_path).exists())

    def fails(*_, **__):
        raise OSError(errno.EIO, "as told")

    monkeypatch.setattr(two_copies, "replace_file", fails)
    assert book.change("b") == ""
    until(lambda: book.fault)
    assert "eio" in book.change("c")
    assert set(book.recipes()) == {"a", "b"}
    monkeypatch.undo()
    assert book.change("c") == ""
    assert not book.fault
    assert book.close(60)
    assert set(read_recipes(tmp_path).value) == {"a", "b", "c"}


@pytest.mark.parametrize("name", [".recipes.unsynced.tmp", ".recipes.7.tmp"])
def test_a_file_that_never_got_its_name_goes_at_a_start_and_with_the_next_change(tmp_path, name):
    book = Book(tmp_path)
    assert book.change("a", must_sync=True, remove=True) == ""
    left = tmp_path / "recipes" / name
    left.write_bytes(b"the text of a pin")
    assert book.forget(lambda _: False) == ""
    assert not left.exists()
    assert book.close(60)
    left.write_bytes(b"the text of a pin")
    book = Book(tmp_path)
    assert not left.exists()
    assert book.close(60)


def test_an_unsynced_file_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    book = Book(tmp_path)
    assert book.change("a") == ""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "enospc" in book.change("b")
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "recipes").iterdir() if path.name.startswith(".")] == []
    assert book.close(60)
