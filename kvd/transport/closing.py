"""What the kernel still holds for peers when the sockets close.

libzmq closes a connection as soon as the kernel has the bytes. On a Unix socket the peer's libzmq sees the hang-up at once and, if its
reader is behind, gives up what it has not read. So each connection is held open until its peer has read everything. TCP needs none of
this: there the end comes in its turn, after the data.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import stat
import termios
import time
from collections.abc import Collection
from pathlib import Path

_POLL_S = 0.01
_FDS = Path("/proc/self/fd")


def hold_connections(paths: Collection[str]) -> list[socket.socket]:
    """Duplicates of this process's accepted connections of the listening Unix sockets at ``paths``; none where there is no /proc."""
    held: dict[int, socket.socket] = {}
    for fd in [int(each.name) for each in _FDS.iterdir()] if _FDS.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if fd not in held and stat.S_ISSOCK(os.fstat(fd).st_mode):  # a duplicate may have got the number of what read the directory
                connection = socket.socket(fileno=os.dup(fd))
                if _is_accepted(connection, paths):
                    held[connection.fileno()] = connection
                else:
                    connection.close()
    return list(held.values())


def wait_until_read(held: list[socket.socket], deadline_s: float) -> bool:
    """Wait until the peers have read what was sent to them, at most until ``deadline_s`` (monotonic), and close the duplicates.

    Returns whether everything was read.
    """
    waiting = list(held)
    try:
        while waiting := [each for each in waiting if _num_unread_bytes(each)]:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True
    finally:
        for each in held:
            each.close()


def _is_accepted(connection: socket.socket, paths: Collection[str]) -> bool:
    return (
        connection.family == socket.AF_UNIX
        and connection.getsockname() in paths
        and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _num_unread_bytes(connection: socket.socket) -> int:
    """Bytes, with the kernel's own for each packet, that were sent and not read; none if the peer is gone."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    except OSError:
        return 0
    return count[0]
