"""Fixtures that several of the storage's tests use; imports neither lmdb nor the harness, for the pure tier's sake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.observe import failpoints


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    """A master key's file, as ``store_encryption_key_file`` names it."""
    path = tmp_path / "master.key"
    path.write_bytes(b"m" * 32)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Arm failpoints in this process."""

    def set_to(spec: str) -> None:
        monkeypatch.setattr(failpoints, "_armed", failpoints._parse(spec))

    return set_to
