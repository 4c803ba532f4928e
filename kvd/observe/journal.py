"""journald's native protocol: a record as fields in one datagram.

Source: "Native Journal Protocol", systemd documentation.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
from collections.abc import Mapping
from typing import Any

JOURNAL_SOCKET = "/run/systemd/journal/socket"
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "exception": 3, "critical": 2}


class JournalSocket:
    """Sends records to the journal. Never blocks: what the journal does not take is counted and told with the next record it takes."""

    def __init__(self, path: str = JOURNAL_SOCKET) -> None:
        self._path = path
        self._num_dropped = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def render(self, event: Mapping[str, Any]) -> bytes:
        """The datagram of a structlog record: ``event`` becomes MESSAGE, each other key ``KVD_<KEY>``."""
        message = str(event.get("event", ""))
        details = " ".join(f"{key}={value}" for key, value in event.items() if key not in {"event", "level", "exception", "stack"})
        text = f"{message} {details}" if details else message
        if "exception" in event:
            text += f"\n{event['exception']}"
        fields = {"MESSAGE": text, "PRIORITY": str(_PRIORITIES.get(str(event.get("level")), 6)), "SYSLOG_IDENTIFIER": "kvd"}
        fields |= {_field_name(key): str(value) for key, value in event.items() if key != "level"}
        if self._num_dropped:
            fields["KVD_DROPPED_RECORDS"] = str(self._num_dropped)
        return b"".join(_field(name, value) for name, value in fields.items())

    def send(self, datagram: bytes) -> None:
        """Hand one record over; one that is longer than a datagram goes as a sealed memory file."""
        try:
            self._socket.sendto(datagram, self._path)
        except OSError as error:
            if error.errno not in {errno.EMSGSIZE, errno.ENOBUFS} or not self._send_as_file(datagram):
                self._num_dropped += 1
                return
        self._num_dropped = 0

    def close(self) -> None:
        self._socket.close()

    def _send_as_file(self, record: bytes) -> bool:
        descriptor = os.memfd_create("kvd-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(descriptor, record)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            self._socket.sendmsg([], [rights], 0, self._path)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def _field_name(key: str) -> str:
    name = "".join(character if character.isascii() and character.isalnum() else "_" for character in key.upper())
    return f"KVD_{name}"[:64]


def _field(name: str, value: str) -> bytes:
    data = value.encode("utf-8", "replace")
    if b"\n" in data:
        return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
    return name.encode() + b"=" + data + b"\n"
