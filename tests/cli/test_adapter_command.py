"""``kvd adapter``, and the flags that name one."""

from __future__ import annotations

import json
import sys
import types

import pytest
from kvd_client.errors import AdapterCapacity, AdapterUnusable, NotFound
from kvd_client.results import AdapterInfo, Choice, Completion, PingResult, PinResult

from kvd.cli import app
from kvd.cli.exits import Exit
from kvd.cli.status import _status_facts

POET = AdapterInfo("poet", "loaded", "ab" * 32, 8, 3 << 20, 2)
CLERK = AdapterInfo("clerk", "on disk")


class Stub:
    """What the commands ask of a client."""

    calls: list = []  # noqa: RUF012
    failure = None
    adapter = POET
    endpoint = "ipc:///stub"

    def __init__(self, *_args, **_options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        pass

    def ping(self, **_):
        return PingResult("cd" * 4, "ready", 0.002)

    def _answer(self, name, *args, **options):
        self.calls.append((name, args, options))
        if self.failure is not None:
            raise self.failure
        return self.adapter

    def load_adapter(self, name):
        return self._answer("load", name)

    def unload_adapter(self, name):
        return self._answer("unload", name)

    def adapters(self):
        self._answer("list")
        return (CLERK, POET)

    def generate(self, prompt, **options):
        self._answer("generate", prompt, **options)
        return Completion(bytes(16), (Choice(0, "verse", (1,), "stop", ()),), None, None, 0)

    def pin(self, name, _prompt, *, adapter, **_options):
        self._answer("pin", name, adapter)
        return PinResult(name, {"tokens": 16, "blocks": 1, "durable": "recipe"})


@pytest.fixture
def stub(monkeypatch):
    class Fresh(Stub):
        calls: list = []  # noqa: RUF012

    module = types.ModuleType("kvd_client.client")
    module.Client = Fresh
    monkeypatch.setitem(sys.modules, "kvd_client.client", module)
    return Fresh


def test_list_shows_what_is_loaded_and_what_could_be(stub, capsys):
    assert app.main(["adapter", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["NAME", "STATE", "RANK", "SIZE", "REQUESTS", "DIGEST"]
    assert lines[1] == ["clerk", "on", "disk", "-", "-", "-", "-"]
    assert lines[2] == ["poet", "loaded", "8", "3.0", "MiB", "2", "ab" * 8]
    assert app.main(["adapter", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["adapters"]
    assert listed[1] == {"name": "poet", "state": "loaded", "digest": "ab" * 32, "rank": 8, "bytes": 3 << 20, "requests": 2}


def test_list_says_why_one_can_not_be_used(stub, capsys, monkeypatch):
    dora = AdapterInfo("dora", "unusable", error="adapter dora: use_dora is set")
    monkeypatch.setattr(stub, "adapters", lambda _: (dora, POET))
    assert app.main(["adapter", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["dora", "unusable"]
    assert lines[3:] == ["adapter dora: use_dora is set"]
    assert app.main(["adapter", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapters"][0]["error"] == "adapter dora: use_dora is set"


def test_load_and_unload(stub, capsys):
    assert app.main(["adapter", "load", "poet"]) == 0
    assert capsys.readouterr().out == f"loaded poet: rank 8, 3.0 MiB, digest {'ab' * 8}\n"
    assert app.main(["adapter", "unload", "poet"]) == 0
    assert capsys.readouterr().out == "poet leaves when the 2 requests that run with it are over\n"
    stub.adapter = AdapterInfo("poet", "unloaded")
    assert app.main(["adapter", "unload", "poet"]) == 0
    assert capsys.readouterr().out == "unloaded poet\n"
    assert app.main(["adapter", "unload", "poet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "unloaded"
    assert [call[0] for call in stub.calls] == ["load", "unload", "unload", "unload"]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (NotFound("no adapter is named 'poet'", code="not_found"), Exit.NO_INPUT),
        (AdapterUnusable("adapter poet: use_dora is set", code="adapter_unusable"), Exit.DATA),
        (AdapterCapacity("all 4 adapters are in use", code="adapter_capacity", retryable=True), Exit.TEMPORARY),
    ],
)
def test_failures_have_their_exit_codes(stub, capsys, failure, code):
    stub.failure = failure
    assert app.main(["adapter", "load", "poet"]) == code
    assert capsys.readouterr().err == f"kvd: {failure}\n"


def test_requests_and_pins_name_an_adapter(stub, tmp_path):
    assert app.main(["generate", "--prompt", "Roses", "--adapter", "poet"]) == 0
    (tmp_path / "prompt.txt").write_text("x" * 99)
    assert app.main(["pin", "verses", "--prompt-file", str(tmp_path / "prompt.txt"), "--adapter", "poet"]) == 0
    assert stub.calls == [("generate", ("Roses",), {"adapter": "poet"}), ("pin", ("verses", "poet"), {})]


def test_status_names_the_loaded_ones():
    loaded = [{"name": "poet", "requests": 2}, {"name": "clerk", "requests": 0}]
    facts = dict(_status_facts({"adapters": {"max_adapters": 4, "loaded": loaded, "waiting": 1}}))
    assert facts["adapters"] == "poet (2 requests), clerk (0 requests); 4 may be loaded, 1 requests wait for one"
    unloading = {"max_adapters": 4, "loaded": loaded[:1], "unloading": [{"requests": 3}], "waiting": 0}
    assert dict(_status_facts({"adapters": unloading}))["adapters"].startswith("poet (2 requests), 1 unloading (3 requests); 4 may")
    assert "none loaded" in dict(_status_facts({"adapters": {"max_adapters": 4, "loaded": [], "waiting": 0}}))["adapters"]
    assert "adapters" not in dict(_status_facts({"adapters": {"max_adapters": 0, "loaded": [], "waiting": 0}}))
