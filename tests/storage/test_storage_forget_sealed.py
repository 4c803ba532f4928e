"""Forgetting in an encrypted store: copies of everything from before, and the keys from after, tell nothing of what was forgotten; a tenant loses its keys, a prefix is copied around."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forget_world import ACME, ACME_SALTED, KEPT, OTHERS, PREFIX, SALTED, SECRET, TEXT, WHOLE, forget, live, victim
from storage_harness import World, chain_of, crash

from kvd.cache.tenants import Selection
from kvd.storage import schema
from kvd.storage.encryption import reading_encryption
from kvd.storage.forget_intent import INTENT_NAME
from kvd.storage.recipes import read_recipes
from kvd.storage.schema import BadRowError
from kvd.storage.store import Store
from kvd.storage.tools import check_store
from kvd.wal.reader import read_segments

pytestmark = pytest.mark.store


def readable(state: Path, key_file: str) -> set[str]:
    """The tenants' things that an encrypted directory still tells to the master key's holder: prompts by their blocks, pins by name."""
    codec = reading_encryption(state, key_file).codec
    names = {
        key: f"{who} {index}"
        for who, namespace, token_ids in (
            ("secret", ACME, SECRET),
            ("acme's", ACME, KEPT),
            ("salted", ACME_SALTED, SALTED),
            ("others'", OTHERS, KEPT),
        )
        for index, key in enumerate(chain_of(token_ids, namespace))
    }
    found = {f"pin {name}" for name in read_recipes(state, codec).value or {}}
    reasons = {"key"}
    store = Store(next(path for path in (state / "kv").iterdir() if path.name.isdecimal()), 0, codec=codec, readonly=True)
    for key, value in store.rows(schema.DB_NODES):
        try:
            found.add(names.get(codec.unpack_node(key, value).block_hash, "others' second"))
        except BadRowError as error:
            reasons.add(error.reason)
    with store.reading_blocks() as reader:
        for key, view in reader.items():
            try:
                found.add(names.get(codec.verify_block(key, view)[1], "others' second"))
            except BadRowError as error:
                reasons.add(error.reason)
    for segment, fault in read_segments(state / "wal", None, codec.wal_seal(store.meta.store_uuid)):
        assert not fault
        for _, record in segment.records:
            if getattr(record, "root", b"") == ACME.root:
                found.add(names.get(getattr(record, "parent", b""), "acme's root"))
    store.close()
    assert reasons == {"key"}, "nothing is damaged"
    return {each for each in found if not each.startswith("others'")}


SECRETS = {f"secret {index}" for index in range(6)}
SHARED = SECRETS & {"secret 0", "secret 1"}
"""The first two blocks of ``SECRET`` and ``KEPT`` are the same."""


@pytest.mark.parametrize("selection", [WHOLE, PREFIX], ids=["tenant", "prefix"])
def test_copies_from_before_and_the_keys_from_after_tell_nothing(tmp_path, key_file, selection):
    state, copy = tmp_path / "state", tmp_path / "copy"
    world = World(state, store_encryption_key_file=key_file)
    live(world)
    salted = {f"salted {index}" for index in range(5)}
    shutil.copytree(state, copy)
    everything = readable(copy, key_file)
    assert everything >= SECRETS - SHARED | salted | {"pin acme/safe", "pin rules", "acme's 5"}
    assert not forget(world, selection).error
    assert not (state / INTENT_NAME).exists()
    shutil.rmtree(copy / "keys")
    shutil.copytree(state / "keys", copy / "keys")
    kept = {"pin rules"} if selection is WHOLE else {"pin rules"} | salted
    assert readable(copy, key_file) == kept, "of a copy from before only what was not this tenant's (or this salt's) can be opened"
    assert world.stop()
    assert not {"secret 4", "secret 5", "pin acme/safe"} & readable(state, key_file)
    assert check_store(state, key_file=key_file)["ok"]
    world = World(state, store_encryption_key_file=key_file)
    assert list(world.storage.recipe_book.recipes()) == ["rules"]
    assert world.ask(KEPT, OTHERS) == 96
    assert world.ask(SALTED, ACME_SALTED) == (0 if selection is WHOLE else 80)
    assert world.ask(SECRET, ACME) <= 32
    world.stop()


def test_nothing_of_a_forget_under_way_stands_in_clear(tmp_path, key_file):
    """Killed after the intent is on disk; the next start completes it."""
    state = tmp_path / "state"
    command = [sys.executable, __file__, str(state), key_file]
    done = subprocess.run(
        command, env={**os.environ, "KVD_FAILPOINTS": "forget.before_recipes=kill"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    intent = (state / INTENT_NAME).read_bytes()
    assert not any(secret in intent for secret in (b"acme", ACME.tenant_salt, *chain_of(SECRET, ACME)))
    world = World(state, store_encryption_key_file=key_file)
    world.until(lambda: not (state / INTENT_NAME).exists(), 30)
    crash(world)
    assert not {"secret 4", "secret 5", "pin acme/safe"} & readable(state, key_file)
    assert not any(TEXT.encode() in path.read_bytes() for path in state.rglob("*") if path.is_file())


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
    forget(the_world, Selection("acme", ACME.tenant_salt, SECRET[: 4 * 64]))
