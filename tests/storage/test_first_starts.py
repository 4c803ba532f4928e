"""A first start where nothing can be written: with a key it serves and persists nothing until it can, and a refusal names the disk."""

from __future__ import annotations

import errno
import os

import pytest
from storage_harness import World, crash, prompt

from kvd.storage.errors import DiskFaultError, StateDirError, StoreBlockedError, state_dir_errors
from kvd.storage.keys_file import has_keys
from kvd.storage.lock import LOCK_NAME, StateLock
from kvd.wal.disk_faults import fault_sentence

pytestmark = pytest.mark.store


@pytest.fixture
def full_disk(monkeypatch):
    """While it is full no small file is replaced, so neither keys nor recipes nor CURRENT; the function ends it."""
    with monkeypatch.context() as patched:

        def refuse(path, *_args, **_kwargs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        for module in ("two_copies", "generations"):
            patched.setattr(f"kvd.storage.{module}.replace_file", refuse)
        yield patched.undo


def test_with_a_key_a_full_empty_directory_serves_and_persists_when_there_is_room(tmp_path, key_file, full_disk):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    status = world.storage.status()
    assert (status["degraded"], status["encrypted"]) == (True, True)
    assert status["reason"].startswith("enospc: ")
    assert world.pin("early", prompt(0, 64)) == "failed"
    assert not has_keys(state)
    tokens = prompt(0, 64)
    assert [path for path in state.rglob("*") if path.is_file() and tokens[:64] in path.read_bytes()] == []
    full_disk()
    world.until(lambda: world.log.named("storage.resumed"), timeout_s=30)
    assert world.pin("late", prompt(1, 64)) == "recipe+bytes"
    world.until(lambda: not world.storage.status()["degraded"])
    assert has_keys(state)
    crash(world)
    world = World(state, store_encryption_key_file=key_file)
    assert world.report.pins_pending == ()
    assert world.ask(prompt(1, 65)) == 64
    world.stop()


def test_pins_in_clear_are_not_served_beside_keys_that_can_not_be_written(tmp_path, key_file, request):
    """The start is refused as the disk's fault, and another one goes on."""
    state = tmp_path / "state"
    world = World(state)
    assert world.pin("mine", prompt(0, 64)) == "recipe+bytes"
    world.stop()
    end = request.getfixturevalue("full_disk")
    with pytest.raises(DiskFaultError, match="No space left"), state_dir_errors(state):
        World(state, store_encryption_key_file=key_file)
    end()
    world = World(state, store_encryption_key_file=key_file)
    assert set(world.storage.recipe_book.recipes()) == {"mine"}
    world.stop()


def test_a_key_that_is_refused_while_the_pins_are_sealed_is_the_disks_fault(tmp_path, key_file, monkeypatch):
    """The ring could still be made, the first tenant's key not."""
    state = tmp_path / "state"
    world = World(state)
    assert world.pin("mine", prompt(0, 64)) == "recipe+bytes"
    world.stop()
    from kvd.storage import two_copies

    real, left = two_copies.replace_file, [2]

    def soon_full(path, data, **options):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, data, **options)

    with monkeypatch.context() as patched:
        patched.setattr(two_copies, "replace_file", soon_full)
        with pytest.raises(DiskFaultError, match="No space left"), state_dir_errors(state):
            World(state, store_encryption_key_file=key_file)
    world = World(state, store_encryption_key_file=key_file)
    assert set(world.storage.recipe_book.recipes()) == {"mine"}
    world.stop()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_a_disk_refuses_is_its_fault_and_another_start_may_succeed(tmp_path, number):
    with pytest.raises(DiskFaultError, match=os.strerror(number)), state_dir_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path))
    with pytest.raises(StateDirError), state_dir_errors(tmp_path):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(tmp_path))


def test_an_empty_read_only_directory_is_called_read_only(tmp_path, monkeypatch):
    """Without the lock's file there is nothing to open, which is not what keeps the daemon from running."""
    real = os.open

    def read_only(path, flags, *args, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only file system"):
        StateLock(tmp_path)
    (tmp_path / LOCK_NAME).write_text("")
    StateLock(tmp_path).release()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EEXIST, errno.EIO])
def test_a_fault_is_named_once_however_often_it_is_told(number):
    error = OSError(number, os.strerror(number), "keys")
    told = StoreBlockedError(f"{fault_sentence(error)}: the encryption keys can't be written")
    told.__cause__ = error
    assert fault_sentence(told).count(f"{errno.errorcode[number].lower()}: ") == 1
