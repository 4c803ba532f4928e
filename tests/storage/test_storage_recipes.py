"""Recipes: acknowledged means on disk, and one damaged generation costs nothing that the other holds."""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from kvd.cache.tenants import tenant_salt
from kvd.commands import Recipe
from kvd.observe import failpoints
from kvd.storage import recipes as module
from kvd.storage import two_copies
from kvd.storage.errors import RecipesUnreadableError, UnknownFormatError
from kvd.storage.recipes import RecipeFileError, RecipeStore, decode_recipes, encode_recipes, list_recipe_files, read_recipes


class Inbox:
    def __init__(self) -> None:
        self.commands = []

    def put_internal(self, command) -> None:
        self.commands.append(command)

    def find(self, op_id: bytes):
        return next((command for command in list(self.commands) if command.op_id == op_id), None)


class Log:
    def __init__(self) -> None:
        self.errors = []

    def info(self, event, **fields):
        pass

    warning = info

    def error(self, event, **fields):
        self.errors.append((event, fields))


def recipe(name: str, **changes) -> Recipe:
    fields = {"token_ids": b"\1\0\0\0" * 20, "tokenizer_digest": b"d" * 32} | changes
    return Recipe(name=name, **fields)


def write(state_dir: Path, *names: str, remove: tuple[str, ...] = ()) -> list:
    inbox = Inbox()
    store = RecipeStore(state_dir, inbox=inbox, log=Log())
    for name in names:
        store.put(name.encode(), recipe(name))
        while not any(command.op_id == name.encode() for command in inbox.commands):
            pass
    for name in remove:
        store.remove(b"rm-" + name.encode(), name)
    assert store.close(60)
    return inbox.commands


def test_what_is_acknowledged_is_there_after_a_restart(tmp_path):
    commands = write(tmp_path, "a", "b", "c", remove=("b",))
    assert [(command.op_id, command.error) for command in commands] == [(b"a", ""), (b"b", ""), (b"c", ""), (b"rm-b", "")]
    assert read_recipes(tmp_path).value == {"a": recipe("a"), "c": recipe("c")}


def test_all_fields_come_back(tmp_path):
    full = recipe("x", messages=[{"role": "system", "content": "é"}], tenant_salt=b"s", adapter=b"a", priority=9, created_unix_s=1.5)
    assert decode_recipes(encode_recipes(7, {"x": full})) == (7, {"x": full})


def test_two_files_hold_what_was_acknowledged(tmp_path):
    for names, remove in [(("a", "b"), ()), ((), ("a",)), (("c",), ())]:
        write(tmp_path, *names, remove=remove)
        contents = [decode_recipes(path.read_bytes()) for _, path in list_recipe_files(tmp_path)]
        assert len(contents) == 2
        assert contents[0][0] == contents[1][0] + 1
        assert contents[0][1] == contents[1][1]
    assert list(contents[0][1]) == ["b", "c"]


