"""Fixtures that every tier may use. Must not import torch, zmq or lmdb: the pure tier runs where they are not installed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("kvd", deadline=None)  # a busy machine is no failure
settings.load_profile("kvd")

_TIER = re.compile(r"^pytestmark\s*=.*?(?=^\S)", re.MULTILINE | re.DOTALL)
_IMPURE = re.compile(r"pytest\.mark\.(torch|store|socket|e2e|model|oracle|grammar|systemd|full)\b")


def pytest_configure() -> None:
    """Refuse a pure tier that proves nothing because the heavy libraries could be imported after all; let Ctrl-C reach the children of tests."""
    # A shell that starts the tests in the background lets them, and all that they start, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TRITON_INTERPRET", "1")  # GPU kernels are tested without a GPU; read when they are imported
    if os.environ.get("KVD_TEST_PURE") == "1":
        present = [name for name in ("torch", "zmq", "lmdb") if importlib.util.find_spec(name)]
        if present:
            raise pytest.UsageError(f"the pure tier must run without {', '.join(present)}")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In the pure environment (KVD_TEST_PURE=1) leave out, before import, every module that marks itself as needing more."""
    if os.environ.get("KVD_TEST_PURE") != "1" or collection_path.suffix != ".py":
        return None
    marks = _TIER.search(collection_path.read_text(encoding="utf-8"))
    return True if marks and _IMPURE.search(marks.group()) else None


def smollm2_path() -> Path:
    """The default model's GGUF: $KVD_TEST_MODEL, else where ``kvd pull smollm2`` puts it."""
    override = os.environ.get("KVD_TEST_MODEL")
    if override:
        return Path(override)
    from kvd.settings.model_store import resolve_model

    return Path(resolve_model(""))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Path of the SmolLM2 weights; the test fails with the command to run where they are missing (``make model`` fetches them)."""
    return smollm2_path()
