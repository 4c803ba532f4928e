"""Tenants over real sockets: CURVE keys, the kernel's credentials, and peers that state what they are not."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import zmq
from kvd_client.protocol.codec import encode
from kvd_client.protocol.messages import Generate, Ping, Pong

from kvd.cache.tenants import tenant_salt
from kvd.commands import Submit

pytestmark = pytest.mark.socket

ID = bytes(range(16))


def salts(running):
    return [command.tenant_salt for command in running.engine.engine.commands if isinstance(command, Submit)]


def ask(client, number=0):
    client.send(Generate(request_id=bytes([number]) * 16, input="text", max_tokens=1), b"abc")
    while type(client.receive()[0]).__name__ != "Finished":
        pass


@pytest.fixture
def curve(tmp_path):
    server_public, server_secret = zmq.curve_keypair()
    pairs = [zmq.curve_keypair() for _ in range(3)]
    (tmp_path / "key").write_bytes(server_secret)
    (tmp_path / "key").chmod(0o600)
    names = ["acme", "rival", "# of nobody"]
    (tmp_path / "clients").write_text("".join(f"{public.decode()} {name}\n" for (public, _), name in zip(pairs, names, strict=True)))
    options = [{"curve_serverkey": server_public, "curve_publickey": public, "curve_secretkey": secret} for public, secret in pairs]
    return {"curve_key_file": str(tmp_path / "key"), "curve_clients_file": str(tmp_path / "clients")}, options


def test_a_key_is_its_tenants(start_server, connect, curve):
    files, options = curve
    running = start_server(listen=("tcp://127.0.0.1:*",), **files)
    for number, each in enumerate(options):
        ask(connect(running.url, **each), number)
    assert salts(running) == [tenant_salt("acme", b""), tenant_salt("rival", b""), b""]


def raw_zmtp(path, properties):
    """A hand-made NULL handshake whose metadata states what it likes, and then a message."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(60)
    peer.connect(path)
    peer.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31))
    greeting = b""
    while len(greeting) < 64:
        greeting += peer.recv(64 - len(greeting))
    metadata = b"".join(bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in properties)
    ready = b"\x05READY" + metadata
    peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
    return peer


def test_what_a_peer_states_in_its_handshake_is_not_believed(start_server, tmp_path):
    running = start_server(ipc_tenants="uid")
    path = running.url.removeprefix("ipc://")
    forged = [(b"Peer-Address", b"localhost:4242:0:1"), (b"User-Id", b"tenant=acme"), (b"Socket-Type", b"DEALER"), (b"Identity", ID)]
    with raw_zmtp(path, forged) as peer:
        frames = encode(Generate(request_id=ID, input="text", max_tokens=1), b"abc")
        for index, frame in enumerate(frames):
            flags = (index < len(frames) - 1) | 2
            peer.sendall(bytes([flags]) + struct.pack(">Q", len(frame)) + frame)
        deadline_s = time.monotonic() + 60
        while not salts(running) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert salts(running) == [tenant_salt(f"uid:{os.geteuid()}", b"")]


_AS_NOBODY = """
import os, sys
import zmq
from kvd_client.protocol.codec import encode
from kvd_client.protocol.messages import Generate
frames = encode(Generate(request_id=b"n" * 16, input="text", max_tokens=1), b"abc")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
dealer = zmq.Context().socket(zmq.DEALER)
dealer.linger = 0
dealer.routing_id = b"i" * 16
dealer.connect(sys.argv[1])
dealer.send_multipart(frames)
sys.exit(0 if dealer.poll(20000) else 1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_each_user_of_the_machine_is_a_tenant(start_server, connect):
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as folder:
        Path(folder).chmod(0o755)
        running = start_server(ipc_tenants="uid", listen=(f"ipc://{folder}/s",))
        Path(folder, "s").chmod(0o666)
        ask(connect(running.url))
        subprocess.run([sys.executable, "-c", _AS_NOBODY, running.url], check=True, timeout=60)
        assert salts(running) == [tenant_salt("uid:0", b""), tenant_salt("uid:65534", b"")]


def test_without_uids_an_ipc_client_has_no_tenant(start_server, connect):
    running = start_server()
    client = connect(running.url)
    ask(client)
    assert salts(running) == [b""]
    assert isinstance(client.ask(Ping())[0], Pong)
