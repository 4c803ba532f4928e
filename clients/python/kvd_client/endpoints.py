"""Where the daemon listens and where a client looks for it when nobody says.

Both functions only read the environment and the file system; neither creates a directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SYSTEM_SOCKET = Path("/run/kvd/kvd.sock")
"""Where the systemd unit's daemon listens."""


def default_endpoint(environ: Mapping[str, str] | None = None) -> str:
    """The endpoint that a client connects to by default.

    In this order: ``$KVD_CONNECT``; the user's own daemon (:func:`user_socket`) where its socket exists; the system's daemon
    (``/run/kvd/kvd.sock``) where its socket exists; else the user's, so that a daemon started later is found there.
    """
    environ = os.environ if environ is None else environ
    if explicit := environ.get("KVD_CONNECT"):
        return explicit
    own = user_socket(environ)
    if not _is_own_socket(own) and SYSTEM_SOCKET.exists():
        return f"ipc://{SYSTEM_SOCKET}"
    return f"ipc://{own}"


def default_listen_endpoint(environ: Mapping[str, str] | None = None) -> str:
    """The endpoint that a daemon binds by default: ``kvd.sock`` in ``$RUNTIME_DIRECTORY`` (set by systemd), else :func:`user_socket`."""
    environ = os.environ if environ is None else environ
    if runtime_directories := environ.get("RUNTIME_DIRECTORY"):
        return f"ipc://{Path(runtime_directories.split(':')[0]) / 'kvd.sock'}"
    return f"ipc://{user_socket(environ)}"


def user_socket(environ: Mapping[str, str] | None = None) -> Path:
    """The socket of the user's own daemon: ``$XDG_RUNTIME_DIR/kvd/kvd.sock``, without that directory ``/tmp/kvd-<uid>/kvd.sock``."""
    environ = os.environ if environ is None else environ
    runtime_dir = environ.get("XDG_RUNTIME_DIR")
    if runtime_dir and Path(runtime_dir).is_dir():
        return Path(runtime_dir) / "kvd" / "kvd.sock"
    return Path(f"/tmp/kvd-{os.getuid()}/kvd.sock")  # noqa: S108 - not TMPDIR, which daemon and client may see differently


def _is_own_socket(path: Path) -> bool:
    """Whether the socket is there in a directory of ours: in /tmp anybody may have made it."""
    try:
        return path.parent.stat().st_uid == os.getuid() and path.exists()
    except OSError:
        return False
