"""CURVE keys and ZAP (ZeroMQ RFC 27): which client keys may connect, and as whose. Pure; the server moves the frames."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.cache.tenants import TENANT_NAME
from kvd.transport.errors import EndpointError
from kvd.transport.tenants import user_id

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "kvd"
"""Must be equal on both sides: an authenticator for another domain refuses everybody."""

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_DIGITS = {character: value for value, character in enumerate(_Z85)}
_Z85_KEY_CHARS = 40
_CERTIFICATE_LINE = re.compile(r'\s*secret-key\s*=\s*"(.{40})"\s*')


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The daemon's secret key and the public keys (32 bytes each) of its clients, with the tenant of each (empty: none)."""

    secret: bytes
    """As Z85 text, which is what the socket option takes."""
    tenants: Mapping[bytes, str]


def load_curve_keys(key_file: str, clients_file: str) -> CurveKeys | None:
    """Read the key files; None if there are none.

    Raises:
        EndpointError: one is missing, unreadable, readable for everybody, or not what it should be.
    """
    if not key_file and not clients_file:
        return None
    if not key_file or not clients_file:
        raise EndpointError("CURVE needs both curve_key_file and curve_clients_file: without a list of clients anybody could connect")
    return CurveKeys(_read_secret(Path(key_file)), _read_allowed(Path(clients_file)))


def answer_zap(frames: Sequence[bytes], tenants: Mapping[bytes, str]) -> tuple[list[bytes], bool]:
    """The reply to a ZAP request, with the user id of the key's tenant, and whether it lets the client in.

    A request has the frames version, request id, domain, address, identity, mechanism and credentials; for CURVE one
    credential, the client's public key.
    """
    request_id = frames[1] if len(frames) > 1 else b""
    is_welcome = (
        len(frames) == 7 and frames[0] == b"1.0" and frames[2] == ZAP_DOMAIN.encode() and frames[5] == b"CURVE" and frames[6] in tenants
    )
    if is_welcome:
        return [b"1.0", request_id, b"200", b"OK", user_id(tenants[frames[6]]).encode(), b""], True
    return [b"1.0", request_id, b"400", b"this key is not on the list", b"", b""], False


def decode_z85_key(text: str) -> bytes:
    """A 32-byte key from its 40 characters (ZeroMQ RFC 32).

    Raises:
        ValueError: not a Z85 key.
    """
    if len(text) != _Z85_KEY_CHARS or any(character not in _DIGITS for character in text):
        raise ValueError("not a Z85 key of 40 characters")
    key = b""
    for start in range(0, _Z85_KEY_CHARS, 5):
        value = 0
        for character in text[start : start + 5]:
            value = value * 85 + _DIGITS[character]
        if value >= 1 << 32:
            raise ValueError("not a Z85 key: a group of five characters exceeds 32 bits")
        key += value.to_bytes(4, "big")
    return key


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise EndpointError(f"{what} {path}: {error}") from error


def _read_secret(path: Path) -> bytes:
    """One Z85 line, or a certificate as czmq and pyzmq write it."""
    text = _read(path, "curve_key_file")
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise EndpointError(f"curve_key_file {path}: everybody can read this secret; chmod o= it")
    for line in text.splitlines():
        certificate = _CERTIFICATE_LINE.fullmatch(line)
        candidate = certificate.group(1) if certificate else line.strip()
        try:
            decode_z85_key(candidate)
        except ValueError:
            continue
        return candidate.encode()
    raise EndpointError(f"curve_key_file {path}: holds no Z85 secret key")


def _read_allowed(path: Path) -> dict[bytes, str]:
    """``KEY``, or ``KEY TENANT``, a line: a Z85 public key and the name of its tenant. What follows a word that begins with ``#`` is a comment."""
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(_read(path, "curve_clients_file").splitlines(), 1):
        where = f"curve_clients_file {path}, line {number}"
        words = line.split()
        if not words or (words[0].startswith("#") and len(words[0]) != _Z85_KEY_CHARS):
            continue
        try:
            key = decode_z85_key(words[0])
        except ValueError as error:
            raise EndpointError(f"{where}: {error}") from error
        name, *rest = words[1:] or ("",)
        tenant = "" if name.startswith("#") else name
        if tenant and (not TENANT_NAME.fullmatch(tenant) or (rest and not rest[0].startswith("#"))):
            raise EndpointError(
                f"{where}: after the key comes the tenant's name, 1 to 64 letters, digits or . _ @ + - (or nothing), and then a comment that begins with #"
            )
        if tenants.setdefault(key, tenant) != tenant:
            raise EndpointError(f"{where}: the key is already another tenant's")
    return tenants
