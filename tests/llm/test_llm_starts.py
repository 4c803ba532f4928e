"""Starts that fail: what must be changed is a ConfigError, what another try may be spared an EngineStoppedError."""

from __future__ import annotations

import errno
import queue
import threading
import time
from pathlib import Path

import pytest

import kvd
from kvd import start_errors
from kvd.config import ConfigError
from kvd.executor.models.spec import ModelError
from kvd.llm import EngineStoppedError
from kvd.start_errors import as_config_error
from kvd.storage import errors as storage
from kvd.storage import persistence
from kvd.storage.lock import is_locked
from kvd.storage.persistence import Storage
from kvd.text.errors import ChatTemplateError, TokenizerError
from kvd.transport.errors import EndpointError, EndpointInUseError

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]


@pytest.mark.parametrize(
    "kind",
    [
        storage.StateDirError,
        storage.UnknownFormatError,
        storage.RecipesUnreadableError,
        storage.EncryptionKeyError,
        storage.KeysUnreadableError,
        EndpointError,
        ModelError,
        TokenizerError,
        ChatTemplateError,
    ],
)
def test_what_must_be_changed_is_a_config_error(kind):
    error = kind("this")
    wrong = as_config_error(error)
    assert isinstance(wrong, ConfigError)
    assert (str(wrong), wrong.__cause__) == ("this", error)


@pytest.mark.parametrize(
    "error",
    [
        storage.StateLockedError("x"),
        storage.DiskFaultError("x"),
        EndpointInUseError("x"),
        storage.StoreDamagedError("x"),
        OSError("x"),
        MemoryError(),
        KeyboardInterrupt(),
        None,
    ],
    ids=repr,
)
def test_what_another_try_may_be_spared_is_none(error):
    assert as_config_error(error) is None
    assert as_config_error(own := ConfigError("x")) is own
    assert {kind.__name__ for kind in start_errors.TEMPORARY} == {"StateLockedError", "EndpointInUseError", "DiskFaultError"}


def key_file(root: Path) -> Path:
    path = root / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    return path


def broken_model(root: Path, **files: bytes) -> str:
    (root / "model").mkdir()
    for name, data in files.items():
        (root / "model" / name.replace("_", ".")).write_bytes(data)
    return str(root / "model")


def written(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


MODELS = {
    "a directory of nothing": (broken_model, "no config.json"),
    "a description that is no JSON": (lambda root: broken_model(root, config_json=b"{"), "config.json"),
    "another architecture": (lambda root: broken_model(root, config_json=b'{"architectures": ["X"], "model_type": "x"}'), "x"),
    "a file of zeros": (lambda root: written(root / "m.gguf", bytes(100)), "m.gguf"),
    "a GGUF of zeros": (lambda root: written(root / "m.gguf", b"GGUF" + bytes(100)), "GGUF version 0"),
    "a GGUF cut short": (lambda root: written(root / "m.gguf", b"GGUF\3\0\0\0" + b"\xff" * 99), "m.gguf"),
    "a path to nothing": (lambda root: str(root / "m.gguf"), "does not exist"),
    "no name of a model": (lambda root: "nosuch", "nosuch"),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_can_not_be_used(tmp_path, name):
    make, says = MODELS[name]
    with pytest.raises(ConfigError, match=says):
        kvd.LLM(make(tmp_path), kv_memory="1MiB")


def test_keys_and_places_that_can_not_be_used(tmp_path):
    state, settings = tmp_path / "state", {"executor": "fake", "kv_memory": "1MiB"}
    file = Path(written(tmp_path / "file", b""))
    for places, says in (
        ({"state_dir": state, "store_encryption_key_file": str(tmp_path / "none")}, "store_encryption_key_file"),
        ({"state_dir": state, "store_encryption_key_file": written(tmp_path / "short", b"k")}, "store_encryption_key_file|short"),
        ({"state_dir": file}, "state_dir"),
        ({"state_dir": file / "below"}, "state_dir"),
        ({"adapter_dir": str(tmp_path / "none")}, "adapter_dir"),
    ):
        with pytest.raises(ConfigError, match=says):
            kvd.LLM(**settings, **places)
    with kvd.LLM(**settings, state_dir=state) as first:
        first.client.pin("rules", "a prefix of more than sixteen bytes")
        with pytest.raises(EngineStoppedError, match="in use by process") as refused:
            kvd.LLM(**settings, state_dir=state)
        assert isinstance(refused.value.__cause__, storage.StateLockedError)
    pytest.importorskip("cryptography")
    kvd.LLM(**settings, state_dir=tmp_path / "secret", store_encryption_key_file=str(key_file(tmp_path))).close()
    with pytest.raises(ConfigError, match="encrypted"):
        kvd.LLM(**settings, state_dir=tmp_path / "secret")


def slowed(piece, begun, goes_on, *, is_after):
    """That piece of the start, which waits before it or after it until it is let on."""

    def run(*args, **options):
        result = piece(*args, **options) if is_after else None
        begun.set()
        assert goes_on.wait(60)
        return result if is_after else piece(*args, **options)

    return run


def store_threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("kvd")} - {"kvd-client"}


@pytest.mark.parametrize("is_after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize(("owner", "name"), [(Storage, "open"), (persistence, "recover"), (Storage, "rehydrate"), (Storage, "_load")])
def test_a_stop_while_the_store_hangs_leaves_it_to_the_thread_that_opens_it(tmp_path, monkeypatch, owner, name, is_after):
    settings = {"executor": "fake", "kv_memory": "1MiB", "state_dir": tmp_path / "state"}
    with kvd.LLM(**settings) as first:
        first.client.pin("rules", "a prefix of more than sixteen bytes")
    before = store_threads()
    begun, goes_on, engines, errors = threading.Event(), threading.Event(), queue.SimpleQueue(), []
    wait_ready = kvd.llm._Engine.wait_ready

    def start():
        try:
            kvd.LLM(**settings)
        except EngineStoppedError as error:
            errors.append(error)

    with monkeypatch.context() as patch:
        patch.setattr("kvd.daemon._STORE_STOP_S", 0.05)
        patch.setattr(owner, name, slowed(getattr(owner, name), begun, goes_on, is_after=is_after))
        starter = threading.Thread(target=start)
        patch.setattr("kvd.llm._Engine.wait_ready", lambda engine: (engines.put(engine), wait_ready(engine)))
        starter.start()
        assert begun.wait(60)
        closer = threading.Thread(target=engines.get(timeout=60).close)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive(), "somebody waits for what still runs"
        goes_on.set()
        closer.join(60)
        starter.join(60)
    assert len(errors) == 1
    assert not is_locked(tmp_path / "state")
    until_s = time.monotonic() + 60
    while not store_threads() <= before:  # nobody waits for those that tokenise
        assert time.monotonic() < until_s, store_threads()
        time.sleep(0.01)
    with kvd.LLM(**settings) as next_one:
        assert [pin["name"] for pin in next_one.client.prefixes()["pins"]] == ["rules"]
        assert next_one.client.status()["store"]["failed_starts"] == 0


def test_a_disk_that_fails_is_worth_another_try(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvd.daemon.Storage.lock", full)
    with pytest.raises(EngineStoppedError, match="its disk fails") as refused:
        kvd.LLM(executor="fake", kv_memory="1MiB", state_dir=tmp_path / "state")
    assert isinstance(refused.value.__cause__, storage.DiskFaultError)
