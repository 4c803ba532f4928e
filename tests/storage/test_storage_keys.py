"""The key file and the key ring: no key is lost that anything needs, none lives on that was destroyed, no nonce comes twice."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from storage_harness import World, crash, prompt

from kvd.observe import failpoints
from kvd.storage import keys as module
from kvd.storage.errors import EncryptionKeyError, KeysUnreadableError, StoreBlockedError
from kvd.storage.key_file import read_key_file, write_key_file
from kvd.storage.keys import KeyRing
from kvd.storage.keys_file import STORE, has_keys, key_files, rewrap_keys

pytestmark = pytest.mark.store

MASTER = b"m" * 32


def ring(state_dir: Path, **options) -> KeyRing:
    return KeyRing(state_dir, MASTER, create=not has_keys(state_dir), **options)


def contents(state_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((state_dir / "keys").iterdir())}


def arm(monkeypatch, name: str, at: int = 1) -> None:
    monkeypatch.setattr(failpoints, "_armed", {name: failpoints._Armed("raise", at)})


# ------------------------------------------------------------------------------------------------ the key file


def test_a_written_key_file_is_read_and_its_owners_alone(tmp_path):
    old = os.umask(0)
    try:
        write_key_file(tmp_path / "key")
        write_key_file(tmp_path / "other")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert len(read_key_file(tmp_path / "key")) == 32
    assert read_key_file(tmp_path / "key") != read_key_file(tmp_path / "other")
    with pytest.raises(FileExistsError):
        write_key_file(tmp_path / "key")


@pytest.mark.parametrize("data", [MASTER, MASTER.hex().encode(), b" " + MASTER.hex().upper().encode() + b"\r\n"])
def test_a_key_is_32_bytes_or_64_digits(tmp_path, data):
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(0o400)
    assert read_key_file(path) == MASTER


@pytest.mark.parametrize(
    ("data", "mode", "says"),
    [
        (MASTER, 0o640, "chmod 600"),
        (MASTER, 0o604, "chmod 600"),
        (b"m" * 31, 0o600, "it holds no key"),
        (b"", 0o600, "a key has 32"),
        (b"00" * 31, 0o600, "it holds 31 bytes"),
        (b"\xff" * 64, 0o600, "it holds no key"),
        (None, 0o600, "No such file"),
    ],
)
def test_what_is_no_key_is_refused_without_showing_it(tmp_path, data, mode, says):
    path = tmp_path / "key"
    if data is not None:
        path.write_bytes(data)
        path.chmod(mode)
    with pytest.raises(EncryptionKeyError, match=says) as caught:
        read_key_file(path)
    assert "store_encryption_key_file" in str(caught.value)
    assert "mmmm" not in str(caught.value)


def test_a_fifo_in_the_key_files_place_holds_up_nothing(tmp_path):
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(EncryptionKeyError, match="not a regular file"):
        read_key_file(tmp_path / "key")


# ------------------------------------------------------------------------------------------------ the ring


def test_a_key_is_durable_before_it_is_used_and_the_same_after_a_restart(tmp_path):
    first = ring(tmp_path)
    sealed = {}
    for tenant in (STORE, b"", b"salt", b"s" * 300):
        key, (nonce,) = first.for_sealing(tenant)
        sealed[tenant] = key.key_id, nonce, key.cipher.seal(nonce, b"data", b"place")
        later = ring(tmp_path, readonly=True)
        assert later.by_id(key.key_id).cipher.open(nonce, sealed[tenant][2], b"place") == b"data"
    again = ring(tmp_path)
    assert again.index_key == first.index_key
    assert {tenant: again.for_sealing(tenant)[0].key_id for tenant in sealed} == {tenant: each[0] for tenant, each in sealed.items()}
    assert len({each[0] for each in sealed.values()}) == 4


def test_two_files_hold_the_ring_and_no_secret_in_clear(tmp_path):
    taken: list[bytes] = []

    def random(num_bytes: int) -> bytes:
        taken.append(os.urandom(num_bytes))
        return taken[-1]

    made = ring(tmp_path, random=random)
    made.for_tenant(b"a tenant's salt")
    files = contents(tmp_path)
    assert len(files) == 2
    one, two = files.values()
    assert one[28:-4] == two[28:-4]
    for secret in [MASTER, b"a tenant's salt", *(each for each in taken if len(each) == 32)]:
        assert secret not in one


def test_another_master_key_is_refused_and_nothing_is_touched(tmp_path):
    ring(tmp_path).for_tenant(b"a")
    before = contents(tmp_path)
    for readonly in (True, False):
        with pytest.raises(EncryptionKeyError, match="not the key that the state directory is encrypted with"):
            KeyRing(tmp_path, b"n" * 32, readonly=readonly)
    assert contents(tmp_path) == before


def damage_file(path: Path, damage: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage == "folder":
        path.mkdir()
        (path / "inside").write_bytes(b"x")
    elif damage == "renamed":
        path.with_name("keys.90").write_bytes(data)
    elif damage != "missing":
        path.write_bytes({"cut": data[:-1], "empty": b"", "flip": data[:50] + bytes([data[50] ^ 1]) + data[51:]}[damage])


DAMAGE = ["cut", "empty", "flip", "renamed", "fifo", "folder", "missing"]


@pytest.mark.parametrize("which", [0, 1], ids=["newest", "older"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damaged_file_costs_no_key_and_is_not_kept(tmp_path, damage, which):
    made = ring(tmp_path)
    ids = {tenant: made.for_tenant(tenant).key_id for tenant in (b"a", b"b")}
    damage_file(key_files(tmp_path).files()[which][1], damage)
    healed = ring(tmp_path)
    assert {tenant: healed.for_tenant(tenant).key_id for tenant in ids} == ids
    assert bool(healed.notes) == (damage != "missing")
    assert healed.fault == ""
    assert not (tmp_path / "quarantine").exists()
    assert ring(tmp_path).notes == ()
    assert len(contents(tmp_path)) == 2


def test_no_readable_file_is_refused(tmp_path):
    ring(tmp_path)
    for _, path in key_files(tmp_path).files():
        damage_file(path, "flip")
    before = contents(tmp_path)
    with pytest.raises(KeysUnreadableError, match=r"keys\.2: its checksum does not match"):
        ring(tmp_path)
    assert contents(tmp_path) == before


def test_every_cut_and_every_flipped_byte_of_a_file_is_noticed(tmp_path):
    made = ring(tmp_path)
    made.for_tenant(b"a")
    newest, older = (path for _, path in key_files(tmp_path).files())
    older.unlink()
    data = newest.read_bytes()
    for damaged in (*(data[:length] for length in range(len(data))), *(_flipped(data, at) for at in range(len(data)))):
        newest.write_bytes(damaged)
        with pytest.raises(KeysUnreadableError):
            ring(tmp_path, readonly=True)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


# ------------------------------------------------------------------------------------------------ destroying


def test_a_destroyed_key_is_in_no_file_and_the_tenant_begins_anew(tmp_path):
    made = ring(tmp_path)
    for tenant in (b"stays", b"goes"):
        made.for_tenant(tenant)
    gone = made.for_tenant(b"goes")
    assert made.destroy(b"goes")
    assert not made.destroy(b"goes")
    for where in (made, ring(tmp_path)):
        assert where.by_id(gone.key_id) is None
        assert where.was_issued(gone.key_id)
        assert not where.was_issued(gone.key_id + 1000)
    assert not any(gone.wrapped in data for data in contents(tmp_path).values())
    fresh = made.for_tenant(b"goes")
    assert fresh.key_id > gone.key_id
    assert ring(tmp_path).for_tenant(b"goes").key_id == fresh.key_id


def test_the_files_of_a_destroyed_key_are_overwritten(tmp_path):
    """Through descriptors that were opened before: what stands in the inodes after their names are gone."""
    made = ring(tmp_path)
    wrapped = made.for_tenant(b"goes").wrapped
    before = [path.open("rb") for _, path in key_files(tmp_path).files()]
    assert all(wrapped in file.read() for file in before)
    made.destroy(b"goes")
    for file in before:
        file.seek(0)
        assert set(file.read()) == {0}
        file.close()


@pytest.mark.parametrize("name", sorted(name for name in failpoints.NAMES if name.startswith("keys.")))
def test_a_key_that_could_not_be_destroyed_is_said_to_be_there_still(tmp_path, monkeypatch, name):
    made = ring(tmp_path)
    gone = made.for_tenant(b"goes")
    arm(monkeypatch, name)
    with pytest.raises(OSError, match=r"keys\."):
        made.destroy(b"goes")
    assert made.by_id(gone.key_id) is gone
    assert made.for_tenant(b"goes") is gone
    assert ring(tmp_path, readonly=True).by_id(gone.key_id) is not None, "it seals again: it is durable again"
    assert made.destroy(b"goes")
    assert not any(gone.wrapped in data for data in contents(tmp_path).values())
    assert ring(tmp_path).by_id(gone.key_id) is None


def test_renewed_keys_seal_and_superseded_ones_read_until_they_are_dropped(tmp_path):
    made = ring(tmp_path)
    before = {tenant: made.for_tenant(tenant) for tenant in (b"a", b"b")}
    made.renew({b"a", b"unknown"})
    after = made.for_tenant(b"a")
    assert after.key_id > before[b"a"].key_id
    assert made.by_id(before[b"a"].key_id) is before[b"a"]
    assert [made.is_current(key.key_id) for key in (before[b"a"], after, before[b"b"])] == [False, True, True]
    again = ring(tmp_path)
    assert again.for_tenant(b"a").key_id == after.key_id
    again.drop_superseded({b"a"})
    for where in (again, ring(tmp_path)):
        assert [where.by_id(key.key_id) is not None for key in (before[b"a"], after, before[b"b"])] == [False, True, True]
    assert not any(before[b"a"].wrapped in data for data in contents(tmp_path).values())
    numbers = sorted(contents(tmp_path))
    again.drop_superseded({b"a"})
    assert sorted(contents(tmp_path)) == numbers, "nothing to drop, nothing written"


@pytest.mark.parametrize("name", sorted(name for name in failpoints.NAMES if name.startswith("keys.")))
def test_a_key_that_could_not_be_made_durable_seals_nothing(tmp_path, monkeypatch, name):
    made = ring(tmp_path)
    made.for_tenant(b"first")
    arm(monkeypatch, name)
    if name == "keys.before_unlink":
        made.for_tenant(b"a")  # both new files stand; older ones are harmless
    else:
        with pytest.raises(StoreBlockedError, match="the encryption keys can't be written"):
            made.for_tenant(b"a")
    key = made.for_tenant(b"a")
    again = ring(tmp_path)
    assert again.by_id(key.key_id).wrapped == key.wrapped
    assert again.for_tenant(b"first").key_id == made.for_tenant(b"first").key_id
    assert len(contents(tmp_path)) == 2


def test_what_a_crash_left_of_removing_a_file_is_finished(tmp_path):
    ring(tmp_path)
    left = tmp_path / "keys" / ".keys.1.gone"
    left.write_bytes(b"a wrapped key")
    ring(tmp_path)
    assert not left.exists()


def test_keys_that_nothing_needs_go(tmp_path):
    made = ring(tmp_path)
    for tenant in (STORE, b"a", b"b", b"c"):
        made.for_sealing(tenant)
    assert made.retain({b"b"}) == 2
    assert made.num_tenants == 2
    assert ring(tmp_path).num_tenants == 2


def test_tenants_beyond_the_bound_take_the_place_of_the_longest_idle_never_of_one_with_a_pin(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_TENANTS", 16)
    made = ring(tmp_path)
    made.for_sealing(STORE)
    made.for_tenant(b"pinned")
    made.hold_tenants({b"pinned"})
    for number in range(100):
        made.for_tenant(b"%d" % number)
        made.for_tenant(b"0")
        assert made.num_tenants <= 16
    kept = ring(tmp_path)
    first = {tenant: made.for_tenant(tenant).key_id for tenant in (b"pinned", b"0", b"99")}
    assert {tenant: kept.for_tenant(tenant).key_id for tenant in first} == first
    assert first[b"pinned"] == 2
    assert first[b"0"] == 3


# ------------------------------------------------------------------------------------------------ nonces


def test_many_tenants_get_their_keys_in_one_write_and_keep_to_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_TENANTS", 64)
    made = ring(tmp_path)
    before = made.for_tenant(b"0")
    highest = max(number for number, _ in key_files(tmp_path).files())
    made.prepare([b"%d" % number for number in range(9)] * 2)
    assert max(number for number, _ in key_files(tmp_path).files()) == highest + 2
    assert made.for_tenant(b"0") is before
    ids = {tenant: made.for_tenant(tenant).key_id for tenant in made.tenants()}
    assert sorted(ids.values()) == list(range(1, 10))
    assert {tenant: ring(tmp_path, readonly=True).for_sealing(tenant, 0)[0].key_id for tenant in ids} == ids
    made.prepare([b"%d" % number for number in range(9)])
    assert max(number for number, _ in key_files(tmp_path).files()) == highest + 2
    made.prepare([b"%d" % number for number in range(100, 300)])
    assert made.num_tenants <= 64
    assert {b"299", b"298"} <= set(made.tenants())


def test_no_nonce_comes_twice_and_reservations_are_durable_before_they_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RESERVED_AT_ONCE", 8)
    monkeypatch.setattr(module, "MAX_SEALED_PER_KEY", 40)
    seen: set[tuple[int, bytes]] = set()
    sealed: dict[int, int] = {}
    for _ in range(6):
        made = ring(tmp_path)
        for _ in range(11):
            key, nonces = made.for_sealing(b"a", 2)
            assert not seen & {(key.key_id, nonce) for nonce in nonces}
            seen |= {(key.key_id, nonce) for nonce in nonces}
            sealed[key.key_id] = sealed.get(key.key_id, 0) + 2
            assert sealed[key.key_id] <= ring(tmp_path, readonly=True).by_id(key.key_id).reserved
    assert len(sealed) > 2
    assert max(sealed.values()) <= 40
    assert all(made.by_id(key_id) is not None for key_id in sealed), "old keys stay for reading"


def test_one_restart_writes_one_reservation_for_all_tenants(tmp_path):
    made = ring(tmp_path)
    tenants = [b"%d" % number for number in range(20)]
    for tenant in tenants:
        made.for_sealing(tenant)
    again = ring(tmp_path)
    before = sorted(contents(tmp_path))
    again.for_sealing(tenants[0])
    after = sorted(contents(tmp_path))
    assert after != before
    for tenant in tenants:
        again.for_sealing(tenant)
    assert sorted(contents(tmp_path)) == after


# ------------------------------------------------------------------------------------------------ another master key


@pytest.mark.parametrize("name", [None, *sorted(name for name in failpoints.NAMES if name.startswith("keys."))])
def test_another_master_key_takes_the_old_ones_place(tmp_path, monkeypatch, name):
    made = ring(tmp_path)
    ids = {tenant: made.for_tenant(tenant).key_id for tenant in (b"a", b"b")}
    other = b"n" * 32
    if name is not None:
        arm(monkeypatch, name)
        with pytest.raises(OSError, match=r"keys\."):
            rewrap_keys(tmp_path, MASTER, other)
        works = [key for key in (MASTER, other) if _opens(tmp_path, key)]
        assert len(works) == 1, "at each moment one of the two is the right one"
        if works == [MASTER]:
            assert rewrap_keys(tmp_path, MASTER, other) == 2
    else:
        assert rewrap_keys(tmp_path, MASTER, other) == 2
    rewrapped = KeyRing(tmp_path, other)
    assert rewrapped.index_key == made.index_key
    assert {tenant: rewrapped.for_tenant(tenant).key_id for tenant in ids} == ids
    assert len(contents(tmp_path)) == 2
    assert not _opens(tmp_path, MASTER)


def _opens(state_dir: Path, master: bytes) -> bool:
    try:
        KeyRing(state_dir, master, readonly=True)
    except EncryptionKeyError:
        return False
    return True


@pytest.mark.parametrize("gone", ["folder", "files", "newest", "oldest"])
def test_files_that_are_taken_away_are_written_anew_before_anything_is_sealed(tmp_path, gone):
    keys = ring(tmp_path)
    key_id = keys.for_tenant(b"a").key_id
    files = sorted((tmp_path / "keys").iterdir())
    if gone == "folder":
        shutil.rmtree(tmp_path / "keys")
    for path in {"folder": [], "files": files, "newest": files[-1:], "oldest": files[:1]}[gone]:
        path.unlink()
    assert keys.notes == ()
    keys.for_sealing(b"a")
    assert keys.notes == ("files of the encryption keys were gone while the daemon ran; they are written anew from memory",)
    assert ring(tmp_path).by_id(key_id) is not None
    assert len(list((tmp_path / "keys").iterdir())) == 2
    generation = max(path.name for path in (tmp_path / "keys").iterdir())
    keys.for_sealing(b"a")
    assert max(path.name for path in (tmp_path / "keys").iterdir()) == generation, "once is enough"


def test_nothing_is_sealed_while_files_that_are_gone_can_not_be_written(tmp_path):
    keys = ring(tmp_path)
    keys.for_tenant(b"a")
    shutil.rmtree(tmp_path / "keys")
    (tmp_path / "keys").write_text("in the way")
    with pytest.raises(StoreBlockedError):
        keys.for_sealing(b"a")
    (tmp_path / "keys").unlink()
    keys.for_sealing(b"a")
    assert len(list((tmp_path / "keys").iterdir())) == 2


def test_pins_acknowledged_after_the_keys_were_taken_away_come_back(tmp_path):
    write_key_file(tmp_path / "key")
    world = World(tmp_path / "state", store_encryption_key_file=str(tmp_path / "key"))
    assert world.pin("before", prompt(0, 64)) == "recipe+bytes"
    shutil.rmtree(tmp_path / "state" / "keys")
    assert world.pin("after", prompt(1, 64)) == "recipe+bytes"
    assert "written anew" in world.storage.status()["damage"][0]
    crash(world)
    world = World(tmp_path / "state", store_encryption_key_file=str(tmp_path / "key"))
    assert set(world.storage.recipe_book.recipes()) == {"before", "after"}
    assert world.report.pins_pending == ()
    assert world.ask(prompt(0, 65)) == world.ask(prompt(1, 65)) == 64
    world.stop()
