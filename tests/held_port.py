"""A TCP port of 127.0.0.1 for a server that a test starts, held until that listens and after."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """``number`` goes to no other socket that lets the kernel choose, as it could if the one that found it were closed.

    The socket is bound and does not listen: a server that sets SO_REUSEADDR, as libzmq's and the gateway's do, binds and listens beside it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
