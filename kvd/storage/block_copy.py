"""Copying a block's bytes without holding the interpreter's lock: a slice assignment of a memoryview keeps it for the whole copy, and every other thread waits."""

from __future__ import annotations


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` into the writable ``target`` of the same length.

    Raises:
        ValueError: the lengths differ.
    """
    from numpy import copyto, frombuffer, uint8  # here, for those who use the codec's keys alone and have no numpy

    copyto(frombuffer(target, dtype=uint8), frombuffer(source, dtype=uint8), casting="no")
