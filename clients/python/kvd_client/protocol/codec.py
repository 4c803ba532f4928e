"""Frames to messages and back, within limits: a msgpack header and raw body frames.

The header is read in two steps: msgpack with bounds on every size, then ``msgspec.convert`` to the typed struct, so that a
hostile header costs its own length at most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgpack
import msgspec

from kvd_client.protocol.codes import Code
from kvd_client.protocol.messages import MAX_HEADER_BYTES, MAX_NESTING, ClientMessage, Message, ServerMessage

_MAX_ITEMS = 4096
_BYTES_ARE_BIN = (bytes,)
"""To msgspec a ``str`` may stand for ``bytes``, as base64; with bytes as a type of its own it may not."""
_TOO_MANY = re.compile(r"(\d+) exceeds max_(array|map)_len")
_CLIENT_TYPES = frozenset(struct.__struct_config__.tag for struct in ClientMessage.__args__)
_SERVER_TYPES = frozenset(struct.__struct_config__.tag for struct in ServerMessage.__args__)


class _Ids(msgspec.Struct):
    """Of any header; decoding it builds nothing of the rest."""

    request_id: bytes = b""
    op_id: bytes = b""


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


def check(message: Message) -> None:
    """See to it that the other side will read a message's header: what ``encode`` sends without a look at its values.

    Raises:
        ProtocolError: it is beyond one of the limits that ``decode_client`` and ``decode_server`` have.
    """
    _read_header(encode(message)[0])


def ids_in(frames: Sequence[bytes]) -> dict[str, Any]:
    """The ids of a message whose header can't be read otherwise, for the answer; empty if it is too long for that, too."""
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        return {}
    try:
        return msgspec.structs.asdict(msgspec.msgpack.decode(frames[0], type=_Ids))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


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
    header = _read_header(frames[0])
    kind = header.get("type")
    if not isinstance(kind, str) or kind not in known_types:
        raise ProtocolError(Code.UNKNOWN_TYPE, f"unknown message type {kind!r:.60}", header)
    return header


def _read_header(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(Code.TOO_LARGE, f"header of {len(data)} bytes, the limit is {MAX_HEADER_BYTES}")
    try:
        header = _unpack_within(data, _MAX_ITEMS)
    except Exception as error:
        raise ProtocolError(Code.BAD_REQUEST, f"{_field_at_fault(data)} {_complaint(error)}", ids_in([data])) from error
    if not isinstance(header, dict):
        raise ProtocolError(Code.BAD_REQUEST, "the header is not a map")
    _check_nesting(header)
    return header


def _unpack(data: bytes, max_items: int) -> Any:
    try:
        value = _unpack_within(data, max_items)
    except Exception as error:
        raise ProtocolError(Code.BAD_REQUEST, f"the body {_complaint(error)}") from error
    _check_nesting(value)
    return value


def _unpack_within(data: bytes | msgspec.Raw, max_items: int) -> Any:
    """Raises six unrelated classes; each means that it is not what it should be."""
    return msgpack.unpackb(data, raw=False, strict_map_key=True, max_array_len=max_items, max_map_len=max_items, max_ext_len=0)


def _check_nesting(value: Any) -> None:
    if nests_deeper(value, MAX_NESTING):
        header = value if isinstance(value, dict) else None
        raise ProtocolError(Code.BAD_REQUEST, f"arrays and maps nest more than {MAX_NESTING} deep", header)


def _complaint(error: Exception) -> str:
    """What is wrong, for whoever made the message, in msgpack's words where they say more than its limits' names."""
    text = str(error)
    if found := _TOO_MANY.match(text):
        kind = "an array" if found[2] == "array" else "a map"
        return f"has {kind} of {found[1]} items; the limit is {text[found.end() :].strip('()')}"
    if "max_ext_len" in text:
        return "has a value of an extension type; there are none on this wire"
    if "strict_map_key" in text:
        return "has a map with a key that is no string"
    return f"is not msgpack: {type(error).__name__}"


def _field_at_fault(data: bytes) -> str:
    """The header's field that can't be read; of ``sampling`` the one in it."""
    name = "the header"
    for _ in range(2):
        try:
            fields = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            break
        faulty = next(((key, raw) for key, raw in fields.items() if not _is_readable(raw)), None)
        if faulty is None:
            break
        name, data = f"{faulty[0]:.40}", bytes(faulty[1])
        if name != "sampling":
            break
    return name


def _is_readable(raw: msgspec.Raw) -> bool:
    try:
        _unpack_within(raw, _MAX_ITEMS)
    except Exception:
        return False
    return True


def _convert(header: dict[str, Any], union: Any) -> Any:
    try:
        return msgspec.convert(header, union, builtin_types=_BYTES_ARE_BIN)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(Code.BAD_REQUEST, f"bad {header['type']} message: {error}", header) from error
