"""The storage room's named errors. Only ``StateLockedError``, ``UnknownFormatError`` and ``RecipesUnreadableError`` stop a start."""

from __future__ import annotations


class StorageError(Exception):
    """The storage room's base error."""


class StateLockedError(StorageError):
    """Another process holds the state directory; the message names it."""


class UnknownFormatError(StorageError):
    """A file of a format that this version does not know. It is neither read on nor overwritten."""


class RecipesUnreadableError(StorageError):
    """Neither generation of the recipes can be read: going on would lose acknowledged pins."""


class StoreDamagedError(StorageError):
    """A store generation that must not be opened or read any further; it is set aside."""


class StoreFullError(StorageError):
    """The disk or the map is full. The generation is as of its last commit; nothing is wrong with it."""


class StoreMapFullError(StoreFullError):
    """The map, that is the store's own budget, is full; the disk is not."""
