"""What may stand for token ids: whole numbers in an order, whoever's they are; not what Python or NumPy merely count as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from numbers import Integral


def checked_ids(ids: Iterable[int]) -> Iterable[int]:
    """The ids, which are ints, or of another type that is a whole number (NumPy's integers, tensors of one).

    Raises:
        TypeError: bytes, a mapping, or one of them is no whole number: a truth value, a float, a text.
    """
    if isinstance(ids, bytes | bytearray | memoryview | str | Mapping) or not isinstance(ids, Iterable):
        hint = "" if isinstance(ids, str) else "; of text, give a str"
        raise TypeError(f"{type(ids).__name__} is not a sequence of token ids{hint}")
    known = ids if isinstance(ids, Sized) else list(ids)  # an iterator is read once
    kinds = set(map(type, known))
    suspects = tuple(kind for kind in kinds if issubclass(kind, bool) or not issubclass(kind, Integral))
    if suspects:
        for place, value in enumerate(known):
            if isinstance(value, suspects) and not _is_whole(value):
                raise TypeError(f"token id {place} is {value!r:.40}, of type {type(value).__name__}; it must be an int")
    return known


def _is_whole(value: object) -> bool:
    """Of a value of none of the types that are known to be whole numbers: a tensor of one has its type within."""
    return not isinstance(value, bool) and hasattr(type(value), "__index__") and "bool" not in str(getattr(value, "dtype", ""))
