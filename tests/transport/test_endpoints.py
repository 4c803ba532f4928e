"""Endpoints: parsing, exposure, and where the socket lives by default."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from kvd.transport.endpoints import (
    IpcEndpoint,
    TcpEndpoint,
    check_exposure,
    close_ipc,
    may_make_directory,
    open_ipc,
    parse_endpoint,
    resolve_listen,
)
from kvd.transport.errors import EndpointError


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("ipc:///run/kvd/kvd.sock", IpcEndpoint(Path("/run/kvd/kvd.sock"))),
        ("tcp://127.0.0.1:5555", TcpEndpoint("127.0.0.1", 5555)),
        ("tcp://[::1]:5555", TcpEndpoint("::1", 5555)),
        ("tcp://localhost:*", TcpEndpoint("localhost", 0)),
        ("tcp://*:0", TcpEndpoint("*", 0)),
    ],
)
def test_endpoints_are_read(url, endpoint):
    assert parse_endpoint(url) == endpoint


@pytest.mark.parametrize(
    "url",
    ["", "kvd.sock", "http://x", "ipc://", "ipc://kvd.sock", "ipc://@abstract", "ipc:///" + "x" * 110, "tcp://", "tcp://1.2.3.4",
     "tcp://:5", "tcp://h:x", "tcp://h:65536", "tcp://h:-1", "tcp://h:²"],
)  # fmt: skip
def test_what_is_no_endpoint_is_named(url):
    with pytest.raises(EndpointError, match=r"tcp://|ipc://|an endpoint is"):
        parse_endpoint(url)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("*", False),
        ("eth0", False),
        ("10.0.0.1", False),
    ],
)
def test_loopback(host, expected):
    endpoint = TcpEndpoint(host, 1)
    assert endpoint.is_loopback is expected
    check_exposure(endpoint, has_curve=True, allow_plain_tcp=False)
    check_exposure(endpoint, has_curve=False, allow_plain_tcp=True)
    if not expected:
        with pytest.raises(EndpointError, match="CURVE"):
            check_exposure(endpoint, has_curve=False, allow_plain_tcp=False)


def test_the_default_endpoint_is_where_clients_look():
    assert resolve_listen((), {"RUNTIME_DIRECTORY": "/run/kvd:/run/other"}) == (IpcEndpoint(Path("/run/kvd/kvd.sock")),)


def test_an_endpoint_named_twice_is_refused():
    with pytest.raises(EndpointError, match="twice"):
        resolve_listen(("tcp://127.0.0.1:5", "tcp://127.0.0.1:5"))
    assert len(resolve_listen(("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"))) == 2


def test_the_file_of_another_daemon_is_not_removed(tmp_path):
    endpoint = IpcEndpoint(tmp_path / "s")
    ours = open_ipc(endpoint)
    inode = endpoint.path.stat().st_ino
    ours.close()
    endpoint.path.rename(tmp_path / "old")
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(endpoint.path))
        close_ipc(endpoint, inode)
        assert endpoint.path.exists()
    close_ipc(IpcEndpoint(tmp_path / "old"), inode)
    assert not (tmp_path / "old").exists()
    close_ipc(IpcEndpoint(tmp_path / "old"), inode)


def test_only_the_directories_where_clients_look_by_default_are_made(tmp_path, monkeypatch):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "RUNTIME_DIRECTORY": f"{tmp_path}/one:{tmp_path}/two"}
    home = Path(f"/tmp/kvd-{os.getuid()}")
    for directory in (tmp_path / "kvd", tmp_path / "one", tmp_path / "two", home):
        assert may_make_directory(directory, environ)
    for directory in (tmp_path / "kvd" / "deeper", tmp_path / "kdv", tmp_path / "three"):
        assert not may_make_directory(directory, environ)
    assert not may_make_directory(tmp_path / "kvd", {})
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    open_ipc(IpcEndpoint(tmp_path / "kvd" / "s")).close()
    with pytest.raises(EndpointError, match=r"kdv does not exist; make it first"):
        open_ipc(IpcEndpoint(tmp_path / "kdv" / "s"))
    assert not (tmp_path / "kdv").exists()


def test_a_path_that_cannot_be_used_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EndpointError, match="file/s"):
        open_ipc(IpcEndpoint(tmp_path / "file" / "s"))


def test_a_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    uid = tmp_path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    if uid == 0:
        shutil.chown(tmp_path, 12345)
    with pytest.raises(EndpointError, match="another user"):
        open_ipc(IpcEndpoint(tmp_path / "s"))
