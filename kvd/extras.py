"""How the optional parts of kvd's dependencies are installed."""

from __future__ import annotations

import shlex
import sys


def how_to_install(extra: str) -> str:
    """The command that adds an extra of pyproject.toml, for the end of an error's message.

    It installs from kvd's checkout, for kvd is not on package indexes: what they have under its name is something else.
    """
    return f"in kvd's checkout run {shlex.quote(sys.executable)} -m pip install '.[{extra}]'"
