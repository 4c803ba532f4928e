"""``kvd serve`` against a stub of the daemon: the configuration it runs with, the model it finds or offers to pull, and what it refuses."""

from __future__ import annotations

import sys
import types

import pytest

from kvd.cli import app, serve
from kvd.cli.exits import Exit
from kvd.config import ConfigError


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    """A stub of the composition root; returns the list of configurations that it was run with."""
    runs = []
    module = types.ModuleType("kvd.daemon_process")
    module.run = lambda config: runs.append(config) or 7
    monkeypatch.setitem(sys.modules, "kvd.daemon_process", module)
    monkeypatch.setattr("kvd.observe.logging.configure", lambda **_: None)
    monkeypatch.setenv("KVD_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KVD_CONFIG", raising=False)
    return runs


def test_serve_runs_the_daemon_with_the_loaded_configuration(daemon, tmp_path):
    arguments = [
        "serve",
        "--executor",
        "fake",
        "--max-running",
        "3",
        "--listen",
        "tcp://127.0.0.1:1",
        "--listen",
        "ipc:///x",
        "--no-persist",
    ]
    assert app.main(arguments) == 7, "the daemon's exit status is the command's"
    (config,) = daemon
    assert config.scheduler.max_running == 3
    assert config.transport.listen == ("tcp://127.0.0.1:1", "ipc:///x")
    assert config.storage.persist is False
    assert config.storage.state_dir == tmp_path / "state" / "kvd"


def test_serve_without_the_model_names_the_one_command(daemon, capsys):
    assert app.main(["serve"]) == Exit.CONFIG
    assert capsys.readouterr().err == "kvd: model.model: smollm2 is not on this machine; run: kvd pull smollm2\n"
    assert daemon == []


def test_serve_resolves_the_models_name(daemon, tmp_path):
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"weights")
    assert app.main(["serve", "--model", "smollm2"]) == 7
    assert daemon[0].model.model == str(path)


def test_serve_offers_to_pull_on_a_terminal(daemon, tmp_path, monkeypatch):
    asked = []
    path = tmp_path / "pulled.gguf"
    monkeypatch.setattr(serve.sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(serve.sys, "stderr", types.SimpleNamespace(isatty=lambda: True, write=lambda _: None, flush=lambda: None))
    monkeypatch.setattr("click.confirm", lambda question, **_: asked.append(question) or True)
    monkeypatch.setattr("kvd.cli.pull.pull", lambda name: path if name == "smollm2" else None)
    assert app.main(["serve"]) == 7
    assert "smollm2" in asked[0]
    assert daemon[0].model.model == str(path)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    assert app.main(["serve"]) == Exit.CONFIG


def test_print_config_needs_no_model_and_starts_nothing(daemon, capsys):
    assert app.main(["serve", "--print-config", "--kv-memory", "2GiB"]) == 0
    assert 'kv_memory = "2GiB"' in capsys.readouterr().out
    assert daemon == []


def test_a_wrong_value_exits_78(daemon, capsys):
    assert app.main(["serve", "--max-running", "0"]) == Exit.CONFIG
    assert "flag --max-running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("device = 'cuda': torch finds no CUDA device here", "device = 'cuda': torch finds no CUDA device here (from env KVD_DEVICE)"),
        ("a model that can't be read", "a model that can't be read"),
    ],
)
def test_what_the_daemon_refuses_at_its_start_names_the_values_origin(daemon, monkeypatch, capsys, message, shown):
    def refuse(_config):
        raise ConfigError(message)

    monkeypatch.setattr(sys.modules["kvd.daemon_process"], "run", refuse)
    monkeypatch.setenv("KVD_DEVICE", "cuda")
    assert app.main(["serve", "--executor", "fake"]) == Exit.CONFIG
    assert capsys.readouterr().err == f"kvd: {shown}\n"
