"""What the pages of the persistence benchmarks are made of: the commit that was measured, and sections that several benchmarks write."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The checkout's commit, for whoever wants to measure the same again."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or "unknown"


def write_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of section ``name`` of a Markdown file that several benchmarks write, making both if need be."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    whole = path.read_text() if path.exists() else f"{_HEAD}\n{begin}\n{end}\n"
    if begin not in whole:
        whole = f"{whole.rstrip()}\n\n{begin}\n{end}\n"
    before, _, rest = whole.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


_HEAD = """# Benchmarks of persistence

Written by `make bench-persistence` and `make bench-rehydrate`; nothing here is typed by hand. Figures of one machine that others share: compare ratios, not
absolute times.
"""
