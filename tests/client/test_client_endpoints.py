"""Where client and daemon meet by default."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvd_client import endpoints


@pytest.fixture
def system_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "system" / "kvd.sock"
    path.parent.mkdir()
    monkeypatch.setattr(endpoints, "SYSTEM_SOCKET", path)
    return path


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run-user"
    (path / "kvd").mkdir(parents=True)
    return path


def test_an_explicit_endpoint_wins(runtime_dir: Path) -> None:
    assert endpoints.default_endpoint({"KVD_CONNECT": "tcp://h:1", "XDG_RUNTIME_DIR": str(runtime_dir)}) == "tcp://h:1"


def test_the_users_daemon_then_the_systems_then_the_users_to_come(system_socket: Path, runtime_dir: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(runtime_dir)}
    own = runtime_dir / "kvd" / "kvd.sock"
    assert endpoints.default_endpoint(environ) == f"ipc://{own}"
    system_socket.touch()
    assert endpoints.default_endpoint(environ) == f"ipc://{system_socket}"
    own.touch()
    assert endpoints.default_endpoint(environ) == f"ipc://{own}"


def test_the_daemon_listens_where_systemd_says_else_where_clients_look(runtime_dir: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(runtime_dir)}
    assert endpoints.default_listen_endpoint({"RUNTIME_DIRECTORY": "/run/kvd:/run/other", **environ}) == "ipc:///run/kvd/kvd.sock"
    assert endpoints.default_listen_endpoint(environ) == endpoints.default_endpoint(environ) == f"ipc://{runtime_dir}/kvd/kvd.sock"


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "/nowhere/at/all"}])
def test_without_a_runtime_directory_it_is_tmp(environ: dict[str, str]) -> None:
    assert endpoints.default_listen_endpoint(environ) == f"ipc:///tmp/kvd-{os.getuid()}/kvd.sock"


def test_a_socket_in_anothers_directory_is_not_trusted(system_socket: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime_dir / "kvd" / "kvd.sock").touch()
    system_socket.touch()
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert endpoints.default_endpoint({"XDG_RUNTIME_DIR": str(runtime_dir)}) == f"ipc://{system_socket}"


def test_the_protocol_and_the_session_load_neither_sockets_nor_the_daemon() -> None:
    program = (
        "import sys\nimport kvd_client, kvd_client.session, kvd_client.endpoints, kvd_client.protocol.codec\n"
        "print(sorted({'zmq', 'asyncio', 'kvd', 'torch'} & sys.modules.keys()))\n"
        "print(len([getattr(kvd_client, name) for name in ('KvdError', 'Completion', 'default_endpoint')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n3\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import kvd_client

    with pytest.raises(AttributeError, match="Cleint"):
        _ = kvd_client.Cleint
