"""The failing layer between a daemon and its disk (``fail_io.c``), and how a test tells it what fails while the daemon runs."""

from __future__ import annotations

import errno as errno_names
import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fail_io.c")
NO_COMPILER = "" if shutil.which("cc") else "needs a C compiler (cc)"

CLASSES = {"write": 1, "sync": 2, "open": 4, "rename": 8, "allocate": 16, "mkdir": 32, "map": 64, "unlink": 128, "open_read": 256}
_MODES = {"always": 0, "nth": 1, "every": 2, "from": 3}
_RULE = struct.Struct("<IIIIQQQ256s64s")
_NUM_RULES = 8


def build(folder: Path) -> Path:
    """The layer as a shared library in ``folder``."""
    library = folder / "fail_io.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


class FailLayer:
    """``env`` is for the process whose calls are to fail; ``arm`` and ``clear`` act on it at once."""

    def __init__(self, folder: Path, state_dir: Path) -> None:
        control = folder / "fail_io.rules"
        control.write_bytes(bytes(_RULE.size * _NUM_RULES))
        self.env = {"LD_PRELOAD": str(build(folder)), "FAIL_IO_CONTROL": str(control)}
        self._state_dir = state_dir
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RULE.size * _NUM_RULES)

    def arm(self, errno: int, *classes: str, under: str = "", part: str = "", mode: str = "always", number: int = 1, rule: int = 0) -> None:
        """Calls of ``classes`` on paths of the state directory that begin with ``under`` and contain ``part`` fail with ``errno``."""
        assert classes
        bits = sum(CLASSES[each] for each in classes)
        prefix = str(self._state_dir / under) if under else str(self._state_dir)
        self._disarm(rule)
        values = (0, bits, errno, _MODES[mode], number, 0, 0, prefix.encode(), part.encode())
        _RULE.pack_into(self._memory, rule * _RULE.size, *values)
        struct.pack_into("<I", self._memory, rule * _RULE.size, 1)

    def clear(self) -> None:
        for rule in range(_NUM_RULES):
            self._disarm(rule)

    def num_failed(self, rule: int = 0) -> int:
        """Calls that have failed since the rule was armed."""
        return int(_RULE.unpack_from(self._memory, rule * _RULE.size)[6])

    def _disarm(self, rule: int) -> None:
        struct.pack_into("<I", self._memory, rule * _RULE.size, 0)


def name(errno: int) -> str:
    """As a status names it."""
    return errno_names.errorcode[errno].lower()
