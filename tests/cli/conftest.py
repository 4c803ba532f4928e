"""The fixture that puts the stub in the client library's place; imports nothing heavy, for the pure tier's sake."""

from __future__ import annotations

import sys
import types

import pytest
from stub_client import StubClient


@pytest.fixture
def stub(monkeypatch):
    class Fresh(StubClient):
        calls: list = []  # noqa: RUF012  one list a test
        made: dict = {}  # noqa: RUF012

    module = types.ModuleType("kvd_client.client")
    module.Client = Fresh
    monkeypatch.setitem(sys.modules, "kvd_client.client", module)
    for variable in ("KVD_CONNECT", "KVD_TIMEOUT", "KVD_SERVER_KEY", "KVD_CLIENT_KEY_FILE"):
        monkeypatch.delenv(variable, raising=False)
    return Fresh
