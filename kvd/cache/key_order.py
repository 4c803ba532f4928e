"""Byte strings in their order: who stands beside a given one. Adding, removing and asking are O(log n), but for moving the pointers of one chunk and of the list of chunks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

_CHUNK_KEYS = 512


class KeyOrder:
    """Distinct keys in chunks of at most twice ``_CHUNK_KEYS``, none empty. The keys are references to the caller's, so that each costs one pointer."""

    __slots__ = ("_chunks", "_firsts")

    def __init__(self) -> None:
        self._chunks: list[list[bytes]] = []
        self._firsts: list[bytes] = []

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def add(self, key: bytes) -> None:
        """A key that is not there yet."""
        if not self._chunks:
            self._chunks.append([key])
            self._firsts.append(key)
            return
        at = max(0, bisect_right(self._firsts, key) - 1)
        chunk = self._chunks[at]
        insort(chunk, key)
        self._firsts[at] = chunk[0]
        if len(chunk) > 2 * _CHUNK_KEYS:
            self._chunks.insert(at + 1, chunk[_CHUNK_KEYS:])
            self._firsts.insert(at + 1, chunk[_CHUNK_KEYS])
            del chunk[_CHUNK_KEYS:]

    def remove(self, key: bytes) -> None:
        """A key that is there."""
        at = bisect_right(self._firsts, key) - 1
        chunk = self._chunks[at]
        place = bisect_left(chunk, key)
        assert chunk[place] == key, "a key that is not there"
        del chunk[place]
        num_together = len(chunk) + len(self._chunks[at - 1])
        if not chunk or (at and num_together <= _CHUNK_KEYS):
            if chunk:
                self._chunks[at - 1] += chunk
            del self._chunks[at], self._firsts[at]
        else:
            self._firsts[at] = chunk[0]

    def beside(self, key: bytes) -> tuple[bytes, ...]:
        """The last key before ``key`` and the first one from it on, as far as there are such. Of all keys one of these has the longest common beginning with it."""
        at = bisect_right(self._firsts, key) - 1
        before: tuple[bytes, ...] = ()
        if at >= 0:
            chunk = self._chunks[at]
            place = bisect_left(chunk, key)
            if place < len(chunk):
                return tuple(chunk[max(0, place - 1) : place + 1])
            before = (chunk[-1],)
        return (*before, self._firsts[at + 1]) if at + 1 < len(self._firsts) else before

    def keys(self) -> list[bytes]:
        """All of them in order, for audits."""
        assert self._firsts == [chunk[0] for chunk in self._chunks], "a chunk is filed under another key"
        return [key for chunk in self._chunks for key in chunk]
