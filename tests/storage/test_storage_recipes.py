"""Recipes: acknowledged means on disk, and one damaged generation costs nothing that the other holds."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from crc32c import crc32c

from kvd.commands import Recipe
from kvd.observe import failpoints
from kvd.storage import recipes as module
from kvd.storage.errors import RecipesUnreadableError, UnknownFormatError
from kvd.storage.recipes import RecipeFileError, RecipeStore, decode_recipes, encode_recipes, list_recipe_files, read_recipes


class Inbox:
    def __init__(self) -> None:
        self.commands = []

    def put_internal(self, command) -> None:
        self.commands.append(command)


class Log:
    def __init__(self) -> None:
        self.errors = []

    def info(self, event, **fields):
        pass

    warning = info

    def error(self, event, **fields):
        self.errors.append((event, fields))


def recipe(name: str, **changes) -> Recipe:
    return Recipe(name=name, token_ids=b"\1\0\0\0" * 20, tokenizer_digest=b"d" * 32, **changes)


def write(state_dir: Path, *names: str, remove: tuple[str, ...] = ()) -> list:
    inbox = Inbox()
    store = RecipeStore(state_dir, inbox=inbox, log=Log())
    for name in names:
        store.put(name.encode(), recipe(name))
        while not any(command.op_id == name.encode() for command in inbox.commands):
            pass
    for name in remove:
        store.remove(b"rm-" + name.encode(), name)
    assert store.close(10)
    return inbox.commands


def test_what_is_acknowledged_is_there_after_a_restart(tmp_path):
    commands = write(tmp_path, "a", "b", "c", remove=("b",))
    assert [(command.op_id, command.error) for command in commands] == [(b"a", ""), (b"b", ""), (b"c", ""), (b"rm-b", "")]
    assert read_recipes(tmp_path).recipes == {"a": recipe("a"), "c": recipe("c")}


def test_all_fields_come_back(tmp_path):
    full = recipe("x", messages=[{"role": "system", "content": "é"}], tenant_salt=b"s", adapter=b"a", priority=9, created_unix_s=1.5)
    assert decode_recipes(encode_recipes(7, {"x": full})) == (7, {"x": full})


def test_two_generations_are_kept(tmp_path):
    write(tmp_path, "a", "b", "c")
    assert [generation for generation, _ in list_recipe_files(tmp_path)] == [3, 2]


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "renamed"])
def test_a_damaged_newest_generation_falls_back_to_the_one_before(tmp_path, damage):
    write(tmp_path, "a", "b")
    newest = list_recipe_files(tmp_path)[0][1]
    data = newest.read_bytes()
    if damage == "renamed":
        newest.rename(newest.with_name("recipes.9"))
    else:
        newest.write_bytes({"cut": data[:-1], "empty": b"", "flip": data[:30] + bytes([data[30] ^ 1]) + data[31:]}[damage])
    log = Log()
    store = RecipeStore(tmp_path, inbox=Inbox(), log=log)
    assert list(store.recipes()) == ["a"]
    assert log.errors[0][0] == "recipes.damaged"
    store.put(b"op", recipe("z"))
    assert store.close(10)
    found = read_recipes(tmp_path)
    assert list(found.recipes) == ["a", "z"]
    assert found.damaged == ()


def test_without_a_readable_generation_the_start_is_refused(tmp_path):
    write(tmp_path, "a", "b")
    for _, path in list_recipe_files(tmp_path):
        path.write_bytes(b"x" * 100)
    with pytest.raises(RecipesUnreadableError, match="no generation"):
        RecipeStore(tmp_path, inbox=Inbox(), log=Log())


def test_every_cut_and_every_flipped_bit_of_a_file_is_seen():
    data = encode_recipes(3, {"a": recipe("a")})
    for length in range(len(data)):
        with pytest.raises(RecipeFileError):
            decode_recipes(data[:length])
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecipeFileError):
            decode_recipes(bytes(damaged))


def test_an_unknown_format_is_refused(tmp_path):
    data = bytearray(encode_recipes(1, {}))
    data[8:12] = struct.pack("<I", 2)
    data[-4:] = struct.pack("<I", crc32c(bytes(data[:-4])))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "recipes.1").write_bytes(bytes(data))
    with pytest.raises(UnknownFormatError, match="format 2"):
        read_recipes(tmp_path)


@pytest.mark.parametrize("point", ["recipes.before_sync", "recipes.before_rename"])
def test_a_failed_write_is_reported_and_leaves_what_was_durable(tmp_path, monkeypatch, point):
    write(tmp_path, "a")
    monkeypatch.setattr(failpoints, "_armed", failpoints._parse(f"{point}=raise"))
    inbox = Inbox()
    store = RecipeStore(tmp_path, inbox=inbox, log=Log())
    store.put(b"b", recipe("b"))
    while not inbox.commands:
        pass
    assert inbox.commands[0].error
    assert list(store.recipes()) == ["a"]
    store.put(b"c", recipe("c"))
    assert store.close(10)
    assert inbox.commands[1].error == ""
    assert list(read_recipes(tmp_path).recipes) == ["a", "c"]


def test_changes_that_wait_share_one_write_and_show_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(failpoints, "_armed", failpoints._parse("recipes.before_sync=sleep:0.05"))
    inbox = Inbox()
    store = RecipeStore(tmp_path, inbox=inbox, log=Log())
    for index in range(20):
        store.put(b"%d" % index, recipe(f"r{index}"))
    assert len(store.recipes()) == 20
    assert store.close(10)
    assert len(inbox.commands) == 20
    assert store.generation < 5
    assert len(read_recipes(tmp_path).recipes) == 20


def test_the_number_of_recipes_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_RECIPES", 2)
    commands = write(tmp_path, "a", "b", "c")
    assert [bool(command.error) for command in commands] == [False, False, True]
