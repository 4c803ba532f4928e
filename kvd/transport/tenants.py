"""Whose a connection is: by its CURVE key (the user id that the ZAP answer gave it) or, on ipc, by the kernel's credentials of the peer.

Both reach the server as metadata of each message, which libzmq fills in before anything that the peer itself states in its handshake: a property of the
same name from the peer is not taken over. A connection whose owner can't be told is not served.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvd.transport.errors import TenantUnknownError

_USER_ID_PREFIX = "tenant="
_IPC_ADDRESS = re.compile(r"[^:]*:(\d+):\d+:\d+")
"""libzmq's address of a Unix peer: ``localhost:UID:GID:PID`` (SO_PEERCRED)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a conversation is held with. ``tenant`` is empty for a client that none is known of.

    ``is_operator``: it may name another tenant than its own where an operation takes one (``forget``), and, though a tenant's, drain and checkpoint.
    """

    tenant: str = ""
    is_operator: bool = False

    def qualified(self, name: str) -> str:
        """A pin's name as the engine and the disk know it: ``TENANT/NAME``; without a tenant the name itself."""
        return f"{self.tenant}/{name}" if self.tenant else name


def user_id(tenant: str) -> str:
    """The ZAP user id of a key; never empty, so that a peer can't state one itself."""
    return _USER_ID_PREFIX + tenant


def caller_of_user_id(text: str) -> Caller:
    """Whom a message with this user id is from.

    Raises:
        TenantUnknownError: it is none that ``user_id`` made.
    """
    if not text.startswith(_USER_ID_PREFIX):
        raise TenantUnknownError(f"a message with the user id {text!r:.80}")
    return Caller(text.removeprefix(_USER_ID_PREFIX))


def caller_of_ipc_peer(address: str, own_uid: int) -> Caller:
    """Whom a message from a Unix socket is from, each user a tenant; root and the daemon's own user are the operators.

    Raises:
        TenantUnknownError: libzmq could not read the peer's credentials.
    """
    match = _IPC_ADDRESS.fullmatch(address)
    if match is None:
        raise TenantUnknownError(f"a Unix peer without credentials: {address!r:.80}")
    uid = int(match[1])
    return Caller(f"uid:{uid}", is_operator=uid in {0, own_uid})
