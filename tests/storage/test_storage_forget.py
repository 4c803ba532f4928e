"""Forgetting: nothing of it is in any file of the state directory once it is told, whenever the process dies; and what is others' comes back.

Run as a script with a directory, it is what the kill tests kill.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from crc32c import crc32c
from storage_harness import FINGERPRINT, World, chain_of, crash, prompt, row_of

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import Selection, tenant_salt
from kvd.commands import ForgetDone, Recipe
from kvd.observe import failpoints
from kvd.storage import forgetting as forget_module
from kvd.storage import recipes as recipes_module
from kvd.storage import store_thread as store_module
from kvd.storage.errors import StoreDamagedError, StoreFullError, StoreMapFullError, UnknownFormatError
from kvd.storage.forget_intent import INTENT_NAME, Mark, write_intent
from kvd.storage.recipes import read_recipes
from kvd.storage.store import Store
from kvd.storage.tools import check_store
from kvd.storage.two_copies import TwoCopies

pytestmark = pytest.mark.store

ACME = Namespace(FINGERPRINT, tenant_salt("acme", b""))
ACME_SALTED = Namespace(FINGERPRINT, tenant_salt("acme", b"night"))
OTHERS = Namespace(FINGERPRINT)
SECRET = prompt(7, 97, shared=32)
SALTED = prompt(8, 81)
KEPT = prompt(3, 97, shared=32)
TEXT = "the combination of the safe is left, right, left"
WHOLE = Selection("acme")
PREFIX = Selection("acme", ACME.tenant_salt, SECRET[: 4 * 64])


def live(world: World) -> None:
    """The same on both sides: blocks used often enough to be stored, and a pin each."""
    for namespace, token_ids in ((ACME, SECRET), (ACME, KEPT), (ACME_SALTED, SALTED), (OTHERS, KEPT), (OTHERS, SECRET[:128] + KEPT)):
        for _ in range(2):
            world.ask(token_ids, namespace)
    for name, namespace, token_ids, text in (("acme/safe", ACME, SECRET, TEXT), ("rules", OTHERS, KEPT, "the rules of the house")):
        world.cache.pin(name, token_ids, namespace)
        world.tick()
        recipe = Recipe(name=name, token_ids=token_ids, tokenizer_digest=b"", text=text, tenant_salt=namespace.tenant_salt)
        world.storage.recipe_book.put(name.encode(), recipe)
        assert not world.wait_for(name.encode()).error
    assert not world.checkpoint().error


def forget(world: World, selection: Selection, op_id: bytes = b"forget") -> ForgetDone:
    world.tick()
    world.cache.forget(selection)
    world.tick()
    pins = {name: each for name, each in world.storage.recipe_book.recipes().items() if selection.holds(each.tenant_salt, each.token_ids)}
    world.storage.forget(op_id, selection, pins)
    return world.until(lambda: world.inbox.find(op_id), timeout_s=60)


def needles(namespace: Namespace, token_ids: bytes, *, first: int = 0) -> dict[str, bytes]:
    """Token and KV bytes of a prompt's own blocks, and its last block's hash."""
    found = {}
    for index, key in enumerate(chain_of(token_ids, namespace)[first:], first):
        found[f"tokens {index}"] = token_ids[64 * index : 64 * index + 64]
        found[f"row {index}"] = row_of(key)[:200]
    return found


def found_in(state_dir: Path, wanted: dict[str, bytes]) -> set[str]:
    files = [path.read_bytes() for path in state_dir.rglob("*") if path.is_file()]
    return {name for name, needle in wanted.items() if any(needle in data for data in files)}


def clutter(state_dir: Path) -> None:
    """What an earlier misfortune may have left lying about."""
    (state_dir / "quarantine").mkdir(exist_ok=True)
    (state_dir / "quarantine" / "0000000000000001.wal").write_bytes(b"\0" * 100 + SECRET + TEXT.encode())
    aside = state_dir / "kv" / "9.aside"
    aside.mkdir()
    (aside / "data.mdb").write_bytes(SECRET)


OWN = needles(ACME, SECRET, first=2) | {"text": TEXT.encode()}
"""The first two blocks' tokens are in others' prompts too."""
OWN_ROWS = {name: needle for name, needle in needles(ACME, SECRET).items() if name.startswith("row")}


@pytest.mark.parametrize("selection", [WHOLE, PREFIX], ids=["tenant", "prefix"])
def test_nothing_of_it_is_in_any_file(tmp_path, selection):
    world = World(tmp_path)
    live(world)
    clutter(tmp_path)
    before = found_in(tmp_path, OWN | OWN_ROWS)
    assert before == OWN.keys() | OWN_ROWS.keys(), "else finding none afterwards would say nothing"
    done = forget(world, selection)
    assert done.error == ""
    assert done.num_blocks >= 4
    assert found_in(tmp_path, OWN) == set()
    assert not (tmp_path / INTENT_NAME).exists()
    if selection is WHOLE:
        assert found_in(tmp_path, OWN_ROWS | needles(ACME_SALTED, SALTED)) == set()
    assert list(world.storage.recipe_book.recipes()) == ["rules"]
    assert world.ask(KEPT, OTHERS) == 96
    world.stop()
    assert found_in(tmp_path, OWN) == set()
    report = check_store(tmp_path)
    assert report["ok"], report
    again = World(tmp_path)
    assert again.ask(KEPT, ACME) == (0 if selection is WHOLE else 96)
    assert again.ask(SECRET, ACME) == 32, "its first two blocks are the other prompt's too"
    assert again.ask(KEPT, OTHERS) == 96
    assert again.num_restored == 96
    assert again.ask(SECRET[:128] + KEPT, OTHERS) >= 96, "equal tokens under another salt are another's"
    assert again.ask(SALTED, ACME_SALTED) == (0 if selection is WHOLE else 80)
    again.stop()


def test_a_salt_alone_leaves_the_tenants_others(tmp_path):
    world = World(tmp_path)
    live(world)
    assert forget(world, Selection("acme", ACME_SALTED.tenant_salt)).error == ""
    assert found_in(tmp_path, needles(ACME_SALTED, SALTED)) == set()
    assert found_in(tmp_path, OWN) == OWN.keys()
    assert set(world.storage.recipe_book.recipes()) == {"acme/safe", "rules"}
    crash(world)
    again = World(tmp_path)
    assert again.ask(SECRET, ACME) == 96
    assert again.ask(SALTED, ACME_SALTED) == 0
    again.stop()


def test_what_is_only_in_the_log_is_forgotten_too(tmp_path):
    world = World(tmp_path, checkpoint_interval_s=1000.0)
    world.ask(SECRET, ACME)
    wal = world.storage._running.wal
    world.until(lambda: wal.durable_lsn == wal.last_lsn >= 6)
    own = {name: needle for name, needle in OWN.items() if name.startswith("tokens")}
    assert found_in(tmp_path / "wal", own) == own.keys()
    assert forget(world, WHOLE).error == ""
    assert found_in(tmp_path, own) == set()
    before = wal.last_lsn
    world.ask(KEPT, OTHERS)
    world.until(lambda: wal.durable_lsn == wal.last_lsn >= before + 6)
    crash(world)
    again = World(tmp_path)
    assert len(again.storage._running.recovered.index.nodes) == 6
    again.stop()


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


@pytest.mark.parametrize("selection", [Selection("", b""), Selection("", b"", SECRET[: 4 * 64])], ids=["salt", "prefix"])
def test_what_is_asked_for_again_meanwhile_is_known_as_new(tmp_path, monkeypatch, selection):
    world = World(tmp_path)
    live(world)
    for _ in range(2):
        world.ask(SECRET, OTHERS)
    assert not world.checkpoint().error
    forgetting, may_go_on = world.storage._forgetting, threading.Event()
    original = forgetting._renew_keys
    monkeypatch.setattr(forgetting, "_renew_keys", lambda marks: may_go_on.wait(30) and original(marks))
    world.cache.forget(selection)
    world.tick()
    world.storage.forget(b"forget", selection, {})
    assert world.ask(SECRET, OTHERS) == (0 if not selection.token_ids else 32), "the first two blocks are another prompt's too"
    assert world.ask(SECRET, OTHERS) == 96
    may_go_on.set()
    assert world.until(lambda: world.inbox.find(b"forget"), timeout_s=60).error == ""
    lost_before = world.storage.stats()["lost_events"]
    assert world.pin("safe", SECRET) == "recipe+bytes"
    assert world.ask(SECRET + SECRET, OTHERS) == 96, "what hangs below is known too"
    assert world.storage.stats()["lost_events"] == lost_before
    crash(world)
    assert check_store(tmp_path)["ok"]
    again = World(tmp_path)
    assert again.ask(SECRET, OTHERS) == 96
    assert again.num_restored == 96
    again.stop()


def test_equal_prompts_of_different_salts_share_nothing_on_any_level(tmp_path):
    world = World(tmp_path)
    tables = []
    for namespace in (ACME, ACME_SALTED, OTHERS):
        assert world.ask(SECRET, namespace) == 0
        assert world.ask(SECRET, namespace) == 96
        table = world.cache.allocate(world.cache.match(SECRET, namespace), len(SECRET) // 4)
        tables.append(set(table.block_ids[:6]))
        world.cache.release(table)
    assert len(set.union(*tables)) == 18
    assert not world.checkpoint().error
    store = world.storage._running.recovered.store
    assert store.num_rows(b"blocks") == 18
    assert store.num_rows(b"nodes") == 18
    assert store.num_rows(b"namespaces") == 3
    crash(world)
    again = World(tmp_path)
    assert again.report.num_blocks == 18
    for namespace in (ACME, ACME_SALTED, OTHERS):
        assert again.ask(SECRET, namespace) == 96
        assert again.num_restored == 96
    assert again.ask(SECRET, Namespace(FINGERPRINT, tenant_salt("rival", b""))) == 0
    again.stop()


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


def victim(state_dir: Path, spec: str, key_file: str = "") -> tuple[int, list[str]]:
    environment = {**os.environ, "KVD_FAILPOINTS": spec}
    command = [sys.executable, __file__, str(state_dir), key_file]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode in {0, -9}, done.stderr
    return done.returncode, done.stdout.splitlines()


POINTS = sorted(name for name in failpoints.NAMES if name.startswith("forget."))
INSIDE = ["store.create.before_rename@2", "store.create.after_rename@2", "store.current.before_rename@3", "store.current.after_rename@3"]


def test_every_step_has_its_failpoint():
    assert len(POINTS) >= 11


@pytest.mark.parametrize("point", [*POINTS, *INSIDE])
def test_killed_in_the_middle_it_is_forgotten_at_the_next_start_or_was_not_begun(tmp_path, point):
    name, _, passage = point.partition("@")
    status, said = victim(tmp_path, f"{name}=kill@{passage or 1}")
    assert status == -9, f"{point} was not reached"
    assert said == ["lived"], "it was not told as done"
    has_begun = (tmp_path / INTENT_NAME).exists() or name == "forget.after_done"
    assert has_begun == (point not in {"forget.before_intent", "forget.intent.before_sync", "forget.intent.before_rename"})
    world = World(tmp_path)
    if has_begun:
        assert world.cache.match(SECRET, ACME).num_tokens == 0, "it is not served any more"
        assert list(world.storage.recipe_book.recipes()) == ["rules"]
        world.until(lambda: not (tmp_path / INTENT_NAME).exists(), timeout_s=60)
        assert found_in(tmp_path, OWN | OWN_ROWS | needles(ACME_SALTED, SALTED)) == set()
    else:
        assert set(world.storage.recipe_book.recipes()) == {"acme/safe", "rules"}
        assert world.ask(SECRET, ACME) == 96
    assert world.ask(KEPT, OTHERS) == 96
    world.stop()
    assert check_store(tmp_path)["ok"]


@pytest.mark.parametrize("damage", [b"", b"KVDFGT\r\n", bytes(60)])
def test_an_intent_that_can_not_be_read_is_reported_and_not_completed(tmp_path, damage):
    world = World(tmp_path)
    live(world)
    crash(world)
    (tmp_path / INTENT_NAME).write_bytes(damage)
    world = World(tmp_path)
    assert any(INTENT_NAME in entry["what"] for entry in world.log.named("storage.damage"))
    assert world.ask(SECRET, ACME) == 96
    assert forget(world, WHOLE).error == ""
    assert found_in(tmp_path, OWN) == set()
    world.stop()


def test_an_intent_of_another_format_is_refused(tmp_path):
    crash(World(tmp_path))
    write_intent(tmp_path, [Mark("acme")])
    path = tmp_path / INTENT_NAME
    body = bytearray(path.read_bytes()[:-4])
    body[8] = 9
    path.write_bytes(body + crc32c(bytes(body)).to_bytes(4, "little"))
    with pytest.raises(UnknownFormatError, match="format 9"):
        World(tmp_path)
    assert path.exists()


def everything(state_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in state_dir.rglob("*") if path.is_file()}


def test_encrypted_a_tenants_keys_are_destroyed_and_an_older_copy_of_its_blocks_opens_no_more(tmp_path, key_file):
    state_dir = tmp_path / "state"
    world = World(state_dir, store_encryption_key_file=key_file)
    live(world)
    keys = world.storage.keys
    assert keys is not None
    assert {ACME.tenant_salt, ACME_SALTED.tenant_salt, OTHERS.tenant_salt} <= set(keys.tenants())
    copy = everything(state_dir / "kv") | everything(state_dir / "wal")
    generation = world.storage._running.recovered.generations.current.generation
    assert forget(world, WHOLE).error == ""
    assert not {ACME.tenant_salt, ACME_SALTED.tenant_salt} & set(keys.tenants())
    assert OTHERS.tenant_salt in keys.tenants()
    assert world.storage._running.recovered.generations.current.generation == generation, "nothing had to be copied"
    crash(world)
    for path, data in copy.items():  # as a backup, or a block device's snapshot, would hold it
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)
    again = World(state_dir, store_encryption_key_file=key_file)
    assert again.ask(KEPT, OTHERS) == 96
    assert again.num_restored == 96
    assert again.ask(SECRET, ACME) == 0
    assert again.ask(SALTED, ACME_SALTED) == 0
    assert list(again.storage.recipe_book.recipes()) == ["rules"]
    again.stop()


def test_encrypted_a_prefix_is_copied_around(tmp_path, key_file):
    state_dir = tmp_path / "state"
    world = World(state_dir, store_encryption_key_file=key_file)
    live(world)
    generations = world.storage._running.recovered.generations
    before = generations.current.generation
    assert forget(world, PREFIX).error == ""
    assert generations.current.generation > before
    assert not (state_dir / "kv" / str(before)).exists()
    assert world.ask(KEPT, ACME) == 96
    world.stop()
    again = World(state_dir, store_encryption_key_file=key_file)
    assert again.ask(KEPT, ACME) == 96
    assert again.num_restored == 96
    assert again.ask(SECRET, ACME) == 32
    again.stop()


@pytest.mark.parametrize("point", ["forget.before_recipes", "forget.before_rewrite", "keys.before_unlink@6", "forget.before_log"])
def test_encrypted_killed_in_the_middle(tmp_path, key_file, point):
    state_dir = tmp_path / "state"
    name, _, passage = point.partition("@")
    status, said = victim(state_dir, f"{name}=kill@{passage or 1}", key_file)
    assert status == -9
    if "lived" not in said:
        pytest.fail(f"{point} was reached too early")
    world = World(state_dir, store_encryption_key_file=key_file)
    world.until(lambda: not (state_dir / INTENT_NAME).exists(), timeout_s=60)
    assert world.storage.keys is not None
    assert ACME.tenant_salt not in world.storage.keys.tenants()
    assert world.ask(SECRET, ACME) == 0
    assert world.ask(KEPT, OTHERS) == 96
    world.stop()


if __name__ == "__main__":
    the_world = World(Path(sys.argv[1]), store_encryption_key_file=sys.argv[2])
    live(the_world)
    print("lived", flush=True)
    assert not forget(the_world, WHOLE).error
    print("forgotten", flush=True)
    crash(the_world)
