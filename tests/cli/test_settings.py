"""The configuration loader: precedence, origins, and errors that say what is wrong where."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.config import ConfigError, DaemonConfig
from kvd.settings import loader as settings
from kvd.settings.units import format_size, human_duration, human_size, parse_size

KEYS = {key.name: key for key in settings.all_keys()}


def load(flags=None, environ=None, toml: str | None = None, path: Path | None = None):
    if toml is not None:
        path.write_text(toml, encoding="utf-8")
    return settings.load(flags or {}, environ=environ or {}, config_file=path)


def test_flat_names_are_unique_and_cover_the_configuration():
    config = DaemonConfig()
    names = [key.name for key in settings.all_keys()]
    assert len(names) == len(set(names))
    for key in settings.all_keys():
        assert getattr(getattr(config, key.section), key.name) == key.default
        assert key.doc
        assert key.rule.holds(key.default), f"the default of {key.name} breaks its own rule"


def test_defaults_alone(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    loaded = load()
    assert loaded.config.scheduler == DaemonConfig().scheduler
    assert loaded.config.storage.state_dir == Path("/home/somebody/.local/state/kvd")
    assert set(loaded.origins.values()) == {"default"}


def test_precedence_flag_environment_file_default(tmp_path):
    path = tmp_path / "kvd.toml"
    toml = "[scheduler]\nmax_running = 1\nmax_waiting = 1\nmax_choices = 1\n"
    loaded = load({"max_running": "3"}, {"KVD_MAX_RUNNING": "2", "KVD_MAX_WAITING": "2"}, toml, path)
    scheduler = loaded.config.scheduler
    assert (scheduler.max_running, scheduler.max_waiting, scheduler.max_choices) == (3, 2, 1)
    assert scheduler.max_tokens_per_step == DaemonConfig().scheduler.max_tokens_per_step
    assert loaded.origins["max_running"] == "flag --max-running"
    assert loaded.origins["max_waiting"] == "env KVD_MAX_WAITING"
    assert loaded.origins["max_choices"] == f"{path}:scheduler.max_choices"
    assert loaded.origins["max_tokens_per_step"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path):
    path = tmp_path / "kvd.toml"
    path.write_text("[observe]\nlog_level = 'debug'\n", encoding="utf-8")
    assert settings.load({}, environ={"KVD_CONFIG": str(path)}).config.observe.log_level == "debug"


def test_every_kind_of_value_from_each_place(tmp_path):
    path = tmp_path / "kvd.toml"
    toml = f"""
