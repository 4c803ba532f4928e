"""Frames to messages and back, within limits: a msgpack header and raw body frames.

The header is read in two steps: msgpack with bounds on every size, then ``msgspec.convert`` to the typed struct, so that a
hostile header costs its own length at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import msgspec

from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import MAX_HEADER_BYTES, MAX_NESTING, ClientMessage, Message, ServerMessage

_MAX_ITEMS = 4096
_BYTES_ARE_BIN = (bytes,)
"""To msgspec a ``str`` may stand for ``bytes``, as base64; with bytes as a type of its own it may not."""
_CLIENT_TYPES = frozenset(struct.__struct_config__.tag for struct in ClientMessage.__args__)
_SERVER_TYPES = frozenset(struct.__struct_config__.tag for struct in ServerMessage.__args__)


class ProtocolError(Exception):
    """A message that can't be understood. ``header`` is what could be read of it, for the answer's ids."""

    def __init__(self, code: Code, message: str, header: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.header = header or {}


def encode(message: Message, *bodies: bytes) -> list[bytes]:
    """The frames of a message.

    Raises:
        ProtocolError: the header is longer than ``MAX_HEADER_BYTES``.
    """
    header = msgspec.msgpack.encode(message)
    if header[:2] == b"\xde\x00" and header[2] < 16:  # a struct of more than 15 fields, most of them left out: the short form says the same
        header = bytes((0x80 | header[2],)) + header[3:]
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(Code.TOO_LARGE, f"header of {len(header)} bytes, the limit is {MAX_HEADER_BYTES}; move data to the body")
    return [header, *bodies]


def decode_client(frames: Sequence[bytes]) -> tuple[ClientMessage, list[bytes]]:
    """A client's message and its bodies.

    Raises:
        ProtocolError: with the code that the answer carries.
    """
    header = _header(frames, _CLIENT_TYPES)
    return _convert(header, ClientMessage), list(frames[1:])


def decode_server(frames: Sequence[bytes]) -> tuple[ServerMessage, list[bytes]]:
    """A daemon's message and its bodies.

    Raises:
        ProtocolError: the daemon speaks something else.
    """
    header = _header(frames, _SERVER_TYPES)
    return _convert(header, ServerMessage), list(frames[1:])


def pack_body(data: Any) -> bytes:
    """A structured body (chat messages, an operation's result) as msgpack."""
    return msgspec.msgpack.encode(data)


def unpack_body(body: bytes, *, max_items: int = 65536) -> Any:
    """Read a structured body.

    Raises:
        ProtocolError: not msgpack, more items in one array or map than ``max_items``, or nested deeper than ``MAX_NESTING``.
    """
    return _unpack(body, max_items)


def nests_deeper(value: Any, max_levels: int) -> bool:
    """Whether arrays and maps lie in each other more than ``max_levels`` deep. Goes level by level: no depth of the value costs stack."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(max_levels):
        if not level:
            return False
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
    return bool(level)


def _header(frames: Sequence[bytes], known_types: frozenset[object]) -> dict[str, Any]:
    if not frames:
        raise ProtocolError(Code.BAD_REQUEST, "a message without frames")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError(Code.TOO_LARGE, f"header of {len(frames[0])} bytes, the limit is {MAX_HEADER_BYTES}")
    header = _unpack(frames[0], _MAX_ITEMS)
    if not isinstance(header, dict):
        raise ProtocolError(Code.BAD_REQUEST, "the header is not a map")
    kind = header.get("type")
    if not isinstance(kind, str) or kind not in known_types:
        raise ProtocolError(Code.UNKNOWN_TYPE, f"unknown message type {kind!r:.60}", header)
    return header


def _unpack(data: bytes, max_items: int) -> Any:
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, max_array_len=max_items, max_map_len=max_items, max_ext_len=0)
    except Exception as error:  # msgpack raises six unrelated classes; each means the same here
        raise ProtocolError(Code.BAD_REQUEST, f"not a msgpack message: {type(error).__name__}") from error
    if nests_deeper(value, MAX_NESTING):
        header = value if isinstance(value, dict) else None
        raise ProtocolError(Code.BAD_REQUEST, f"arrays and maps nest more than {MAX_NESTING} deep", header)
    return value


def _convert(header: dict[str, Any], union: Any) -> Any:
    try:
        return msgspec.convert(header, union, builtin_types=_BYTES_ARE_BIN)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(Code.BAD_REQUEST, f"bad {header['type']} message: {error}", header) from error
