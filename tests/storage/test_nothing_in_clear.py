"""Of what is stored under a key nothing stands in clear in any file, whatever was there before and wherever it was interrupted; and no file is for others to read."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from storage_harness import FINGERPRINT, SALTED, World, chain_of, crash, found, prompt, row_of

from kvd.cache.hashing import Namespace
from kvd.observe import failpoints
from kvd.storage.recipes import list_recipe_files
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store


def plain_state(state: Path) -> None:
    world = World(state, checkpoint_interval_s=1000.0)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    for _ in range(2):
        world.ask(prompt(0, 81))
    assert not world.checkpoint().error
    world.ask(prompt(1, 33))
    world.until_logged()
    crash(world)
    (state / "quarantine").mkdir(exist_ok=True)
    (state / "quarantine" / "old").write_bytes(prompt(9, 48))
    (state / "recipes" / ".recipes.90.tmp").write_bytes(list_recipe_files(state)[0][1].read_bytes())


def secrets_of(prompts) -> dict[str, bytes]:
    """What must not be found: tokens, hashes, roots and rows of prompts, by what they are."""
    secrets: dict[str, bytes] = {"the pin's name": b"system"}
    for namespace, number, length in prompts:
        token_ids = prompt(number, length)
        secrets[f"root of {number}"] = namespace.root
        secrets[f"tokens of {number}"] = token_ids[4:24]
        for index, key in enumerate(chain_of(token_ids, namespace)):
            if number == 1:  # known to the log alone, where a block's hash shows as its child's parent
                secrets["hash of 1"] = chain_of(token_ids, namespace)[0]
                break
            secrets[f"hash {index} of {number}"] = key
            secrets[f"row {index} of {number}"] = row_of(key)[:24]
    return secrets


CONVERSION_POINTS = [
    *(name for name in sorted(failpoints.NAMES) if name.startswith("keys.") and name != "keys.before_unlink"),
    *(name for name in sorted(failpoints.NAMES) if name.startswith("recipes.") and "restore" not in name),
]


@pytest.mark.parametrize("name", [None, *CONVERSION_POINTS])
def test_a_plain_directory_is_encrypted_with_its_pins_wherever_it_is_interrupted(tmp_path, key_file, monkeypatch, name):
    state = tmp_path / "state"
    plain_state(state)
    secrets = secrets_of([(Namespace(FINGERPRINT), number, length) for number, length in ((9, 48), (0, 80), (1, 32))])
    assert found(state, secrets) == set(secrets), "the search finds what stands in clear"
    if name is not None:
        monkeypatch.setattr(failpoints, "_armed", {name: failpoints._Armed("raise", 1)})
        with pytest.raises(OSError, match="failpoint"):
            World(state, store_encryption_key_file=key_file)
    world = World(state, store_encryption_key_file=key_file)
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    assert world.report.num_blocks == 0
    assert world.report.pins_pending == ("system",)
    if name is None:
        assert world.log.named("storage.encrypted") == [{"removed": ["quarantine", "wal", "kv"]}]
    assert found(state, secrets) == set()
    assert world.storage.status()["damage"] == []
    assert world.pin("other", prompt(5, 64)) == "recipe+bytes"
    assert world.stop()
    assert check_store(state, key_file=key_file)["ok"]


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
def test_nothing_stands_in_clear_after_a_life_with_damage(tmp_path, key_file, is_sealed):
    state = tmp_path / "state"
    options = {"store_encryption_key_file": key_file} if is_sealed else {}
    world = World(state, checkpoint_interval_s=1000.0, **options)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    for _ in range(2):
        world.ask(prompt(0, 81), SALTED)
    assert not world.checkpoint().error
    world.ask(prompt(1, 33), SALTED)
    world.until_logged()
    crash(world)
    newest = list_recipe_files(state)[0][1]
    newest.write_bytes(newest.read_bytes()[:-1])
    segment = next((state / "wal").glob("*.wal"))
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    world = World(state, **options)
    assert len(world.storage.status()["damage"]) == 2
    assert len(list((state / "quarantine").iterdir())) == 2
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    secrets = secrets_of([(Namespace(FINGERPRINT), 9, 48), (SALTED, 0, 80), (SALTED, 1, 32)])
    secrets["salt"] = SALTED.tenant_salt
    assert found(state, secrets) == (set() if is_sealed else set(secrets))
    world.stop()
    assert found(state, secrets) == (set() if is_sealed else set(secrets))


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("umask", [0o000, 0o777 & ~0o700], ids=["umask 000", "umask 077"])
def test_every_file_is_its_owners_alone_whatever_the_umask(tmp_path, key_file, umask, is_sealed):
    state = tmp_path / "state"
    state.mkdir(mode=0o777)
    state.chmod(0o777)
    options = {"store_encryption_key_file": key_file} if is_sealed else {}
    old = os.umask(umask)
    try:
        world = World(state, checkpoint_interval_s=1000.0, **options)
        assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
        assert not world.checkpoint().error
        world.ask(prompt(1, 33))
        world.until_logged()
        crash(world)
        segment = next((state / "wal").glob("*.wal"))
        data = bytearray(segment.read_bytes())
        data[70] ^= 1
        segment.write_bytes(data)
        (state / "kv" / "1" / "data.mdb").write_bytes(b"no store")
        shutil.copy(list_recipe_files(state)[0][1], state / "recipes" / "recipes.90")
        world = World(state, **options)
        seen = {str(path.relative_to(state)): stat.S_IMODE(path.stat().st_mode) for path in [state, *state.rglob("*")]}
        world.stop()
    finally:
        os.umask(old)
    kinds = {"lock", "starting", "recipes/recipes.9", "wal/0", "kv/CURRENT", "data.mdb", "lock.mdb", ".aside", "quarantine/"}
    assert all(any(kind in name for name in seen) for kind in (kinds | {"keys/keys."} if is_sealed else kinds)), seen
    wrong = {name: oct(mode) for name, mode in seen.items() if mode != (0o700 if (state / name).is_dir() else 0o600)}
    wrong = {name: mode for name, mode in wrong.items() if (state / name).exists() or not name.startswith("starting")}
    assert not wrong