def damage_file(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "renamed":
        path.rename(path.with_name("recipes.90"))
        return
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage == "folder":
        path.mkdir()
        (path / "something").write_bytes(b"x")
    elif damage == "dangling":
        path.symlink_to("no-such-folder/file")
    elif damage == "unreadable content":
        payload = b"\x91\x81\xa4name" + b"\x91" * 5000 + b"\x01"
        body = data[:12] + struct.pack("<QQ", int(path.suffix[1:]), len(payload)) + payload
        path.write_bytes(body + struct.pack("<I", crc32c(body)))
    elif damage != "missing":
        path.write_bytes({"cut": data[:-1], "empty": b"", "flip": data[:30] + bytes([data[30] ^ 1]) + data[31:]}[damage])


DAMAGE = ["cut", "empty", "flip", "renamed", "fifo", "folder", "dangling", "unreadable content", "missing"]


@pytest.mark.parametrize("which", [0, 1], ids=["newest", "older"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damaged_file_costs_no_pin_and_brings_none_back(tmp_path, damage, which):
    write(tmp_path, "a", "gone", "b", remove=("gone",))
    damage_file(list_recipe_files(tmp_path)[which][1], damage)
    log = Log()
    store = RecipeStore(tmp_path, inbox=Inbox(), log=log)
    assert list(store.recipes()) == ["a", "b"]
    assert store.fault == ""
    assert store.close(60)
    if damage == "missing":
        assert (log.errors, store.notes) == ([], ())
    else:
        assert log.errors[0][0] == "recipes.damaged"
        assert len(store.notes) == 1
        assert len(list((tmp_path / "quarantine").iterdir())) == 1
    found = read_recipes(tmp_path)
    assert (found.is_settled, found.damaged, list(found.value)) == (True, (), ["a", "b"])
    assert len(list((tmp_path / "recipes").iterdir())) == 2
    again = RecipeStore(tmp_path, inbox=Inbox(), log=log)
    again.close(10)
    assert (again.notes, again.generation) == ((), store.generation)


@pytest.mark.parametrize("shape", ["one file", "an older state beside it"])
def test_files_as_an_earlier_write_left_them_become_two_alike(tmp_path, shape):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "recipes.7").write_bytes(encode_recipes(7, {"a": recipe("a")}))
    if shape != "one file":
        (tmp_path / "recipes" / "recipes.6").write_bytes(encode_recipes(6, {}))
    store = RecipeStore(tmp_path, inbox=Inbox(), log=Log())
    store.close(10)
    assert (list(store.recipes()), store.notes) == (["a"], ())
    assert [decode_recipes(path.read_bytes()) for _, path in list_recipe_files(tmp_path)] == [
        (9, {"a": recipe("a")}),
        (8, {"a": recipe("a")}),
    ]


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


@pytest.mark.parametrize(
    "point", [f"recipes.{copy}{place}" for copy in ("", "copy.") for place in ("before_sync", "before_rename", "after_rename")]
)
def test_a_failed_write_is_reported_and_leaves_what_was_durable(tmp_path, monkeypatch, point):
    write(tmp_path, "a")
    monkeypatch.setattr(failpoints, "_armed", failpoints._parse(f"{point}=raise"))
    inbox = Inbox()
    store = RecipeStore(tmp_path, inbox=inbox, log=Log())
    store.put(b"b", recipe("b"))
    while not inbox.commands:
        pass
    assert inbox.commands[0].error.startswith("eio: the disk fails")
    assert list(store.recipes()) == ["a"]
    found = read_recipes(tmp_path)
    assert (list(found.value), found.is_settled) == (["a"], True)
    assert store.fault.startswith("eio: the disk fails")
    store.put(b"c", recipe("c"))
    assert store.close(60)
    assert inbox.commands[1].error == ""
    assert store.fault == ""
    assert list(read_recipes(tmp_path).value) == ["a", "c"]


def test_a_disk_that_takes_no_recipes_is_reported_once_and_once_when_it_does_again(tmp_path, monkeypatch):
    class Kept(Log):
        def __init__(self) -> None:
            self.events: list[str] = []

        def info(self, event, **_):
            self.events.append(event)

        error = warning = info

    full = {"yes": True}
    real = two_copies.replace_file

    def replace_file(*arguments, **options) -> None:
        if full["yes"]:
            raise OSError(28, "No space left on device")
        real(*arguments, **options)

    monkeypatch.setattr(two_copies, "replace_file", replace_file)
    monkeypatch.setattr(module, "_RETRY_S", 0.001)
    inbox, log = Inbox(), Kept()
    store = RecipeStore(tmp_path, inbox=inbox, log=log)
    for name in ("a", "b", "c"):
        store.put(name.encode(), recipe(name))
        while not inbox.find(name.encode()):
            time.sleep(0.001)
        assert inbox.find(name.encode()).error.startswith("enospc: the disk is full")
    time.sleep(0.05)
    assert store.fault.startswith("enospc: the disk is full")
    assert log.events == ["recipes.failed"]
    full["yes"] = False
    end = time.monotonic() + 30
    while store.fault:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert log.events == ["recipes.failed", "recipes.resumed"]
    assert store.close(60)
    assert read_recipes(tmp_path).value == {}


def test_a_pin_that_would_make_the_recipes_too_large_is_refused_and_smaller_ones_are_not(tmp_path):
    inbox = Inbox()
    store = RecipeStore(tmp_path, inbox=inbox, log=Log(), max_bytes=6000)
    for name, num_tokens in (("a", 800), ("large", 1200), ("b", 200), ("a", 900), ("a", 700)):
        store.put(f"{name}{num_tokens}".encode(), recipe(name, token_ids=bytes(4 * num_tokens)))
    assert store.close(60)
    errors = {command.op_id: command.error for command in inbox.commands}
    assert "store_max_bytes leaves them 6000" in errors.pop(b"large1200")
    assert set(errors.values()) == {""}
    assert sorted(read_recipes(tmp_path).value) == ["a", "b"]
    assert max(path.stat().st_size for path in (tmp_path / "recipes").iterdir()) <= store.file_bytes <= 6000
    # a smaller budget costs no pin, and lets one become smaller
    store = RecipeStore(tmp_path, inbox=inbox, log=Log(), max_bytes=100)
    store.put(b"smaller", recipe("a", token_ids=bytes(2400)))
    store.put(b"another", recipe("c", token_ids=bytes(64)))
    assert store.close(60)
    assert not inbox.find(b"smaller").error
    assert inbox.find(b"another").error
    assert sorted(read_recipes(tmp_path).value) == ["a", "b"]


def test_old_files_that_stay_do_not_fail_a_change(tmp_path, monkeypatch):
    write(tmp_path, "a")
    monkeypatch.setattr(failpoints, "_armed", failpoints._parse("recipes.before_unlink=raise"))
    commands = write(tmp_path, "b", remove=("a",))
    assert [command.error for command in commands] == ["", ""]
    assert list(read_recipes(tmp_path).value) == ["b"]
    assert read_recipes(tmp_path).is_settled


def test_a_file_that_can_not_be_restored_at_a_start_is_restored_later(tmp_path, monkeypatch):
    write(tmp_path, "a", "b")
    damage_file(list_recipe_files(tmp_path)[0][1], "flip")
    monkeypatch.setattr(failpoints, "_armed", failpoints._parse("recipes.before_sync=raise"))
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    store = RecipeStore(tmp_path, inbox=Inbox(), log=Log())
    assert list(store.recipes()) == ["a", "b"]
    end = time.monotonic() + 30
    while store.fault:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert store.close(60)
    found = read_recipes(tmp_path)
    assert (list(found.value), found.is_settled) == (["a", "b"], True)


def nested(levels: int) -> list:
    value: list = [1]
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    "bad",
    [
        {"messages": [{"role": "system", "tool": nested(150)}]},
        {"messages": [{"role": "system", "tool": nested(980)}]},
        {"template_args": {"x": nested(100_000)}},
        {"template_args": {"x": 1 << 80}},
        {"template_args": {"x": "\ud800"}},
        {"messages": [{1: 2}]},
    ],
    ids=["deep", "deeper than a decoder goes", "deeper than an encoder goes", "huge number", "no text", "keys of no text"],
)
def test_what_can_not_be_kept_fails_its_own_change_alone(tmp_path, monkeypatch, bad):
    monkeypatch.setattr(failpoints, "_armed", failpoints._parse("recipes.before_sync=sleep:0.05"))
    inbox = Inbox()
    store = RecipeStore(tmp_path, inbox=inbox, log=Log())
    store.put(b"a", recipe("a"))
    store.put(b"bad", recipe("bad", **bad))
    store.put(b"b", recipe("b", messages=[{"role": "system", "tool": nested(50)}]))
    assert store.close(60)
    errors = {command.op_id: command.error for command in inbox.commands}
    assert errors.pop(b"bad")
    assert errors == {b"a": "", b"b": ""}
    assert list(read_recipes(tmp_path).value) == list(store.recipes()) == ["a", "b"]


def test_an_unexpected_failure_answers_its_changes_and_the_next_go_on(tmp_path, monkeypatch):
    real, calls = module.encode_recipes, []

    def fails_once(generation: int, recipes: dict, *rest) -> bytes:
        calls.append(generation)
        if len(calls) == 1:
            raise MemoryError
        return real(generation, recipes, *rest)

    monkeypatch.setattr(module, "encode_recipes", fails_once)
    commands = write(tmp_path, "a", "b")
    assert [command.error for command in commands] == ["MemoryError()", ""]
    assert list(read_recipes(tmp_path).value) == ["b"]


@pytest.mark.parametrize("kind", ["file", "dangling"])
def test_recipes_that_can_not_be_listed_refuse_the_start(tmp_path, kind):
    path = tmp_path / "recipes"
    path.write_bytes(b"") if kind == "file" else path.symlink_to("no-such-folder/folder")
    with pytest.raises(RecipesUnreadableError, match="can't be listed"):
        RecipeStore(tmp_path, inbox=Inbox(), log=Log())


def test_changes_that_wait_share_one_write_and_show_at_once(tmp_path, monkeypatch):
    is_under_way, may_end, real = threading.Event(), threading.Event(), two_copies.replace_file

    def replace_file(*arguments, **options) -> None:
        is_under_way.set()
        assert may_end.wait(60)
        real(*arguments, **options)

    monkeypatch.setattr(two_copies, "replace_file", replace_file)
    inbox = Inbox()
    store = RecipeStore(tmp_path, inbox=inbox, log=Log())
    store.put(b"0", recipe("r0"))
    assert is_under_way.wait(60)
    for index in range(1, 20):
        store.put(b"%d" % index, recipe(f"r{index}"))
    assert len(store.recipes()) == 20
    may_end.set()
    assert store.close(60)
    assert len(inbox.commands) == 20
    assert store.generation == 2 * two_copies.COPIES
    assert len(read_recipes(tmp_path).value) == 20


def test_the_number_of_recipes_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_RECIPES", 2)
    commands = write(tmp_path, "a", "b", "c")
    assert [bool(command.error) for command in commands] == [False, False, True]


def written_by_0_1_0(generation: int, *recipes: dict) -> bytes:
    payload = msgspec.msgpack.encode([{"tokenizer_digest": b"d" * 32, "template_args": {}, "adapter": b"", **each} for each in recipes])
    body = struct.pack("<8sIQQ", b"KVDRCP\r\n", 1, generation, len(payload)) + payload
    return body + struct.pack("<I", crc32c(body))


def test_salts_as_0_1_0_kept_them_become_those_that_requests_have(tmp_path):
    """It stated the client's own bytes. No request has such a salt any more, and no forget would find the pin."""
    tokens = b"\1\0\0\0" * 20
    (tmp_path / "recipes").mkdir()
    old = [{"name": "salted", "token_ids": tokens, "tenant_salt": b"night"}, {"name": "plain", "token_ids": tokens, "tenant_salt": b""}]
    for generation in (6, 7):
        (tmp_path / "recipes" / f"recipes.{generation}").write_bytes(written_by_0_1_0(generation, *old))
    expected = {"salted": tenant_salt("", b"night"), "plain": b""}
    for _ in range(2):
        store = RecipeStore(tmp_path, inbox=Inbox(), log=Log())
        assert {name: each.tenant_salt for name, each in store.recipes().items()} == expected
        generation = store.generation
        assert store.close(60)
        found = read_recipes(tmp_path)
        assert {name: each.tenant_salt for name, each in found.value.items()} == expected, "durable before anything is served"
        assert found.is_settled
    assert found.highest == generation == 9, "once"


def test_of_tenants_pins_the_salts_stay(tmp_path):
    inbox = Inbox()
    store = RecipeStore(tmp_path, inbox=inbox, log=Log())
    kept = {"acme/a": tenant_salt("acme", b""), "acme/b": tenant_salt("acme", b"night"), "c": tenant_salt("", b"night"), "d": b""}
    for name, salt in kept.items():
        store.put(name.encode(), recipe(name, tenant_salt=salt))
    assert store.close(60)
    generation = read_recipes(tmp_path).highest
    store = RecipeStore(tmp_path, inbox=inbox, log=Log())
    assert {name: each.tenant_salt for name, each in store.recipes().items()} == kept
    assert store.close(60)
    assert read_recipes(tmp_path).highest == generation, "nothing was written"
