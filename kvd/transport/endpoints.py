"""Endpoints: what may be listened on, and the files behind ``ipc://`` ones. Imports no ZeroMQ."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvd_client.endpoints import default_listen_endpoint, user_socket

from kvd.transport.errors import EndpointError, EndpointInUseError

SOCKET_MODE = 0o660
_DIRECTORY_MODE = 0o750
_BACKLOG = 128
_MAX_PATH_BYTES = 107
"""``sun_path`` of Linux, less its terminator."""


@dataclass(frozen=True, slots=True)
class IpcEndpoint:
    """A Unix socket."""

    path: Path

    @property
    def url(self) -> str:
        """As in the configuration."""
        return f"ipc://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    """An address and a port; port 0 lets the system choose."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """As in the configuration."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. Names other than ``localhost`` count as reachable from outside."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


Endpoint = IpcEndpoint | TcpEndpoint


def parse_endpoint(url: str) -> Endpoint:
    """Read an ``ipc://`` or ``tcp://`` endpoint.

    Raises:
        EndpointError: neither, or not a path or address that can be listened on.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "ipc":
        return _parse_ipc(url, rest)
    if separator and scheme == "tcp":
        return _parse_tcp(url, rest)
    raise EndpointError(f"{url}: an endpoint is ipc:///path/of/socket or tcp://address:port")


def resolve_listen(listen: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> tuple[Endpoint, ...]:
    """The endpoints to open: those configured, or the one where clients look by default.

    Raises:
        EndpointError: see ``parse_endpoint``; or one is named twice.
    """
    endpoints = tuple(map(parse_endpoint, listen or (default_listen_endpoint(environ),)))
    for endpoint in endpoints:
        if endpoints.count(endpoint) > 1 and not (isinstance(endpoint, TcpEndpoint) and not endpoint.port):
            raise EndpointError(f"{endpoint.url}: named twice")
    return endpoints


def check_exposure(endpoint: Endpoint, *, has_curve: bool, allow_plain_tcp: bool) -> None:
    """Refuse to offer unencrypted, unauthenticated tcp to other machines.

    Raises:
        EndpointError: that is what the endpoint would do.
    """
    if isinstance(endpoint, TcpEndpoint) and not (endpoint.is_loopback or has_curve or allow_plain_tcp):
        raise EndpointError(
            f"{endpoint.url}: reachable from other machines without CURVE; set curve_key_file and curve_clients_file, "
            "or allow_plain_tcp if the network is trusted"
        )


def open_ipc(endpoint: IpcEndpoint) -> socket.socket:
    """A listening Unix socket, readable and writable for owner and group, on a path that nobody else listens on.

    The socket is bound here rather than by ZeroMQ, which would take the path away from a daemon that is using it, and whose file mode
    depends on the umask. Nobody can connect before ``listen``, so the mode is right from the first connection.

    Raises:
        EndpointInUseError: somebody listens there.
        EndpointError: something else is in the way, or the path can't be used.
    """
    path = endpoint.path
    try:
        if not path.parent.exists():
            if not may_make_directory(path.parent):
                raise EndpointError(f"{endpoint.url}: the directory {path.parent} does not exist; make it first")
            path.parent.mkdir(mode=_DIRECTORY_MODE, parents=True)
        if path.parent.stat().st_uid not in {0, os.geteuid()}:
            raise EndpointError(f"{endpoint.url}: the directory belongs to another user, who could put another socket there")
        _remove_stale(endpoint)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(SOCKET_MODE)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        kind = EndpointInUseError if error.errno == errno.EADDRINUSE else EndpointError
        raise kind(f"{endpoint.url}: {error.strerror or error}") from error
    return listener


def may_make_directory(directory: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a missing directory of a socket is one of the daemon's own, where clients look by default; any other is somebody's typing error."""
    own = {Path("/tmp") / f"kvd-{os.getuid()}", user_socket(environ).parent}  # noqa: S108  both homes of user_socket
    own.update(Path(each) for each in environ.get("RUNTIME_DIRECTORY", "").split(":") if each)
    return directory in own


def close_ipc(endpoint: IpcEndpoint, inode: int) -> None:
    """Remove the socket's file, unless another daemon's stands there by now."""
    try:
        if endpoint.path.lstat().st_ino == inode:
            endpoint.path.unlink()
    except OSError:
        return  # gone already, or not ours to remove: nothing depends on it


def _parse_ipc(url: str, rest: str) -> IpcEndpoint:
    if rest.startswith("@"):
        raise EndpointError(f"{url}: abstract sockets have no file mode, so anybody on the machine could connect; use a path")
    if not rest.startswith("/"):
        raise EndpointError(f"{url}: the path must be absolute")
    if len(os.fsencode(rest)) > _MAX_PATH_BYTES:
        raise EndpointError(f"{url}: the path is longer than the {_MAX_PATH_BYTES} bytes that a Unix socket may have")
    return IpcEndpoint(Path(rest))


def _parse_tcp(url: str, rest: str) -> TcpEndpoint:
    host, separator, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host:
        raise EndpointError(f"{url}: needs an address and a port, as in tcp://127.0.0.1:5555")
    if port in {"*", "0"}:
        return TcpEndpoint(host, 0)
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise EndpointError(f"{url}: {port!r} is not a port (1 to 65535, or * for any free one)")
    return TcpEndpoint(host, int(port))


def _remove_stale(endpoint: IpcEndpoint) -> None:
    """Remove a socket that a dead daemon left behind; refuse to touch anything else."""
    path = endpoint.path
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise EndpointError(f"{endpoint.url}: a file that is not a socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        outcome = probe.connect_ex(str(path))
    if outcome == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
    elif outcome in {0, errno.EAGAIN, errno.EINPROGRESS}:
        raise EndpointInUseError(f"{endpoint.url}: another process listens here")
    elif outcome != errno.ENOENT:
        raise EndpointError(f"{endpoint.url}: the socket that is there can't be tried: {os.strerror(outcome)}")