[model]
fake_step_ms = 2
[cache]
kv_memory = "1.5GiB"
[transport]
listen = ["ipc://{tmp_path}/a.sock", "tcp://127.0.0.1:7000"]
allow_plain_tcp = true
[storage]
state_dir = "{tmp_path}/state"
store_max_bytes = 1073741824
"""
    config = load(toml=toml, path=path).config
    assert config.model.fake_step_ms == 2.0
    assert isinstance(config.model.fake_step_ms, float)
    assert config.cache.kv_memory == 3 << 29
    assert config.transport.listen == (f"ipc://{tmp_path}/a.sock", "tcp://127.0.0.1:7000")
    assert config.transport.allow_plain_tcp is True
    assert config.storage.state_dir == tmp_path / "state"
    assert config.storage.store_max_bytes == 1 << 30
    environ = {
        "KVD_FAKE_STEP_MS": "0.5",
        "KVD_KV_MEMORY": "512MiB",
        "KVD_LISTEN": "tcp://127.0.0.1:1, tcp://127.0.0.1:2",
        "KVD_PERSIST": "no",
        "KVD_STATE_DIR": str(tmp_path / "other"),
    }
    config = load(environ=environ).config
    assert config.model.fake_step_ms == 0.5
    assert config.cache.kv_memory == 512 << 20
    assert config.transport.listen == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    assert config.storage.persist is False
    assert config.storage.state_dir == tmp_path / "other"
    config = load({"persist": False, "listen": ("tcp://127.0.0.1:9",), "kv_memory": "4096"}).config
    assert (config.storage.persist, config.transport.listen, config.cache.kv_memory) == (False, ("tcp://127.0.0.1:9",), 4096)


def test_an_empty_variable_is_unset():
    assert load(environ={"KVD_MAX_RUNNING": ""}).config.scheduler.max_running == DaemonConfig().scheduler.max_running


@pytest.mark.parametrize(
    ("environ", "directory", "origin"),
    [
        ({"STATE_DIRECTORY": "/var/lib/kvd:/var/lib/more", "XDG_STATE_HOME": "/x"}, "/var/lib/kvd", "env STATE_DIRECTORY"),
        ({"XDG_STATE_HOME": "/x"}, "/x/kvd", "env XDG_STATE_HOME"),
        ({"KVD_STATE_DIR": "/named", "STATE_DIRECTORY": "/var/lib/kvd"}, "/named", "env KVD_STATE_DIR"),
    ],
)
def test_the_state_directory_follows_the_service_manager_then_the_user(environ, directory, origin):
    loaded = load(environ=environ)
    assert loaded.config.storage.state_dir == Path(directory)
    assert loaded.origins["state_dir"] == origin


def test_the_default_endpoint_fills_an_empty_listen():
    loaded = settings.load({}, environ={}, default_listen=lambda: "ipc:///run/x.sock")
    assert loaded.config.transport.listen == ("ipc:///run/x.sock",)
    given = settings.load({"listen": ("tcp://127.0.0.1:1",)}, environ={}, default_listen=lambda: "ipc:///run/x.sock")
    assert given.config.transport.listen == ("tcp://127.0.0.1:1",)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[scheduler]\nmax_runing = 1", ["scheduler.max_runing", "did you mean max_running?"]),
        ("[schedular]\nmax_running = 1", ["[schedular]", "did you mean scheduler?"]),
        ("[cache]\nmax_running = 1", ["max_running", "[cache]", "belongs under [scheduler]"]),
        ("max_running = 1", ["max_running", "belongs under [scheduler]"]),
        ("[scheduler]\nzzz = 1", ["scheduler.zzz", "known: max_running, max_waiting"]),
        ("[scheduler]\nmax_running = '1'", ["scheduler.max_running", "'1'", "whole number"]),
        ("[scheduler]\nmax_running = true", ["scheduler.max_running", "True", "whole number"]),
        ("[scheduler]\nmax_running = 1.5", ["scheduler.max_running", "1.5"]),
        ("[scheduler]\nmax_running = 0", ["scheduler.max_running", "1 or more"]),
        ("[storage]\npersist = 1", ["storage.persist", "true or false"]),
        ("[transport]\nlisten = 'tcp://127.0.0.1:1'", ["transport.listen"]),
        ("[transport]\nlisten = ['http://x']", ["transport.listen", "ipc:///PATH"]),
        ("[cache]\nkv_memory = '1GB'", ["cache.kv_memory", "'1GB'", "MiB"]),
        ("[cache]\nfree_watermark = nan", ["cache.free_watermark", "nan"]),
        ("[storage]\ncheckpoint_interval_s = inf", ["storage.checkpoint_interval_s", "inf"]),
        ("[scheduler\n", ["line 1"]),
    ],
)
def test_an_error_in_the_file_names_file_key_and_what_is_allowed(tmp_path, toml, words):
    path = tmp_path / "kvd.toml"
    with pytest.raises(ConfigError) as caught:
        load(toml=toml, path=path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(path=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"max_running": "many"}, {}, ["scheduler.max_running", "'many'", "flag --max-running", "1 or more"]),
        ({"block_size_tokens": "24"}, {}, ["cache.block_size_tokens", "24", "power of two"]),
        ({"device": "gpu"}, {}, ["model.device", "`cuda:N`"]),
        ({"threads": "1025"}, {}, ["model.threads", "1025", "0 to 1024"]),
        ({"template_date": "2025-2-1"}, {}, ["transport.template_date", "YYYY-MM-DD"]),
        ({}, {"KVD_PERSIST": "maybe"}, ["storage.persist", "env KVD_PERSIST", "true or false"]),
        ({}, {"KVD_MAX_PINNED_FRACTION": "1.5"}, ["cache.max_pinned_fraction", "0 to 1", "env KVD_MAX_PINNED_FRACTION"]),
        ({}, {"KVD_MAX_RUNING": "3"}, ["KVD_MAX_RUNING", "did you mean KVD_MAX_RUNNING?"]),
        ({"dtype": "float16", "device": "cpu"}, {}, ["model.dtype", "flag --dtype", "flag --device"]),
        ({"executor": "fake", "draft_model": "smollm2"}, {}, ["speculative.draft_model", "flag --draft-model", "flag --executor"]),
        ({"curve_key_file": "/k"}, {}, ["curve_clients_file is missing"]),
        ({"curve_clients_file": "/k"}, {}, ["curve_key_file is missing"]),
        ({"wal_segment_bytes": "64MiB"}, {}, ["storage.wal_max_bytes", "two segments"]),
    ],
)
def test_an_error_in_a_flag_or_variable_names_it(flags, environ, words):
    with pytest.raises(ConfigError) as caught:
        load(flags, environ)
    for word in words:
        assert word in str(caught.value)


def test_variables_of_others_are_left_alone():
    load(environ={"KVD_PORT_7411_TCP_ADDR": "10.0.0.1", "KVD_SERVICE_HOST": "10.0.0.1", "KVD_FAILPOINTS": "", "KVD_CONNECT": "ipc://x"})


def test_an_open_tcp_endpoint_needs_curve_or_consent():
    endpoint = ("tcp://0.0.0.0:7411",)
    with pytest.raises(ConfigError, match=r"transport\.listen: tcp://0\.0\.0\.0:7411.*allow_plain_tcp from default"):
        load({"listen": endpoint})
    assert load({"listen": endpoint, "allow_plain_tcp": True}).config.transport.listen == endpoint
    assert load({"listen": endpoint, "curve_key_file": "/k", "curve_clients_file": "/c"}).config.transport.listen == endpoint


@pytest.mark.parametrize(
    "endpoint", ["ipc://", "ipc://relative", "ipc:///" + "x" * 107, "tcp://10.0.0.1", "tcp://127.0.0.1:70000", "udp://127.0.0.1:1"]
)
def test_what_is_no_endpoint(endpoint):
    with pytest.raises(ConfigError, match=r"transport\.listen.*ipc:///PATH"):
        load({"listen": (endpoint,)})


def test_printed_configuration_is_toml_and_loads_as_itself(tmp_path):
    flags = {
        "kv_memory": "1GiB",
        "listen": ("tcp://127.0.0.1:1",),
        "state_dir": str(tmp_path / 'with "quotes"'),
        "persist": False,
        "threads": "3",
    }
    loaded = load(flags, {"KVD_LOG_LEVEL": "debug"})
    text = settings.render(loaded)
    assert tomllib.loads(text)["cache"]["kv_memory"] == "1GiB"
    again = load(toml=text, path=tmp_path / "printed.toml")
    assert again.config == loaded.config
    line = next(line for line in text.splitlines() if line.startswith("kv_memory"))
    assert line.split("#")[1].strip() == "flag --kv-memory"
    assert "# env KVD_LOG_LEVEL" in text


@given(st.integers(min_value=0, max_value=1 << 60))
def test_sizes_read_back_as_written(num_bytes):
    assert parse_size(format_size(num_bytes)) == num_bytes


@pytest.mark.parametrize(("text", "num_bytes"), [("0", 0), ("1KiB", 1024), ("2 mib", 2 << 20), ("1.5GiB", 3 << 29), ("7b", 7), (" 8 ", 8)])
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "1MB", "1k", "-1", "1e9", "0x10", "1 GiB 2", "١"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError):
        parse_size(text)


def test_sizes_and_times_for_people():
    assert [human_size(value) for value in (0, 1023, 1024, 1500 << 20)] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB"]
    assert [human_duration(value) for value in (0.25, 59, 60, 3725, 90061)] == ["0.2s", "59s", "1m 0s", "1h 2m", "1d 1h"]


def test_the_packaged_configuration_file_is_right_when_its_examples_are_switched_on(tmp_path):
    lines = (Path(__file__).parents[2] / "systemd" / "kvd.toml").read_text("utf-8").splitlines()
    examples = [line.removeprefix("# ") if line.startswith("# ") and " = " in line else line for line in lines]
    load(toml="\n".join(examples), path=tmp_path / "kvd.toml")
