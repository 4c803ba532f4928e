"""Keys of two tenants over tcp, beside clients without a tenant over ipc."""

from __future__ import annotations

from pathlib import Path

import zmq
from held_port import HeldPort


class TwoTenants:
    """Writes what a daemon must be given, and dials as the one or the other."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self._port = HeldPort()
        self._url = f"tcp://127.0.0.1:{self._port.number}"
        self._server_key, secret = zmq.curve_keypair()
        key_file, clients_file = root / "curve.key", root / "curve.clients"
        key_file.write_bytes(secret)
        key_file.chmod(0o600)
        self._pairs = [zmq.curve_keypair() for _ in range(2)]
        clients_file.write_text("".join(f"{public.decode()} tenant-{number}\n" for number, (public, _) in enumerate(self._pairs)))
        self.flags = ("--listen", self._url, "--curve-key-file", str(key_file), "--curve-clients-file", str(clients_file))

    def close(self) -> None:
        """When the daemon is over."""
        self._port.close()

    def connect(self, peer: zmq.Socket[bytes], number: int) -> None:
        """Connect a socket as tenant ``number``."""
        public, secret = self._pairs[number]
        peer.setsockopt(zmq.CURVE_SERVERKEY, self._server_key)
        peer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        peer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        peer.connect(self._url)
