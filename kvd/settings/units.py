"""Sizes and times as people write and read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of ``512MiB``, ``2GiB``, ``1.5 GiB`` or a plain number.

    Raises:
        ValueError: no size, or a decimal unit such as MB, whose meaning people disagree about.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size; write plain bytes or KiB, MiB, GiB, TiB, as in 512MiB")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_size(num_bytes: int) -> str:
    """The exact size in its largest whole unit, as ``parse_size`` reads it: 2147483648 is ``2GiB``, 1000 is ``1000``."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def human_size(num_bytes: float) -> str:
    """A size to read, rounded: ``1.4 GiB``."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def human_duration(seconds: float) -> str:
    """A time to read, in its two largest units: ``2d 4h``, ``3m 20s``, ``0.8s``."""
    if seconds < 60:
        return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.1f}s"
    parts: list[str] = []
    rest = int(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
