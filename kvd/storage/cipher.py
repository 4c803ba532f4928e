"""AES-256-GCM, from the package ``cryptography``: the only module that imports it, and only once a key is used."""

from __future__ import annotations

from typing import Any

from kvd.config import ConfigError
from kvd.extras import how_to_install

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16


class SealBrokenError(Exception):
    """These are not the bytes that were sealed with this key, nonce and place."""


class Cipher:
    """One key. A nonce must never be used twice with it; that is the caller's to see to. May be used from any thread.

    Raises:
        ConfigError: the package is not installed.
    """

    __slots__ = ("_aead",)

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            message = "storage.store_encryption_key_file: encryption needs the package cryptography, which is not installed"
            raise ConfigError(f"{message}: {how_to_install('encryption')}") from error
        self._aead: Any = AESGCM(key)

    def seal(self, nonce: bytes, data: bytes, place: bytes) -> bytes:
        """Ciphertext and tag of ``data``; ``place`` is authenticated and not stored."""
        sealed: bytes = self._aead.encrypt(nonce, data, place)
        return sealed

    def open(self, nonce: bytes, sealed: bytes | memoryview, place: bytes) -> bytes:
        """What ``seal`` was given.

        Raises:
            SealBrokenError: it is not what was sealed.
        """
        from cryptography.exceptions import InvalidTag

        try:
            data: bytes = self._aead.decrypt(nonce, sealed, place)
        except InvalidTag as error:
            raise SealBrokenError from error
        return data

    def seal_into(self, nonce: bytes, data: memoryview, place: bytes, out: memoryview) -> None:
        """``seal`` into memory of ``TAG_BYTES`` more than the data."""
        self._aead.encrypt_into(nonce, data, place, out)

    def open_into(self, nonce: bytes, sealed: memoryview, place: bytes, out: memoryview) -> None:
        """``open`` into memory of ``TAG_BYTES`` less; what stands there after an error must not be used.

        Raises:
            SealBrokenError: it is not what was sealed.
        """
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(nonce, sealed, place, out)
        except InvalidTag as error:
            raise SealBrokenError from error
