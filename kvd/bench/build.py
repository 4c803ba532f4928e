"""Which code is measured: the content of the packages, and the commit that they were checked out of."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import kvd_client

_PACKAGE = Path(__file__).parents[1]
"""kvd itself: the bench is one of its rooms, and need not load what the package offers to applications."""
_HEX_DIGITS = 12


def build() -> str:
    """The same for the same sources and native kernels, whatever commit they are of and however they were installed."""
    digest = hashlib.sha256()
    for root in (_PACKAGE, Path(str(kvd_client.__file__)).parent):
        for path in sorted(path for path in root.rglob("*") if path.suffix in {".py", ".so"}):
            digest.update(hashlib.sha256(str(path.relative_to(root)).encode()).digest() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_HEX_DIGITS]


def commit() -> str:
    """The commit of the checkout that kvd runs from, with ``+`` where its code differs from that; empty outside of one."""
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return ""
    found = _git(root, "rev-parse", "--short", "HEAD")
    return f"{found}+" if found and _git(root, "status", "--porcelain", "--", "kvd", "clients") else found


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
